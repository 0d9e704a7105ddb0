"""Options that say what a run costs and how often it fails: those of ``plan`` and ``simulate``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from checkfreq.cli.arguments import Parsed
from checkfreq.errors import ConfigError
from checkfreq.simulation import Rate

F = TypeVar("F", bound=Callable[..., Any])


def numbers(kind: type, say: str) -> Parsed:
    """The type of an option with numbers between commas, such as ``say``."""

    def parse(given: str) -> list[Any]:
        try:
            return [kind(part) for part in given.split(",")]
        except ValueError:
            raise ValueError(f"expected numbers such as {say}, got {given!r}") from None

    return Parsed("numbers", parse)


def seconds(name: str, purpose: str, *, metavar: str = "S", **more: Any) -> Callable[[F], F]:
    """An option that is a time."""
    return click.option(name, type=float, metavar=metavar, help=purpose, **more)


def rate_option(purpose: str) -> Callable[[F], F]:
    """``--rate``, the published failure rate of a cluster by name; see `rate_of`."""
    return click.option(
        "--rate", type=click.Choice([rate.name.lower() for rate in Rate]), help=purpose
    )


def rate_of(name: str | None, *, mtbf_s: float | None) -> Rate:
    """The rate that ``--rate`` names; ConfigError if ``--mtbf-s`` was given too."""
    if mtbf_s is not None and name is not None:
        raise ConfigError("--rate and --mtbf-s both say how often the run fails: give one of them")
    return Rate[(name or "research").upper()]


#: Numbers of GPUs.
GPUS = numbers(int, "8,64,1024")

max_overhead_option = click.option(
    "--max-overhead",
    type=float,
    default=0.035,
    show_default=True,
    metavar="P",
    help="Bound, a fraction.",
)
