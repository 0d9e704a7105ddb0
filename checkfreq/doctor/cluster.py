"""SLURM: whether this is a job, and whether its time limit can be known."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from checkfreq.doctor.findings import Finding, Status
from checkfreq.notices.command import Output, run_command
from checkfreq.notices.slurm import job_in, question, told_by

_TIMEOUT_S = 10.0
_MEANS = "The last checkpoint is taken in time before the job's limit, which squeue tells."

Run = Callable[..., Output]


def slurm(environ: Mapping[str, str], *, run: Run = run_command) -> Iterator[Finding]:
    """The job of this process, if it is in one."""
    job = job_in(environ)
    if not job:
        there = run(("sinfo", "--version"), timeout_s=_TIMEOUT_S)
        found = f"{there.out.strip()}, but this is no job" if there.succeeded else "no SLURM job"
        mend = "Look from inside a job: srun checkfreq doctor DIR." if there.succeeded else ""
        yield Finding("slurm", Status.NOTE if there.succeeded else Status.GOOD, found, _MEANS, mend)
        return
    done = run(question(job), timeout_s=_TIMEOUT_S)
    told = told_by(done.out) if done.succeeded else None
    end = environ.get("SLURM_JOB_END_TIME", "")
    if told is None:
        yield Finding(
            "slurm",
            Status.NOTE if end else Status.WARNING,
            f"squeue gives no time: {done.error or done.out.strip() or done.code}",
            _MEANS + (" SLURM_JOB_END_TIME is used." if end else ""),
            "Let nodes reach the controller, or pass CFConfig(deadline=...)."
            if not end
            else "A limit that is changed later is not seen.",
        )
        return
    left_s = told.left_s
    left = "no limit" if left_s == math.inf else f"{left_s / 60:.0f} min left"
    figures = {"left_s": None if left_s == math.inf else left_s}
    yield Finding("slurm", Status.GOOD, left, _MEANS, "", figures)
    requeues = run(("scontrol", "show", "job", job, "-o"), timeout_s=_TIMEOUT_S)
    if requeues.succeeded:
        may = "Requeue=1" in requeues.out.split()
        yield Finding(
            "slurm_requeue",
            Status.GOOD if may else Status.NOTE,
            "yes" if may else "no",
            "A job that may be requeued goes on by itself: CFConfig(requeue=True).",
            "" if may else "sbatch --requeue.",
        )
