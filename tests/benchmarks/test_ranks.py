"""Which process a launcher started, and what one process alone does without any other."""

from __future__ import annotations

import argparse

import pytest
import torch
from torch import nn

from checkfreq.examples.imagenet.ranks import Ranks, joined


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Ranks:
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    return Ranks.launched()


def test_the_rank_is_read_from_the_launchers_environment(launched: Ranks) -> None:
    assert launched == Ranks(rank=5, world=8, local_rank=1)
    assert (launched.is_alone, launched.is_first) == (False, False)


def test_each_rank_has_the_device_of_its_number_on_the_machine(launched: Ranks) -> None:
    assert launched.device("cuda") == torch.device("cuda:1")
    assert launched.device("cuda:3") == torch.device("cuda:3")
    assert launched.device("cpu") == torch.device("cpu")
    assert Ranks().device("cuda") == torch.device("cuda")


def test_a_single_process_starts_no_process_group() -> None:
    args = argparse.Namespace(device="cpu", quiet=False)
    with joined(args) as ranks:
        assert ranks == Ranks()
        assert not torch.distributed.is_initialized()
        model = nn.Linear(1, 1)
        assert ranks.wrap(model) is model
        assert ranks.summed(1, 2.5) == [1, 2.5]
        ranks.meet()
        ranks.share_buffers(model)
    assert args == argparse.Namespace(device="cpu", quiet=False)
