"""``checkfreq log``: what happened in a directory, from its events, run by run."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import click

from checkfreq.cli import text
from checkfreq.cli.arguments import example, json_option, records_argument
from checkfreq.cli.checkpoints import require_directory
from checkfreq.cli.telling import Event, Ordinary, Teller
from checkfreq.errors import printable
from checkfreq.store.store import CheckpointStore
from checkfreq.story.reading import EventReader
from checkfreq.types import moment

_LOOK_S = 0.5


@click.command(
    "log", epilog=example("checkfreq log chk/", "checkfreq log chk/ --last 1 --all --follow")
)
@records_argument
@click.option("--all", "is_all", is_flag=True, help="Tell every checkpoint, also of many in a row.")
@click.option("--last", type=click.IntRange(1), metavar="N", help="Tell the last N runs alone.")
@click.option("--follow", is_flag=True, help="Go on telling what happens, until Ctrl-C.")
@json_option
def command(
    store: CheckpointStore, is_all: bool, last: int | None, follow: bool, as_json: bool
) -> int:
    """Tell what happened in a directory: what was saved, lost, restored, removed, and why the
    interval changed, run by run.

    With --json every event is one line, with the number of its run and
    what is told of it. Only reads, so it works beside
    a run.
    """
    require_directory(store)
    reader = EventReader(store.root)
    reader.require()
    log = _Log(is_all=is_all or follow, as_json=as_json)
    for line in log.lines(reader.new(), last=last):
        print(line)
    while follow:
        for line in log.lines(reader.new()):
            print(line, flush=True)
        time.sleep(_LOOK_S)
    if reader.num_skipped and not as_json:
        print(f"({reader.num_skipped} line(s) are no events)")
    return 0


class _Log:
    """Events as lines."""

    def __init__(self, *, is_all: bool, as_json: bool) -> None:
        self._is_all = is_all
        self._as_json = as_json
        self._teller = Teller()

    def lines(self, events: Iterable[Event], *, last: int | None = None) -> Iterator[str]:
        """The lines of events that are new; ``last``: of so many runs."""
        told = [(event, *self._teller.tell(event)) for event in events]
        first = 0 if last is None or not told else told[-1][1] - last + 1
        row = Ordinary()
        for event, run, is_new, sentence in told:
            if run < first:
                continue
            if self._as_json:
                record = {**event, "run": run, "told": sentence}
                yield text.json_of(record, indent=None)
                continue
            if is_new:
                yield from self._rows(row)
                yield from ([""] if run > max(first, 1) else [])
                yield f"run {run}"
            if row.takes(event) and not self._is_all:
                row.add(event, sentence)
                continue
            yield from self._rows(row)
            yield _line(event.get("time_unix_s"), sentence)
        yield from self._rows(row)

    def _rows(self, row: Ordinary) -> Iterator[str]:
        yield from (_line(time_s, said) for time_s, said in row.told())


def _line(time_unix_s: object, sentence: str) -> str:
    at = moment(time_unix_s) if isinstance(time_unix_s, int | float) else "?"
    return printable(f"  {at}  {sentence}")
