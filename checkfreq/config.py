"""Every setting that is not an argument of CFManager: name, unit, default, check."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from checkfreq.errors import ConfigError
from checkfreq.events import FailureNotice
from checkfreq.types import Directory, Objective, SnapshotPlace


class ScalarWriter(Protocol):
    """What is asked of a TensorBoard ``SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> None:
        """Note a value."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CFConfig:
    """Settings of the machinery. Times in seconds, sizes in bytes.

    Policy (CFMode.AUTO)
        objective: BOUND, as often as max_overhead allows; GOODPUT, least waste for mtbf_s (or,
            where that is not given, for what this directory's runs showed after 3 failures).
        summary_writer: a TensorBoard SummaryWriter (or anything with its add_scalar) that gets
            the costs and the interval after each checkpoint, under checkfreq/.

    Names and classes of state
        verify_settled: compare live settled tensors with the snapshot at every barrier and
            raise StateError on a difference (slow: for tests and for doubts).

    Snapshot
        num_slots: snapshots that can exist at once (one copying while one persists).
        arena_slack: spare room in each slot, a fraction of the state, for state that grows.
        host_memory_limit: most host memory for all slots; None means the cgroup's limit.
        snapshot_place: of device tensors: HOST, straight into a slot; DEVICE, into a buffer on
            their device first (faster to take, needs as much free device memory as state);
            None, what the measured costs say (HOST with CFMode.MANUAL).
        barrier_timeout_s: longest that a weight update waits for a copy.

    Persist
        writer_threads: threads that write one snapshot.
        write_chunk_bytes: bytes per write call; a multiple of 4096.
        max_write_bytes_per_s: rate limit of persists; None means none.
        persist_timeout_s: a persist that takes longer is a failure and its worker is replaced.
        takeover_s: how long to wait for the previous run's worker to let go of the directory; None
            means 60 s, and with many ranks rank_timeout_s more for each slot: so long may that
            worker wait for the parts of other ranks.
        close_timeout_s: longest that close() waits for work in flight.
        nice: niceness of the worker process.
        on_failure: called in the training thread with a FailureNotice for each checkpoint that
            failed, and for the first that is durable after failures (its ``is_over``), on each
            rank whose part failed. To alert somebody; what it raises is logged and ends nothing.
        max_events_bytes: events.jsonl becomes events.1.jsonl, in place of the one before, when it
            is longer than this.

    Many ranks
        directory: SHARED, all ranks see one checkpoint directory; NODE_LOCAL, each node has one.
        split_replicated: let every rank that shares the directory write a part of what is the same
            on all of them (DDP), instead of the first one all of it.
        rank_timeout_s: longest that ranks wait for one another: in a meeting, and for the parts of
            a checkpoint once the own part is durable.
        meet_every_s: ranks meet at least so often, to learn of stop signals and failures; less
            often, up to ten times, where that would take more than a quarter of max_overhead.
        compare_ranks: compare, at the first checkpoint and after a restore, what is to be the
            same on all ranks: StateError for weights that are not, a WARNING for other state.

    Stopping
        stop_signals: names of the signals that mean "save and stop", from the first boundary on;
            before it they do what they do anyway: end a process that starts, restores or hangs.
    """

    objective: Objective = Objective.BOUND
    summary_writer: ScalarWriter | None = None
    verify_settled: bool = False
    num_slots: int = 2
    arena_slack: float = 0.05
    host_memory_limit: int | None = None
    barrier_timeout_s: float = 600.0
    snapshot_place: SnapshotPlace | None = None
    writer_threads: int = 4
    write_chunk_bytes: int = 8 << 20
    max_write_bytes_per_s: int | None = None
    persist_timeout_s: float = 1800.0
    takeover_s: float | None = None
    close_timeout_s: float = 1800.0
    nice: int = 10
    max_events_bytes: int = 1 << 20
    on_failure: Callable[[FailureNotice], object] | None = None
    directory: Directory = Directory.SHARED
    split_replicated: bool = False
    rank_timeout_s: float = 60.0
    meet_every_s: float = 1.0
    compare_ranks: bool = True
    stop_signals: tuple[str, ...] = ("SIGTERM", "SIGUSR1")

    def __post_init__(self) -> None:
        for name in ("num_slots", "writer_threads", "write_chunk_bytes", "max_events_bytes"):
            _require(self, name, getattr(self, name) >= 1, "at least 1")
        takes_over = () if self.takeover_s is None else ("takeover_s",)
        for name in ("barrier_timeout_s", "persist_timeout_s", *takes_over, "close_timeout_s"):
            value = getattr(self, name)
            _require(self, name, math.isfinite(value) and value >= 0, "a finite number >= 0")
        for name in ("rank_timeout_s", "meet_every_s"):
            value = getattr(self, name)
            _require(self, name, math.isfinite(value) and value > 0, "a finite number > 0")
        for name in ("host_memory_limit", "max_write_bytes_per_s"):
            value = getattr(self, name)
            _require(self, name, value is None or value > 0, "None or more than 0 bytes")
        _require(
            self, "write_chunk_bytes", self.write_chunk_bytes % 4096 == 0, "a multiple of 4096"
        )
        _require(self, "directory", isinstance(self.directory, Directory), "a Directory")
        is_place = self.snapshot_place is None or isinstance(self.snapshot_place, SnapshotPlace)
        _require(self, "snapshot_place", is_place, "None or a SnapshotPlace")
        _require(self, "objective", isinstance(self.objective, Objective), "an Objective")
        writer = self.summary_writer
        can_write = writer is None or callable(getattr(writer, "add_scalar", None))
        _require(self, "summary_writer", can_write, "None or an object with add_scalar")
        can_call = self.on_failure is None or callable(self.on_failure)
        _require(self, "on_failure", can_call, "None or a function of one argument")
        _require(self, "arena_slack", 0 <= self.arena_slack <= 1, "a fraction from 0 to 1")
        _require(self, "nice", 0 <= self.nice <= 19, "from 0 to 19")


def _require(config: CFConfig, name: str, holds: bool, expected: str) -> None:
    if not holds:
        raise ConfigError(f"CFConfig.{name}: expected {expected}, got {getattr(config, name)!r}")
