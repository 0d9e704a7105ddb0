"""Options of ``checkfreq simulate`` that say what a cluster is made of and what its ranks cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar

import click

from checkfreq.cli.arguments import SIZE, Parsed, num_bytes
from checkfreq.errors import ConfigError
from checkfreq.simulation.domains import Domain, Hierarchy, shares_of
from checkfreq.simulation.failures import Cluster, Rate
from checkfreq.simulation.rank_costs import FREE, RankCosts, default_rank_costs, read_rank_costs
from checkfreq.simulation.restarts import READING, Restarts, Source, Storage
from checkfreq.simulation.sizes import AtSize

F = TypeVar("F", bound=Callable[..., Any])

_DAY_S = 86_400.0


def _named(kind: type[Domain] | type[Source], parse: Callable[[str], float], say: str) -> Parsed:
    """The type of an option such as ``process=0.001,node=0.002``; names are those of ``kind``."""

    def parsed(given: str) -> dict[Any, float]:
        try:
            pairs = [part.split("=") for part in given.split(",")]
            return {kind(name.strip()): parse(value) for name, value in pairs}
        except ValueError:
            names = ", ".join(each.value for each in kind)
            raise ValueError(f"expected some of {names}, such as {say}, got {given!r}") from None

    return Parsed("names", parsed)


_OPTIONS = (
    click.option(
        "--rank-costs",
        metavar="FILE|none",
        help="Measured costs of meetings, commits and restores by ranks, with --gpus "
        "(default: those that come with the package).",
    ),
    click.option(
        "--storage",
        type=click.Choice([each.value for each in Storage]),
        help="Tell failures of processes, nodes and racks apart; checkpoints are on storage that "
        "nodes share, or on each node's own, with copies elsewhere.",
    ),
    click.option(
        "--state-bytes", type=SIZE, metavar="SIZE", help="Bytes of a checkpoint, all ranks."
    ),
    click.option(
        "--gpus-per-node",
        type=int,
        default=8,
        show_default=True,
        metavar="N",
        help="That a node takes down, with --storage.",
    ),
    click.option(
        "--nodes-per-rack",
        type=int,
        default=2,
        show_default=True,
        metavar="N",
        help="That a rack takes down, with --storage.",
    ),
    click.option(
        "--failing",
        type=_named(Domain, float, "process=0.001,node=0.002"),
        metavar="WHAT=F[,...]",
        help="Failures a day: of each GPU's process, of each node that comes back (reboot) or does "
        "not (node), of each rack, instead of --rate's.",
    ),
    click.option(
        "--reading",
        type=_named(Source, num_bytes, "memory=10GB,local=5GB,shared=100GB"),
        metavar="FROM=SIZE[,...]",
        help="Bytes a second of a GPU from memory, of a node's own disks (local), of shared "
        "storage as a whole (default: memory=10GB,local=5GB,shared=100GB).",
    ),
)
#: They mean nothing without --storage.
_OF_STORAGE = ("state_bytes", "gpus_per_node", "nodes_per_rack", "failing", "reading")


def cluster_options(command: F) -> F:
    """All of them."""
    return reduce(lambda made, option: option(made), reversed(_OPTIONS), command)


@dataclass(frozen=True, slots=True)
class ClusterGiven:
    """What was given."""

    rank_costs: str | None
    storage: str | None
    state_bytes: int | None
    gpus_per_node: int
    nodes_per_rack: int
    failing: Mapping[Domain, float] | None
    reading: Mapping[Source, float] | None

    def check(self, named: set[str], *, gpus: list[int] | None, mtbf_s: float | None) -> None:
        """ConfigError for options that need others, or exclude one another."""
        if self.rank_costs not in (None, "none") and gpus is None:
            raise ConfigError("--rank-costs: how many ranks are there? Give --gpus")
        if self.storage is None:
            given = [f"--{name.replace('_', '-')}" for name in _OF_STORAGE if name in named]
            if given:
                raise ConfigError(
                    f"{', '.join(given)}: where are the checkpoints? Give --storage shared or own"
                )
            return
        if gpus is None:
            raise ConfigError("--storage: how many nodes are there? Give --gpus")
        if self.state_bytes is None:
            raise ConfigError("--storage: how much does a restart read? Give --state-bytes")
        if self.failing is not None and mtbf_s is not None:
            raise ConfigError("--failing and --mtbf-s both say how often the run fails")

    def costs(self) -> RankCosts:
        """The costs of ranks."""
        if self.rank_costs == "none":
            return FREE
        if self.rank_costs is None:
            return default_rank_costs()
        return read_rank_costs(Path(self.rank_costs))

    def hierarchy(self, rate: Rate, *, mtbf_s: float | None, num_gpus: int) -> Hierarchy:
        """How often things fail: as published, or so that it is ``mtbf_s`` in all."""
        mtbf_s = Cluster(num_gpus, rate).mtbf_s if mtbf_s is None else mtbf_s
        published = Hierarchy.published(
            _DAY_S / (mtbf_s * num_gpus),
            shares_of(rate),
            gpus_per_node=self.gpus_per_node,
            nodes_per_rack=self.nodes_per_rack,
        )
        return published.with_rates(self.failing or {})

    def restarts(self, size: AtSize, *, fixed_s: float) -> Restarts:
        """How long restarts take."""
        return Restarts(
            storage=Storage(self.storage),
            state_bytes=self.state_bytes or 0,
            fixed_s=fixed_s,
            num_gpus=size.num_gpus,
            gpus_per_node=self.gpus_per_node,
            planning_s=size.planning_s,
            reading={**READING, **(self.reading or {})},
        )
