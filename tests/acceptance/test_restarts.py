"""A killed run goes on: from memory, with a standby, from the mirror on a new machine."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.command import checkfreq
from tests.acceptance.processes import (
    DEADLINE_S,
    Trainer,
    run_to_end,
    trainer_pid,
    verify_all,
    wait_until,
)
from tests.acceptance.programs import Run
from tests.leftovers import end_lingering

pytestmark = pytest.mark.crash

NUM_STEPS = 30


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """The digest at each boundary of a run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    return run_to_end(Run(str(folder / "chk"), NUM_STEPS, checkpoints=False)).boundaries


@pytest.fixture(autouse=True)
def _nothing_lingers() -> Iterator[None]:
    yield
    end_lingering()


def test_a_killed_run_goes_on_from_the_memory_that_it_left(
    whole: dict[int, str], tmp_path: Path
) -> None:
    run = Run(str(tmp_path / "chk"), NUM_STEPS, keep_in_memory_s=300.0, waits=True)
    first = Trainer(run)
    assert first.read_boundaries(5)
    first.kill()
    assert first.finish() == -signal.SIGKILL
    after = run_to_end(run)
    assert after.source == "memory"
    assert after.restored is not None
    assert after.restored[0] >= max(first.log.durable)
    assert {**first.log.boundaries, **after.boundaries} == whole


SCRIPT = """
import sys
from pathlib import Path
from tests.acceptance.programs import Run, Training, train

class Log:
    def send(self, message):
        with open({log!r}, "a") as log:
            print(*message[:3], file=log)

if __name__ == "__main__":
    train(Log(), Run({chk!r}, {steps}, waits=True))
"""


def test_a_script_under_checkfreq_run_is_started_again_by_a_standby(
    whole: dict[int, str], tmp_path: Path
) -> None:
    script, log, chk_dir = tmp_path / "train.py", tmp_path / "log", tmp_path / "chk"
    script.write_text(SCRIPT.format(log=str(log), chk=str(chk_dir), steps=NUM_STEPS))
    command = (sys.executable, "-m", "checkfreq.cli", "run", "--standby", "--", sys.executable)
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*command, str(script)], env=environment) as supervisor:
        wait_until(lambda: log.exists() and "boundary 5" in log.read_text(), "it does not train")
        os.kill(trainer_pid(chk_dir), signal.SIGKILL)
        assert supervisor.wait(DEADLINE_S) == 0
    lines = [line.split() for line in log.read_text().splitlines()]
    assert [line[0] for line in lines].count("restored") == 1
    assert {int(line[1]): line[2] for line in lines if line[0] == "boundary"} == whole
    assert verify_all(chk_dir)[-1] == NUM_STEPS


def test_a_new_machine_goes_on_from_the_mirror(whole: dict[int, str], tmp_path: Path) -> None:
    (tmp_path / "bucket").mkdir()
    mirror = f"file://{tmp_path}/bucket"
    first = run_to_end(Run(str(tmp_path / "old"), 12, waits=True, mirror=mirror))
    shutil.rmtree(tmp_path / "old")
    after = run_to_end(Run(str(tmp_path / "new"), NUM_STEPS, mirror=mirror))
    assert after.source == "mirror"
    assert after.restored == (12, whole[12])
    assert {**first.boundaries, **after.boundaries} == whole
    newest = checkfreq("verify", mirror, status=0)[-1]
    assert (newest["step"], newest["state"]) == (NUM_STEPS, "ok")
