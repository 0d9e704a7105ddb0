"""Puts a SLURM job back into its queue, once everything is durable."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from checkfreq.console import say
from checkfreq.notices.command import run_command
from checkfreq.notices.slurm import ask, job_in

logger = logging.getLogger(__name__)

#: To be kept free before the end of the job.
REQUEUE_S = 3.0
_TIMEOUT_S = 30.0
#: What squeue says while SLURM waits for this process to end, whatever the reason.
_ENDING = ("COMPLETING", "CANCELLED")


def requeue(environ: Mapping[str, str]) -> bool:
    """Requeue the job in ``environ``; if it cannot be, log how to start the next one.

    A success returns too, but SLURM is about to end this process. A job that SLURM is ending
    already is left alone: one that was cancelled would start again, and one that was preempted,
    or whose node was lost, is requeued by SLURM.
    """
    job = job_in(environ)
    if not job:
        logger.warning("CFConfig.requeue: this is no SLURM job; start the run again yourself")
        return False
    told = ask(job, timeout_s=_TIMEOUT_S)
    if told is not None and (told.state in _ENDING or told.is_lost_to(environ)):
        logger.warning("SLURM is ending job %s already: it is not requeued from here", job)
        return False
    done = run_command(("scontrol", "requeue", job), timeout_s=_TIMEOUT_S)
    if not done.succeeded:
        told = ask(job, timeout_s=_TIMEOUT_S)  # the answer alone may have been lost
    if done.succeeded or (told is not None and told.is_lost_to(environ)):
        say(logger, "SLURM job %s is requeued: it continues from the last checkpoint", job)
        return True
    logger.warning(
        "cannot requeue SLURM job %s: %s. To continue, submit the same script again: "
        "sbatch --dependency=afterany:%s SCRIPT",
        job,
        done.error or f"scontrol ended with {done.code}",
        job,
    )
    return False
