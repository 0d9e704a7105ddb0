"""``checkfreq quarantine``: set a checkpoint aside, so that no restore takes it."""

from __future__ import annotations

import click

from checkfreq.cli import text
from checkfreq.cli.arguments import STEP, example, json_option, source_argument
from checkfreq.cli.checkpoints import resolved
from checkfreq.cli.locking import locked
from checkfreq.events import Event, EventLog
from checkfreq.store.source import CheckpointSource
from checkfreq.store.store import CheckpointStore

_OTHERWISE = (
    "A run quarantines by itself what it finds damaged when it restores. Stop the run, quarantine "
    "the step, and start it again; to restore an earlier step without that: restore(step=N)"
)


@click.command(
    "quarantine",
    epilog=example('checkfreq quarantine chk/ 1200 --reason "loss was already NaN"'),
)
@source_argument
@click.argument("step", metavar="STEP", type=STEP)
@click.option("--reason", required=True, metavar="TEXT", help="Why; stored beside it.")
@json_option
def command(source: CheckpointSource, step: int | str, reason: str, as_json: bool) -> int:
    """Move a checkpoint to quarantine/, so that no restore takes it.

    Nothing is removed: move the directory back to undo it. A copy in a mirror stays as it is: give
    the URL too, where its marker is moved to superseded/. Refused beside a run.
    """
    number = resolved(source, step)
    source.require(number)
    with locked(source, otherwise=_OTHERWISE) as target:
        source.require(number)
        path = target.quarantine(number, reason)
        if isinstance(target, CheckpointStore):
            events = EventLog(target.root / "events.jsonl", target.ops)
            events.append(Event("quarantined", number, {"reason": reason, "by": "user"}))
    left = source.steps()
    if as_json:
        record = {"step": number, "path": str(path), "newest_left": left[-1] if left else None}
        print(text.json_of(record, indent=None))
        return 0
    print(f"step {number} is in {path}")
    newest = f"step {left[-1]}" if left else "none: a restore would find no checkpoint"
    print(f"newest that is left: {newest}")
    return 0
