"""Which job goes back into the queue, and which is left alone."""

from __future__ import annotations

import pytest

from checkfreq.notices.requeue import requeue
from tests.notices.conftest import Install

ARRAY = {"SLURM_JOB_ID": "40", "SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "3"}


def test_only_the_task_of_an_array_is_requeued(command: Install) -> None:
    command("squeue", "echo 1:00 0 RUNNING")
    called = command("scontrol", "exit 0")
    assert requeue(ARRAY)
    assert called.read_text() == "requeue 40_3\n"


@pytest.mark.parametrize("answer", ["0 COMPLETING", "0 CANCELLED", "2 RUNNING"])
def test_a_job_that_is_ending_or_was_started_again_elsewhere_is_left_alone(
    command: Install, answer: str
) -> None:
    command("squeue", f"echo 1:00 {answer}")
    called = command("scontrol", "exit 0")
    assert not requeue({"SLURM_JOB_ID": "40", "SLURM_RESTART_COUNT": "1"})
    assert not called.exists()


def test_a_requeue_that_ends_the_command_that_asked_for_it_is_one(command: Install) -> None:
    """SLURM signals every process of the job, scontrol among them, before it could answer."""
    command("squeue", "echo 1:00 0 RUNNING")
    command("scontrol", "kill -TERM $$; exit 0")
    assert requeue({"SLURM_JOB_ID": "40"})


def test_a_requeue_whose_answer_was_lost_is_one(
    command: Install, caplog: pytest.LogCaptureFixture
) -> None:
    command("squeue", "exit 1")
    called = command("scontrol", "exit 1")
    assert not requeue({"SLURM_JOB_ID": "40"})
    assert "cannot requeue SLURM job 40: scontrol ended with 1" in caplog.text

    called.unlink()
    command("squeue", f"test -e {called} && echo 1:00 1 PENDING || echo 1:00 0 RUNNING")
    assert requeue({"SLURM_JOB_ID": "40"})
