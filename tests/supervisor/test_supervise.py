"""When ``checkfreq run`` starts a script again, when it gives up, and what it says."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.patience import slowness
from tests.supervisor.supervised import RUN, Supervised, ran

GOES_ON = "stopped: {}. The same command goes on from there"

#: A script and options, the exit status, the first and the last line that are said.
ENDINGS: dict[str, tuple[str, str, int, str, str]] = {
    "crashes and then ends well": (
        "sys.exit(0 if count == 2 else 9)",
        "--max-restarts=1",
        0,
        "restart 1 after exit status 9",
        "finished: exit status 0",
    ),
    "is killed more often than is allowed": (
        "die()",
        "--max-restarts=1",
        128 + signal.SIGKILL,
        "restart 1 after exit by SIGKILL",
        "giving up after 1 restart: exit by SIGKILL",
    ),
    "stopped": (
        "sys.exit(75)",
        "--max-restarts=9",
        *(75, GOES_ON.format("exit status 75"), GOES_ON.format("exit status 75")),
    ),
    "stopped under a launcher": (
        "restored()[1].end(State.STOPPED); sys.exit(1)",
        "--max-restarts=9",
        75,
        GOES_ON.format("exit status 1 at step 0"),
        GOES_ON.format("exit status 1 at step 0") + "; ending with 75",
    ),
    "stopped and ended well": (
        "restored()[1].end(State.STOPPED)",
        "--max-restarts=9",
        *(0, GOES_ON.format("exit status 0 at step 0"), GOES_ON.format("exit status 0 at step 0")),
    ),
}


@pytest.mark.parametrize("how", ENDINGS)
def test_a_script_that_ends_is_started_again_or_not(how: str, tmp_path: Path) -> None:
    program, option, status, first, last = ENDINGS[how]
    found, said = ran(tmp_path, program, option)
    assert (found, said[-1]) == (status, last)
    assert said[0].startswith(first)


def test_an_outage_of_the_storage_is_neither_counted_nor_given_up(tmp_path: Path) -> None:
    program = """
store, told, step = restored()
if count <= 2:
    told.end(State.CUT_OFF)
    sys.exit(1)
sys.exit(0 if count > 3 else 7)
"""
    run = Supervised(tmp_path, program, "--max-restarts", "1")
    status, said = run.end()
    assert (status, run.notes()) == (0, ["run"] * 4)
    outage = "exit status 1 (its checkpoints cannot be reached) at step 0"
    assert f"{outage}; starting it again in 1 s" in said


def test_runs_that_commit_newer_steps_go_on_without_a_pause(tmp_path: Path) -> None:
    program = "store, told, step = restored(); commit(store, step + 1); count < 5 and die()"
    status, said = ran(tmp_path, program)
    assert status == 0
    assert not any("starting it again" in line for line in said)


#: Programs that get nowhere, and how often they run.
IN_VAIN = {
    "tells nothing": ("sys.exit(5)", 3),
    "commits the same step again": (
        """
store = CheckpointStore(chk_dir)
store.open()
reporter_for(chk_dir, rank=0).begin(0, restored=False)
7 in store.steps() or commit(store, 7)
die()
""",
        4,
    ),
}


@pytest.mark.parametrize(
    "what",
    ["tells nothing", *(pytest.param(one, marks=pytest.mark.more) for one in [*IN_VAIN][1:])],
)
def test_runs_that_make_no_progress_are_given_up_after_announced_pauses(
    what: str, tmp_path: Path
) -> None:
    program, num_runs = IN_VAIN[what]
    run = Supervised(tmp_path, program)
    _, said = run.end()
    assert run.notes() == ["run"] * num_runs
    assert any(line.endswith("; starting it again in 1 s") for line in said)
    assert said[-1].startswith("giving up after 3 runs in a row without progress")


def test_a_run_that_passes_no_boundary_for_too_long_is_killed_and_started_again(
    tmp_path: Path,
) -> None:
    timeout_s = round(min(1.2 * slowness(), 3.0), 1)
    program = f"""
told, end_s = restored()[1], time.monotonic() + {1.3 * timeout_s}
for step in range(1, 1_000_000):
    told.pass_boundary(step)
    if count == 1:
        os.fork()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        note(f"pid {{os.getpid()}}")
        signal.pause()
    if time.monotonic() > end_s:  # longer than the timeout, and passing boundaries
        break
    time.sleep(0.01)
"""
    run = Supervised(tmp_path, program, "--hang-timeout", str(timeout_s))
    status, said = run.end()
    assert status == 0
    assert said[0] == f"no boundary was passed for {timeout_s:g} s: killing the script"
    assert said[1].startswith("restart 1 after exit by SIGKILL at step 1: training began anew")
    assert said[2].startswith("finished: exit status 0 at step ")
    hung = [int(line.split()[1]) for line in run.notes() if line.startswith("pid ")]
    assert len(hung) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in hung)


def test_a_restart_says_what_was_lost(tmp_path: Path) -> None:
    program = """
store, told, step = restored()
for step in range(step + 1, step + 6):
    told.pass_boundary(step)
    count == 1 and step == 2 and commit(store, step)
count == 1 and die()
"""
    status, said = ran(tmp_path, program)
    assert status == 0
    found = re.fullmatch(
        r"restart 1 after exit by SIGKILL at step 5: restored step 2, 3 steps lost "
        r"\(\d+\.\d s of training\), \d+\.\d s down",
        said[0],
    )
    assert found is not None, said
    assert said[-1] == "finished: exit status 0 at step 7"


def test_a_command_that_is_not_there_is_an_error_of_a_shell(tmp_path: Path) -> None:
    for command, status in (("missing", 127), (str(tmp_path), 126)):
        found = subprocess.run([*RUN, "--", command], capture_output=True, text=True)
        assert found.returncode == status
        assert f"cannot run {command!r}" in found.stderr
