"""``isolated_rng``, and a word about tails that would need it."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from iterators import CFIterator, ResumableDataLoader, isolated_rng
from iterators.testing import FakeManager
from tests.contract.runs import generator_bits
from tests.iterators.datasets import Plain


def draw() -> tuple[float, float, float]:
    return float(torch.randn(())), random.gauss(0, 1), float(np.random.standard_normal())


def test_the_block_moves_no_global_generator_and_begins_with_their_own_numbers() -> None:
    before = generator_bits()
    with isolated_rng():
        inside = draw()
        torch.manual_seed(3)
        random.seed(3)
        np.random.seed(3)
    assert generator_bits() == before
    assert draw() == inside
    before = generator_bits()
    with pytest.raises(KeyError), isolated_rng():
        draw()
        raise KeyError
    assert generator_bits() == before


def test_it_is_a_decorator_that_may_be_called_again_and_nested() -> None:
    @isolated_rng()
    def validate(depth: int) -> list[Any]:
        return [draw(), *(validate(depth - 1) if depth else [])]

    before = generator_bits()
    assert validate(2) == validate(2)
    assert generator_bits() == before


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_process_forked_in_the_block_keeps_its_own_numbers() -> None:
    torch.manual_seed(1)
    with isolated_rng():
        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
        else:
            torch.manual_seed(2)
    if not child:
        os._exit(torch.initial_seed())
    assert os.waitstatus_to_exitcode(status) == 2
    assert torch.initial_seed() == 1


def trained(validate: Callable[[int], object], caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings of three epochs, each with a tail."""
    manager = FakeManager()
    iterator = CFIterator(ResumableDataLoader(Plain(4), 2), cf_manager=manager)
    for epoch in iterator.epochs(4):
        for _ in iterator:
            manager.weight_update()
        validate(epoch)
    return [record.message for record in caplog.records if record.levelname == "WARNING"]


def test_a_tail_that_draws_only_the_first_time_is_warned_about_once_with_advice(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loader = DataLoader(Plain(4), 2, num_workers=1, persistent_workers=True)
    (warning,) = trained(lambda epoch: list(loader), caplog)
    assert "`with isolated_rng():`" in warning
    assert "persistent_workers=True" in warning


@pytest.mark.parametrize("kind", ["isolated", "own generator"])
def test_a_tail_that_draws_nothing_or_in_every_epoch_is_not_warned_about(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    own = torch.Generator() if kind == "own generator" else None
    workers = {"num_workers": 1, "persistent_workers": True} if kind == "isolated" else {}
    loader = DataLoader(Plain(4), 2, generator=own, **workers)

    def validate(_: int) -> None:
        list(loader)

    assert not trained(isolated_rng()(validate) if kind == "isolated" else validate, caplog)
