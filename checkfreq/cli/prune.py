"""``prune``: remove the checkpoints that a retention policy does not keep.

It takes the lock first, so it is refused beside a run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import click

from checkfreq.cli import text
from checkfreq.cli.arguments import SIZE, example, json_option, source_argument
from checkfreq.cli.checkpoints import require_directory
from checkfreq.cli.locking import locked
from checkfreq.errors import ConfigError, NoCheckpointError
from checkfreq.persist.listing import listed
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
from checkfreq.types import moment, size_text

_OTHERWISE = "A run removes checkpoints itself, as its retention says; --dry-run works beside it"


@click.command(
    "prune",
    epilog=example(
        "checkfreq prune chk/ --dry-run",
        "checkfreq prune chk/ --last 3 --best loss --every-hours 24",
        "checkfreq prune s3://bucket/run --last 2",
    ),
)
@source_argument
@click.option("--dry-run", is_flag=True, help="Only say what would be removed; takes no lock.")
@click.option("--last", type=int, metavar="N", help="Keep the newest N.")
@click.option(
    "--best", metavar="METRIC[:max|:min]", help="Keep the best by a metric, the lowest by default."
)
@click.option("--every-hours", type=float, metavar="H", help="Keep the first of every H hours.")
@click.option(
    "--for-hours", type=float, metavar="H", help="With --every-hours: while not older than that."
)
@click.option("--every-steps", type=int, metavar="N", help="Keep the first of every N steps.")
@click.option("--epochs", is_flag=True, help="Keep the last of every epoch.")
@click.option(
    "--within", type=SIZE, metavar="SIZE", help="Keep no more than SIZE in all, like 200GiB."
)
@json_option
def command(source: CheckpointSource, dry_run: bool, as_json: bool, **keep: Any) -> int:
    """Remove the checkpoints that are not to be kept.

    Each option keeps something, and what none keeps is removed. Without any, that is what a run
    keeps by default, whatever room the disk has. Pinned checkpoints always stay. Refused beside a
    run, unless with --dry-run.
    """
    require_directory(source)
    policy = _policy(Keep(**keep))
    if dry_run:
        infos = _infos(source)
        _tell(infos, policy.to_remove(infos), "would be removed", as_json=as_json)
        return 0
    with locked(source, otherwise=_OTHERWISE) as target:
        infos = _infos(source)
        doomed = policy.to_remove(infos)
        _tell(infos, doomed, "removed", as_json=as_json)
        removed = target.prune(doomed)
    if not as_json:
        print(f"{len(removed)} removed, {len(infos) - len(removed)} kept", flush=True)
    return 0


def _infos(source: CheckpointSource) -> list[CheckpointInfo]:
    """The checkpoints that retention knows of. A step that cannot be read is left alone."""
    found = [*listed(source, source.manifest).values()]
    if not found:
        raise NoCheckpointError(f"{source.name} holds no checkpoint that can be read")
    return found


def _tell(infos: list[CheckpointInfo], doomed: list[int], verb: str, *, as_json: bool) -> None:
    """Print what becomes of each checkpoint."""
    for info in infos:
        state = verb if info.step in doomed else "kept"
        if as_json:
            row = {"step": info.step, "state": state, "num_bytes": info.num_bytes}
            print(text.json_of({**row, "created_unix_s": info.created_s}, indent=None), flush=True)
            continue
        made = moment(info.created_s)
        print(f"step {info.step}: {state}, {size_text(info.num_bytes)}, of {made}", flush=True)


@dataclass(frozen=True, slots=True)
class Keep:
    """The options that say what to keep."""

    last: int | None
    best: str | None
    every_hours: float | None
    for_hours: float | None
    every_steps: int | None
    epochs: bool
    within: int | None


def _policy(args: Keep) -> Retention:
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
