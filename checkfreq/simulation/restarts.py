"""How a run comes back from a failure: what was kept, where it is read, and how long that takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from checkfreq.errors import ConfigError
from checkfreq.policy.profile import is_amount
from checkfreq.simulation.domains import Domain


class Source(Enum):
    """Where a restart reads the state."""

    MEMORY = "memory"
    LOCAL = "local"
    SHARED = "shared"


class Storage(Enum):
    """Where checkpoints are written: on storage that all nodes share, or on each node's disks.

    From the disks they are copied to shared storage, or a mirror, one after the other.
    """

    SHARED = "shared"
    OWN = "own"


class Kept(Enum):
    """What a failure leaves: snapshots in memory, checkpoints on disk, copies elsewhere."""

    COPIED = 0
    DURABLE = 1
    MIRRORED = 2


@dataclass(frozen=True, slots=True)
class Way:
    """How a run comes back: from the newest checkpoint of what was kept, read from a source."""

    kept: Kept
    source: Source

    def worse(self, other: Way) -> Way:
        """The way left after both failures."""
        return max(self, other, key=lambda way: way.kept.value)


#: Bytes per second of one GPU from memory, of a node's disks, and of shared storage as a whole. The
#: first two are assumed; 50 to 200 GB/s were seen of shared storage (VAST, 85,000 checkpoints of 40
#: runs, 2025).
READING: Mapping[Source, float] = {Source.MEMORY: 10e9, Source.LOCAL: 5e9, Source.SHARED: 100e9}


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarts:
    """How long a restart takes, at one number of GPUs.

    fixed_s: all but reading: noticing the failure, other machines, starting, the first iteration.
    planning_s: reading the records and planning. state_bytes: of all ranks. kept_s: how long memory
    outlives its run (CFConfig.keep_in_memory_s).
    """

    storage: Storage
    state_bytes: int
    fixed_s: float
    num_gpus: int
    gpus_per_node: int = 8
    planning_s: float = 0.0
    kept_s: float = 300.0
    reading: Mapping[Source, float] = field(default_factory=lambda: READING)

    def __post_init__(self) -> None:
        for name in ("state_bytes", "fixed_s", "planning_s", "kept_s"):
            if not is_amount(getattr(self, name)):
                raise ConfigError(
                    f"{name}: expected a finite number >= 0, got {getattr(self, name)}"
                )
        for source in Source:
            rate = self.reading.get(source, 0.0)
            if not (is_amount(rate) and rate > 0):
                raise ConfigError(
                    f"bytes per second from {source.value}: expected a finite number > 0, got "
                    f"{rate}"
                )

    def way(self, domain: Domain) -> Way:
        """How the run comes back from a failure.

        From memory only if the new processes are there before it is given back; the worker has
        then finished what it held, and it is on disk.
        """
        is_own = self.storage is Storage.OWN
        on_disk = Source.LOCAL if is_own else Source.SHARED
        if domain is Domain.PROCESS:
            is_held = self.fixed_s <= self.kept_s
            return Way(Kept.COPIED, Source.MEMORY if is_held else on_disk)
        if domain is Domain.REBOOT or not is_own:
            return Way(Kept.DURABLE, on_disk)
        return Way(Kept.MIRRORED, Source.SHARED)

    def seconds(self, source: Source) -> float:
        """From a failure until training continues."""
        readers = {
            Source.MEMORY: self.num_gpus,
            Source.LOCAL: max(1.0, self.num_gpus / self.gpus_per_node),
            Source.SHARED: 1,
        }
        return (
            self.fixed_s
            + self.planning_s
            + self.state_bytes / (readers[source] * self.reading[source])
        )

    @property
    def mirror_s(self) -> float:
        """From durable on the nodes' disks until copied to shared storage, one at a time."""
        if self.storage is Storage.SHARED:
            return 0.0
        return self.state_bytes / self.reading[Source.SHARED]
