"""Which sources a rank's worker asks.

Without ``CFConfig.notices``: the deadline if there is one, and SLURM inside a job. Clouds are asked
only by name: elsewhere their link-local addresses may belong to anything, or be watched, and on a
machine that is not rented by the hour the question is noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from checkfreq.config import CLOUDS, CFConfig
from checkfreq.notices.slurm import SlurmEndTime
from checkfreq.notices.source import CLOCK, Clock, Deadline, NoticeSource

#: Where launchers put the number of a process among those of its machine.
_LOCAL_RANK = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")


@dataclass(frozen=True, slots=True)
class Watched:
    """What a worker is told to watch."""

    names: tuple[str, ...] = ()
    deadline_unix_s: float | None = None
    metadata_url: str | None = None


def watched(config: CFConfig, *, rank: int, environ: Mapping[str, str]) -> Watched:
    """What the worker of one rank watches.

    A job's limit is asked for once, by rank 0. A spot notice is about a machine: the first rank of
    each asks.
    """
    wanted = config.notices
    if wanted is None:
        wanted = ("slurm",) if environ.get("SLURM_JOB_ID") else ()
    is_first = _is_first_on_machine(environ)
    names = tuple(name for name in wanted if (is_first if name in CLOUDS else rank == 0))
    if config.deadline is not None:
        names = ("deadline", *names)
    return Watched(names, _unix_s(config.deadline), config.metadata_url)


def sources(
    asked: Watched, *, environ: Mapping[str, str], clock: Clock = CLOCK
) -> list[NoticeSource]:
    """The sources to ask, in the worker."""
    found: list[NoticeSource] = []
    for name in asked.names:
        if name == "deadline":
            assert asked.deadline_unix_s is not None
            found.append(Deadline(asked.deadline_unix_s))
        elif name == "slurm":
            found.append(SlurmEndTime(environ, clock=clock))
        else:
            found.append(_cloud(name, asked.metadata_url, clock))
    return found


def _cloud(name: str, url: str | None, clock: Clock) -> NoticeSource:
    # Imported where one is asked: http.client would delay the start of every other worker.
    from checkfreq.notices import clouds
    from checkfreq.notices.metadata import MetadataService

    kinds = {
        "aws": clouds.AwsSpot,
        "gcp": clouds.GcpPreemption,
        "azure": clouds.AzureScheduledEvents,
    }
    return kinds[name](MetadataService(url), clock=clock)


def _unix_s(deadline: datetime | float | None) -> float | None:
    return deadline.timestamp() if isinstance(deadline, datetime) else deadline


def _is_first_on_machine(environ: Mapping[str, str]) -> bool:
    """Whether no rank before this one runs on the same machine; True if nobody says."""
    return next((environ[name] == "0" for name in _LOCAL_RANK if name in environ), True)
