"""``CFConfig``: every setting that is not an argument of CFManager, and its checks."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Protocol

from checkfreq.errors import ConfigError
from checkfreq.events import FailureNotice, StopRecord
from checkfreq.types import Directory, Objective, SnapshotPlace

if TYPE_CHECKING:
    from checkfreq.mirror.settings import Mirror

#: Clouds whose metadata service can be asked for spot notices (``CFConfig.notices``).
CLOUDS = ("aws", "gcp", "azure")


class ScalarWriter(Protocol):
    """The part of a TensorBoard ``SummaryWriter`` that is used."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> None:
        """Record a value at a step."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CFConfig:
    """Settings that few runs need; every default is meant to be right.

    Times are in seconds and sizes in bytes. Pass it as ``CFManager(config=CFConfig(...))``. With
    many ranks, give all of them the same values. Raises ConfigError for a value out of range.

    How often (with CFMode.AUTO)
        objective: what the interval is chosen for. Default BOUND: as often as ``max_overhead``
            allows. GOODPUT: the least time lost to checkpoints and failures together, also above
            that bound; for clusters where failures are frequent. It needs ``mtbf_s``, or 3
            failures of earlier runs in this directory to estimate it from.
        summary_writer: a TensorBoard ``SummaryWriter``, or anything with its ``add_scalar``. It
            gets the measured costs and the interval after each checkpoint, under ``checkfreq/``.
            Default None: nothing is written.
        record_trace: record the time of each iteration, and of each checkpoint's phases, in
            ``trace.jsonl``, for ``checkfreq simulate --trace``. Default False. It costs less than a
            microsecond an iteration and at most 8 MiB.

    Snapshots
        num_slots: number of snapshots that host memory has room for. Default 2: one is copied
            while the one before is written. With 1 they need half the memory, and the next one
            waits until the last is on disk. More than 2 help only if write times vary a lot.
        arena_slack: spare room in each slot, as a fraction of the state, default 0.05. Raise it
            for state that keeps growing, so that the slots are allocated anew less often.
        host_memory_limit: most bytes of host memory for all slots together. Default None: what is
            available on the machine and in its containers (cgroups) when slots are allocated. Set
            it where other processes need the rest.
        snapshot_place: where a snapshot of device tensors is taken first. HOST: straight into a
            slot. DEVICE: into a buffer on the device, which holds updates up for less time and
            needs as much device memory as the state, beyond what training needs at its peak; where
            there is less, HOST. Default None: whichever the measured costs favour (HOST with
            CFMode.MANUAL).
        barrier_timeout_s: longest time that a weight update waits for a copy, default 600. A copy
            that takes longer is an error: something hangs.
        verify_before_load: read a checkpoint twice in a restore: once to check every digest before
            anything live is changed, and once to load it. Default False: damage is found while
            tensors are read into their places, and an older checkpoint is loaded over them.
        trust_extra_state: a restore gives extra state to ``set_extra_state()`` of your modules
            whoever saved it: that code may unpickle it, and so run what its writer chose. Default
            False: only what was saved with this user's key (``~/.local/state/checkfreq/key``), is
            in a killed run's memory, or is in the run's own mirror; else the restore is refused.
        verify_settled: compare settled tensors with what they were at the boundary, in the slot
            once it is complete (the attempt fails if they differ), and before the next weight
            update, snapshot or end, whichever comes first (raises StateError). Default False, since
            it is slow: for tests, and if you suspect that something other than the optimizer writes
            weights.

    Writing
        writer_threads: threads that write a snapshot, and that read a checkpoint in ``restore()``.
            Default 4. More for storage that is fast only with many requests at a time.
        write_chunk_bytes: bytes per write call, a multiple of 4096. Default 8 MiB.
        max_write_bytes_per_s: limit on the write rate, in bytes per second. Default None: no
            limit. Set it to leave a shared disk or network to others.
        full_copy_every: frozen parameters of a model are written once, and linked into later
            checkpoints; so many of them share one copy at most, so that one bad block cannot damage
            all. Default 20. 1: every checkpoint has its own.
        persist_timeout_s: if a write takes longer, the worker process is replaced, and the new one
            is handed the same snapshot; the second time the checkpoint has failed. Default 1800.
            Raise it for very large state on slow storage.
        takeover_s: how long a new run waits for the worker of the run before it to release the
            directory. Default None: 60 s, and with many ranks ``rank_timeout_s`` more for each
            slot, since that worker may itself wait so long for the parts of other ranks.
        close_timeout_s: longest time that ``close()`` waits for checkpoints in flight, default
            1800; then the worker is killed. Lower it where a job is killed soon after its time.
        agent_copies_within_s: set it where an agent copies the directory to other storage file by
            file, while training runs, and back before it starts (managed spot): the longest time
            from the writing of a file to the end of its copy. A checkpoint is then removed only
            when the agent must have a newer one; what comes back in part is removed; and if
            nothing is whole, ``restore()`` returns False with a WARNING. Default None: no agent,
            and a directory where no checkpoint is whole is an error.
        keep_in_memory_s: how long the worker of a killed run keeps its newest snapshots in memory,
            for the next run on this machine in this directory to restore from, default 300. They
            are given back sooner if memory is short. 0: not at all.
        nice: niceness of the worker process, 0 to 19, default 10, so that it yields to training
            and data loading. Lower it if checkpoints are late on a busy machine.
        max_events_bytes: length at which ``events.jsonl`` is renamed to ``events.1.jsonl``,
            replacing the one before. Default 1 MiB.
        on_failure: called in the training thread with a ``FailureNotice`` for each checkpoint that
            failed, and for the first one that is durable again (its ``is_over`` is True), on each
            rank whose part failed. To alert somebody. What it raises is logged, and training
            continues. Default None.

    Mirror
        mirror: the URL of an object store ("s3://bucket/run"), or a ``Mirror`` with its settings,
            to which committed checkpoints are uploaded in the background. Default None: there is
            none.
        staging_dir: where ``CFManager("s3://bucket/run", ...)`` keeps its local directories, each
            named after its URL. Default None: ``checkfreq/staging`` in the user's cache folder. Set
            it to a fast local disk, or for many ranks on several nodes to one that all see.

    Many ranks
        directory: SHARED (default) if all ranks see one checkpoint directory, NODE_LOCAL if each
            node, or each rank, has its own.
        split_replicated: let every rank that shares a directory write a share of the state that is
            the same on all of them, as under DDP. Default False: the first rank writes all of it.
            Faster where one rank alone cannot fill the storage's bandwidth.
        tree_from_ranks: from so many ranks in one directory on, each rank's record is a file of its
            own beside ``manifest.json``, which names them. Default 17. Fewer ranks have all in
            ``manifest.json``, which takes the first rank about 40 us for each rank's tensor; lower
            it if a few ranks have very many tensors. At least 2.
        rank_timeout_s: longest time that ranks wait for one another, in a meeting and for the
            parts of a checkpoint. Default 60; then a RankError names the missing ranks. Raise it
            if one rank works alone for longer, on a validation for example.
        meet_every_s: ranks meet at least this often, to learn of stop signals and failures.
            Default 1. If meetings would take more than a quarter of ``max_overhead``, they are
            held less often, up to ten times.
        compare_ranks: compare the state that should be the same on all ranks, at the first
            checkpoint and after a restore. Weights that differ are a StateError, other state a
            WARNING. Default True. False saves the time it takes, once per run.

    Stopping
        stop_signals: names of the signals that mean "save and stop". Default SIGTERM, SIGUSR1 and
            SIGHUP (of a terminal that is gone; under ``nohup`` it stays ignored). Add the signal
            that your scheduler sends before the time limit. They are handled from
            the first boundary on; before it they do what they do without checkfreq, so that a
            process which starts, restores or hangs can be ended.
        stop_grace_s: how long after SIGTERM the process will be killed: Kubernetes'
            ``terminationGracePeriodSeconds`` (30 unless set), SLURM's ``KillWait`` (30). No wait
            then lasts longer, so that the run ends with an error that says what is missing.
            Default None: not known; a run that stops then waits for 60 s, or for what its last
            checkpoint and upload should take by those before, if that is longer.
        stop_before_s: how long before a known end (``deadline``, ``notices``) training is to be
            over, for what your script does afterwards, such as copying checkpoints back. Default 0.
        deadline: when the run ends: a ``datetime`` with a time zone, or seconds since 1970. It
            trains on until the last checkpoint must start in order to be durable by then, which
            follows from the measured times, and stops as if a signal had come. Default None.
        notices: who else is asked when the run ends: "slurm" (the job's time limit), "aws", "gcp"
            and "azure" (spot notices of the machine). Default None: SLURM, inside a job of it.
            Clouds are asked only if named here; () asks nobody.
        metadata_url: where the clouds' metadata service is. Default None: their own addresses.
            For a proxy of it, and for tests.
        on_stop: called in the training thread with a ``StopRecord`` when the run is told to stop,
            before its last checkpoint is taken, and again once that is durable. Keep the first
            call short: the end may be near. What it raises is logged. Default None. (What
            iterators do after a stop is ``CFIterator(on_stop=...)``.)
        requeue: once the last checkpoint is durable on all ranks, put the SLURM job back into its
            queue (``scontrol requeue``, on rank 0), unless training is finished, or was stopped by
            ``deadline``. SLURM then ends the job's processes. Default False.
    """

    objective: Objective = Objective.BOUND
    summary_writer: ScalarWriter | None = None
    record_trace: bool = False
    verify_before_load: bool = False
    trust_extra_state: bool = False
    verify_settled: bool = False
    num_slots: int = 2
    arena_slack: float = 0.05
    host_memory_limit: int | None = None
    barrier_timeout_s: float = 600.0
    snapshot_place: SnapshotPlace | None = None
    writer_threads: int = 4
    write_chunk_bytes: int = 8 << 20
    max_write_bytes_per_s: int | None = None
    full_copy_every: int = 20
    persist_timeout_s: float = 1800.0
    takeover_s: float | None = None
    close_timeout_s: float = 1800.0
    agent_copies_within_s: float | None = None
    keep_in_memory_s: float = 300.0
    nice: int = 10
    max_events_bytes: int = 1 << 20
    on_failure: Callable[[FailureNotice], object] | None = None
    mirror: str | Mirror | None = None
    staging_dir: str | os.PathLike[str] | None = None
    directory: Directory = Directory.SHARED
    split_replicated: bool = False
    tree_from_ranks: int = 17
    rank_timeout_s: float = 60.0
    meet_every_s: float = 1.0
    compare_ranks: bool = True
    stop_signals: tuple[str, ...] = ("SIGTERM", "SIGUSR1", "SIGHUP")
    stop_grace_s: float | None = None
    stop_before_s: float = 0.0
    deadline: datetime | float | None = None
    notices: tuple[str, ...] | None = None
    metadata_url: str | None = None
    on_stop: Callable[[StopRecord], object] | None = None
    requeue: bool = False

    def __post_init__(self) -> None:
        for name in (
            "num_slots",
            "writer_threads",
            "write_chunk_bytes",
            "full_copy_every",
            "max_events_bytes",
        ):
            _require(self, name, getattr(self, name) >= 1, "at least 1")
        _require(self, "tree_from_ranks", self.tree_from_ranks >= 2, "at least 2")
        may_be_none = ("takeover_s", "agent_copies_within_s")
        given = [name for name in may_be_none if getattr(self, name) is not None]
        for name in (
            "barrier_timeout_s",
            "persist_timeout_s",
            "close_timeout_s",
            "keep_in_memory_s",
            "stop_before_s",
            *given,
        ):
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
        is_path = self.staging_dir is None or isinstance(self.staging_dir, str | os.PathLike)
        _require(self, "staging_dir", is_path, "None or a path")
        _require(self, "directory", isinstance(self.directory, Directory), "a Directory")
        is_place = self.snapshot_place is None or isinstance(self.snapshot_place, SnapshotPlace)
        _require(self, "snapshot_place", is_place, "None or a SnapshotPlace")
        _require(self, "objective", isinstance(self.objective, Objective), "an Objective")
        writer = self.summary_writer
        can_write = writer is None or callable(getattr(writer, "add_scalar", None))
        _require(self, "summary_writer", can_write, "None or an object with add_scalar")
        for name in ("on_failure", "on_stop"):
            given = getattr(self, name)
            can_call = given is None or callable(given)
            _require(self, name, can_call, "None or a function of one argument")
        self._check_notices()
        _require(self, "arena_slack", 0 <= self.arena_slack <= 1, "a fraction from 0 to 1")
        _require(self, "nice", 0 <= self.nice <= 19, "from 0 to 19")

    def _check_notices(self) -> None:
        grace_s, at, names = self.stop_grace_s, self.deadline, self.notices
        is_time = grace_s is None or (math.isfinite(grace_s) and grace_s > 0)
        _require(self, "stop_grace_s", is_time, "None or a finite number > 0")
        if isinstance(at, datetime):
            _require(self, "deadline", at.tzinfo is not None, "a datetime with a time zone")
        else:
            is_time = at is None or (isinstance(at, int | float) and math.isfinite(at))
            _require(self, "deadline", is_time, "None, a datetime or seconds since 1970")
        known = ("slurm", *CLOUDS)
        are_known = names is None or (
            isinstance(names, tuple) and len({*names}) == len(names) and {*names} <= {*known}
        )
        _require(self, "notices", are_known, f"None or a tuple of {', '.join(known)}")
        url = self.metadata_url
        is_url = url is None or url.startswith("http://")
        _require(self, "metadata_url", is_url, "None or a URL that begins with http://")


def _require(config: CFConfig, name: str, holds: bool, expected: str) -> None:
    if not holds:
        raise ConfigError(f"CFConfig.{name}: expected {expected}, got {getattr(config, name)!r}")
