"""Several ranks, killed at random instants and resumed, end with the bits of a run never killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.rank_killing import run_killed
from tests.acceptance.sizes import sized
from tests.patience import slowness

pytestmark = [pytest.mark.crash, pytest.mark.dist]

CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "DDP of two": (2, {"job": "ddp"}),
    "DDP of three, unused parameters looked for": (3, {"job": "ddp", "batch": 3}),
    "DDP of three, after two throwaway passes": (3, {"job": "ddp", "batch": 3, "throwaway": True}),
    "DDP, buffers of each rank's own": (2, {"job": "ddp", "own_buffers": True}),
    "DDP, gradients not yet exchanged carried over boundaries": (
        2,
        {"job": "ddp", "accumulate": 4, "chk_freq": 1},
    ),
    "DDP, state divided among the ranks": (
        2,
        {"job": "ddp", "config": {"split_replicated": True}},
    ),
    "DDP, a directory for each rank": (2, {"job": "ddp", "local": True}),
    "FSDP2": (2, {"job": "fsdp", "chk_freq": 1}),
    "FSDP2 and DDP in one tree": (2, {"job": "mixed"}),
    "FSDP2, a tree of records": (2, {"job": "fsdp", "config": {"tree_from_ranks": 2}}),
    "DDP, a tree, state divided": (
        2,
        {"job": "ddp", "config": {"tree_from_ranks": 2, "split_replicated": True}},
    ),
    "FSDP2, a directory for each rank": (2, {"job": "fsdp", "local": True}),
}


@pytest.mark.parametrize("name", sized(CASES, smoke=("DDP of two", "FSDP2").__contains__))
def test_killed_ranks_end_with_the_bits_of_a_run_never_killed(name: str, tmp_path: Path) -> None:
    world, settings = CASES[name]
    # A successor may wait so long for parts that nobody will write any more.
    short = {"rank_timeout_s": 4.0 * slowness()}
    settings = {**settings, "config": {**short, **settings.get("config", {})}}
    assert run_killed(tmp_path, world=world, seed=2, **settings) >= 2
