"""Signals to every process, as SLURM's: loader workers die, and the run stops all the same."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.stops.aiming import Case, Instant
from tests.stops.program import BATCH_SIZE
from tests.stops.stopping import Run, check, run_whole
from tests.stops.zygote import Zygote

pytestmark = [pytest.mark.crash, pytest.mark.dist]


def test_ranks_whose_loader_workers_are_killed_go_on_to_the_boundary_at_which_all_stop(
    zygote: Zygote, tmp_path: Path
) -> None:
    """One rank waits for a batch, the other for its gradients: neither can stop where it is."""
    case = Case(world=2, workers=2, to="everything")
    whole = run_whole(zygote, tmp_path / "whole", case)
    run = Run(zygote, tmp_path / "run", case)
    # Each of two workers is held in its fifth batch; the rank waits once it has used eight.
    instant = Instant("place", rank=1, where="fetch", hit=5 * BATCH_SIZE, chk_freq=1000)

    def wait_for_the_rank() -> None:
        end_s = time.monotonic() + 60.0
        while (run.folder / "events-1-1").read_text().count('["loss"') < 8:
            assert time.monotonic() < end_s
            time.sleep(0.01)
        time.sleep(0.3)  # it goes from its last loss to the loader

    lived = run.live(instant, meanwhile=wait_for_the_rank)
    assert "starting others" in lived.logs
    assert not check(run, lived, whole), lived.logs
    assert check(run, run.live(), whole)
