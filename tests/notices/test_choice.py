"""Who is asked: by default, by name, and by which rank."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest

from checkfreq import CFConfig
from checkfreq.errors import ConfigError
from checkfreq.notices.choice import watched

IN_JOB = {"SLURM_JOB_ID": "42"}


def names(config: CFConfig, environ: dict[str, str], *, rank: int = 0) -> tuple[str, ...]:
    return watched(config, rank=rank, environ=environ).names


def test_by_default_slurm_is_asked_inside_a_job_and_nobody_elsewhere() -> None:
    assert names(CFConfig(), IN_JOB) == ("slurm",)
    assert names(CFConfig(), {}) == ()
    assert names(CFConfig(notices=()), IN_JOB) == ()


def test_a_deadline_comes_with_or_without_others() -> None:
    at = datetime(2026, 11, 23, 15, 0, tzinfo=timezone.utc)
    for deadline in (at, at.timestamp()):
        found = watched(CFConfig(deadline=deadline, notices=()), rank=0, environ={})
        assert (found.names, found.deadline_unix_s) == (("deadline",), at.timestamp())
    assert names(CFConfig(deadline=at), IN_JOB) == ("deadline", "slurm")


def test_only_rank_0_asks_slurm() -> None:
    """The environment of the others would keep a limit that was extended since."""
    assert names(CFConfig(), IN_JOB, rank=1) == ()
    assert names(CFConfig(notices=("slurm",)), IN_JOB, rank=1) == ()


@pytest.mark.parametrize("variable", ["LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"])
def test_one_rank_of_a_machine_asks_its_cloud(variable: str) -> None:
    config = CFConfig(notices=("slurm", "aws"))
    assert names(config, {variable: "0"}, rank=8) == ("aws",)
    assert names(config, {variable: "3"}, rank=3) == ()
    assert names(config, {}, rank=0) == ("slurm", "aws")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"deadline": datetime(2026, 1, 1)}, "a datetime with a time zone"),
        ({"deadline": "noon"}, "seconds since 1970"),
        ({"notices": ("slurm", "oracle")}, "slurm, aws, gcp, azure"),
        ({"notices": ("aws", "aws")}, "a tuple of"),
        ({"metadata_url": "ftp://x"}, "begins with http://"),
        ({"stop_grace_s": 0.0}, "a finite number > 0"),
        ({"on_stop": "raise"}, "a function of one argument"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CFConfig(**settings)  # type: ignore[arg-type]
