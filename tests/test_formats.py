"""Every format version that was ever written stays readable."""

from __future__ import annotations

import torch

import checkfreq
from tests.fixtures import make_format_1


def test_the_fixture_of_format_1_loads_with_everything_in_it() -> None:
    state = checkfreq.load(make_format_1.FOLDER)

    assert sorted(state) == ["extra", "model", "optimizer", "rng", "scheduler"]
    assert state["extra"] == {"best": float("inf"), "seen": (1, 2), 7: b"\x00bytes", "none": None}
    assert state["model"]["tied"] is state["model"]["0.weight"]
    assert state["model"]["narrow"].dtype == torch.bfloat16
    assert state["model"]["1.num_batches_tracked"].item() == 2
    assert state["scheduler"]["last_epoch"] == 2


def test_the_fixture_of_format_1_goes_into_live_objects() -> None:
    tracked = make_format_1.objects()

    state = checkfreq.load(make_format_1.FOLDER, into=tracked)

    for name, tensor in tracked["model"].state_dict().items():
        assert torch.equal(tensor, state["model"][name])
    assert tracked["optimizer"].state[tracked["model"].narrow]["step"].item() == 2
