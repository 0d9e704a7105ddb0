"""The power goes at each instant of a checkpoint, under a real run on a real file system."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from checkfreq import faults
from tests.acceptance.processes import Trainer, run_to_end, verify_all, wait_until, worker_pid
from tests.acceptance.programs import Run
from tests.acceptance.sizes import sized
from tests.acceptance.volumes import VOLUMES, mounted

pytestmark = pytest.mark.crash

POINTS = tuple(p for p in faults.POINTS_OF_ONE_RANK if p.startswith(("commit.", "prune.")))
SMOKE = ("commit.write_manifest", "commit.rename", "commit.sync_parent", "prune.remove")
#: The attempt that is hit: of a step after which there is something to supersede and to prune.
HIT = {"commit.supersede": 1, "prune.rename": 1, "prune.sync": 1, "prune.remove": 1}


@pytest.mark.parametrize("kind", VOLUMES)
@pytest.mark.parametrize("point", sized(POINTS, smoke=SMOKE.__contains__))
def test_what_was_acknowledged_survives_and_the_run_goes_on_to_the_same_bits(
    point: str, kind: str, tmp_path: Path
) -> None:
    whole = run_to_end(Run(str(tmp_path / "whole"), 6, checkpoints=False))
    gate = tmp_path / "gate"
    with mounted(kind, tmp_path) as volume:
        chk_dir = volume.mount_point / "chk"
        script = f"{point}:pause-{gate}:{HIT.get(point, 3)}"
        restore_step = None
        if point == "commit.supersede":
            run_to_end(Run(str(chk_dir), 4))
            restore_step = 2
        run = Run(
            str(chk_dir),
            6,
            keep_last=2,
            restore_step=restore_step,
            waits=True,
            worker_faults=script,
        )
        trainer = Trainer(run)
        wait_until(gate.with_name("gate.reached").exists, f"{point} was not reached")
        worker = worker_pid(chk_dir)
        volume.cut_power()
        os.kill(worker, signal.SIGKILL)
        trainer.kill()
        assert trainer.finish() == -9
        volume.unmount()
        volume.mount()
        acknowledged = max(trainer.log.durable, default=restore_step or 0)
        after = run_to_end(Run(str(chk_dir), 6, keep_last=2))
        if acknowledged:
            assert after.restored is not None
            assert after.restored[0] >= acknowledged
        if after.restored is not None:
            assert whole.boundaries[after.restored[0]] == after.restored[1]
        assert after.boundaries.items() <= whole.boundaries.items()
        assert verify_all(chk_dir)[-1] == 6
