"""``prune``: remove the checkpoints that a retention policy does not keep.

The only command that changes a directory: it takes the lock first, so it is refused beside a run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import time
from collections.abc import Iterator

from checkfreq.cli import text
from checkfreq.errors import ConfigError, NoCheckpointError
from checkfreq.persist.listing import listed
from checkfreq.persist.lock import DirectoryLock, LockTimeoutError
from checkfreq.policy.best import BestName
from checkfreq.policy.retention import (
    DEFAULT_RETENTION,
    AnyOf,
    KeepBest,
    KeepEpochs,
    KeepEvery,
    KeepLast,
    Retention,
)
from checkfreq.policy.retention_info import CheckpointInfo
from checkfreq.store.source import CheckpointSource
from checkfreq.store.store import CheckpointStore
from checkfreq.types import size_text

_LOCK_S = 2.0
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(|[kKMGTP]i?)B?")
_POWERS = "kMGTP"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``checkfreq prune``: each keeps something, and what none keeps is removed."""
    parser.add_argument(
        "--dry-run", action="store_true", help="only say what would be removed; takes no lock"
    )
    keep = parser.add_argument_group(
        "what to keep", "without any: what a run keeps by default, whatever room the disk has"
    )
    keep.add_argument("--last", type=int, metavar="N", help="the newest N")
    keep.add_argument(
        "--best", metavar="METRIC[:max|:min]", help="the best by a metric, the lowest by default"
    )
    keep.add_argument("--every-hours", type=float, metavar="H", help="the first of every H hours")
    keep.add_argument(
        "--for-hours", type=float, metavar="H", help="with --every-hours: while not older than that"
    )
    keep.add_argument("--every-steps", type=int, metavar="N", help="the first of every N steps")
    keep.add_argument("--epochs", action="store_true", help="the last of every epoch")
    keep.add_argument(
        "--within", type=_num_bytes, metavar="SIZE", help="no more than SIZE in all, like 200GiB"
    )


def prune(store: CheckpointSource, args: argparse.Namespace) -> int:
    """Remove what the options do not keep, and print one line per checkpoint; 0 if all is done."""
    if not isinstance(store, CheckpointStore):
        raise ConfigError(
            f"prune: expected a directory, got {args.dir}: what a mirror keeps is decided by the "
            "run that writes it (Mirror.retention)"
        )
    if not store.ops.is_dir(store.root):
        raise NoCheckpointError(f"{store.root} is not a directory")
    policy = _policy(args)
    if args.dry_run:
        _tell(_infos(store), policy, verb="would be removed")
        return 0
    with _locked(store):
        infos = _infos(store)
        removed = store.prune(_tell(infos, policy, verb="removed"))
    print(f"{len(removed)} removed, {len(infos) - len(removed)} kept", flush=True)
    return 0


def _infos(store: CheckpointStore) -> list[CheckpointInfo]:
    """The checkpoints that retention knows of. A step that cannot be read is left alone."""
    found = [*listed(store, store.manifest).values()]
    if not found:
        raise NoCheckpointError(f"{store.root} holds no checkpoint that can be read")
    return found


def _tell(infos: list[CheckpointInfo], policy: Retention, *, verb: str) -> list[int]:
    """Print what becomes of each checkpoint; the steps to remove."""
    doomed = policy.to_remove(infos)
    for info in infos:
        state = verb if info.step in doomed else "kept"
        made = text.moment(info.created_s)
        print(f"step {info.step}: {state}, {size_text(info.num_bytes)}, of {made}", flush=True)
    return doomed


def _policy(args: argparse.Namespace) -> Retention:
    parts: list[Retention] = []
    if args.last is not None:
        parts.append(KeepLast(args.last))
    if args.best is not None:
        best = BestName.parse(f"best:{args.best}")
        parts.append(KeepBest(metric=best.metric, highest=bool(best.highest), num_last=1))
    if args.every_hours is not None:
        parts.append(KeepEvery(hours=args.every_hours, for_hours=args.for_hours))
    elif args.for_hours is not None:
        raise ConfigError("--for-hours: expected --every-hours with it")
    if args.every_steps is not None:
        parts.append(KeepEvery(steps=args.every_steps))
    if args.epochs:
        parts.append(KeepEpochs())
    policy = AnyOf(tuple(parts)) if parts else DEFAULT_RETENTION
    return policy if args.within is None else policy.within(args.within)


@contextlib.contextmanager
def _locked(store: CheckpointStore) -> Iterator[None]:
    lock = DirectoryLock(store.root)
    try:
        lock.acquire(
            timeout_s=_LOCK_S,
            owner_pid=os.getpid(),
            on_wait=lambda holder: None,
            give_up=_slept,
        )
    except LockTimeoutError as error:
        raise ConfigError(
            f"{store.root} is in use ({error}): expected no run there. A run removes checkpoints "
            "itself, as its retention says; --dry-run works beside it"
        ) from None
    try:
        yield
    finally:
        lock.release()


def _slept(seconds: float) -> bool:
    time.sleep(seconds)
    return False


def _num_bytes(given: str) -> int:
    """``200GiB``, ``1.5T`` or a number of bytes."""
    match = _SIZE.fullmatch(given.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"expected a size such as 200GiB, got {given!r}")
    number, unit = float(match[1]), match[2]
    base = 1024 if unit.endswith("i") else 1000
    power = _POWERS.index(unit[0].replace("K", "k")) + 1 if unit else 0
    return int(number * base**power)
