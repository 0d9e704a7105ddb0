"""When ``checkfreq run`` starts a script again, when it gives up, and what it says."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import pytest

from checkfreq.cli import main
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


def test_runs_that_tell_nothing_and_end_soon_are_given_up_after_announced_pauses(
    tmp_path: Path,
) -> None:
    run = Supervised(tmp_path, "sys.exit(5)")
    status, said = run.end()
    assert (status, run.notes()) == (5, ["run"] * 3)
    assert said[1] == "exit status 5; starting it again in 1 s"
    assert said[-1] == "giving up after 3 runs in a row without progress: exit status 5"


def test_an_outage_of_the_storage_is_neither_counted_nor_given_up(tmp_path: Path) -> None:
    program = """
store, told, step = restored()
if count <= 3:
    told.end(State.CUT_OFF)
    sys.exit(1)
sys.exit(0 if count > 4 else 7)
"""
    run = Supervised(tmp_path, program, "--max-restarts", "1")
    status, said = run.end()
    assert (status, run.notes()) == (0, ["run"] * 5)
    outage = "exit status 1 (its checkpoints cannot be reached) at step 0"
    assert [line for line in said if "in 1 s" in line or "in 2 s" in line] == [
        f"{outage}; starting it again in {pause_s} s" for pause_s in (1, 2)
    ]


def test_runs_that_commit_newer_steps_go_on_without_a_pause(tmp_path: Path) -> None:
    program = "store, told, step = restored(); commit(store, step + 1); count < 5 and die()"
    status, said = ran(tmp_path, program)
    assert status == 0
    assert not any("starting it again" in line for line in said)


#: Programs that get nowhere, and how often they run.
IN_VAIN = {
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
    "waits for the lock of a run that commits": (
        """
other = CheckpointStore(chk_dir)
other.open()
commit(other, count)
reporter_for(chk_dir, rank=0)
sys.exit(1)
""",
        3,
    ),
    "has finished, which is progress once": (
        """
store, told, step = restored()
step or commit(store, 3)
count == 2 and store.add_mark(3, finished=True)
sys.exit(5)
""",
        5,
    ),
}


@pytest.mark.more
@pytest.mark.parametrize("what", IN_VAIN)
def test_runs_that_make_no_progress_are_given_up(what: str, tmp_path: Path) -> None:
    program, num_runs = IN_VAIN[what]
    run = Supervised(tmp_path, program)
    _, said = run.end()
    assert run.notes() == ["run"] * num_runs
    assert said[-1].startswith("giving up after 3 runs in a row without progress")


def test_a_run_that_passes_no_boundary_for_too_long_is_killed_and_started_again(
    tmp_path: Path,
) -> None:
    program = """
told, end_s = restored()[1], time.monotonic() + 6
for step in range(1, 1_000_000):
    told.pass_boundary(step)
    if count == 1:
        os.fork()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        note(f"pid {os.getpid()}")
        signal.pause()
    if time.monotonic() > end_s:  # longer than the timeout, and passing boundaries
        break
    time.sleep(0.01)
"""
    run = Supervised(tmp_path, program, "--hang-timeout", "4")
    status, said = run.end()
    assert status == 0
    assert said[0] == "no boundary was passed for 4 s: killing the script"
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


def test_without_a_checkpoint_training_begins_anew_in_each_directory(tmp_path: Path) -> None:
    program = """
for name in ("a", "b"):
    told = reporter_for(here / name, rank=0)
    told.begin(0, restored=False)
    told.pass_boundary(1)
count == 1 and die()
"""
    _, said = ran(tmp_path, program)
    assert said[0].count("training began anew in ") == 2
    assert "1 step lost" in said[0]


def test_a_command_that_is_not_there_is_an_error_of_a_shell(tmp_path: Path) -> None:
    for command, status in (("missing", 127), (str(tmp_path), 126)):
        found = subprocess.run([*RUN, "--", command], capture_output=True, text=True)
        assert found.returncode == status
        assert f"cannot run {command!r}" in found.stderr


@pytest.mark.parametrize(
    "arguments", [[], ["--"], ["--", ""], ["--max-restarts", "-1", "--", "true"]]
)
def test_wrong_usage_is_said(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["run", *arguments])
    assert raised.value.code == 2
