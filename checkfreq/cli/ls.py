"""``checkfreq ls``: the checkpoints of a directory or a mirror, one line each."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click

from checkfreq.cli import text
from checkfreq.cli.arguments import example, json_option, source_argument
from checkfreq.cli.checkpoints import LINKED, in_memory, steps_of
from checkfreq.errors import CheckFreqError
from checkfreq.store.fileops import Kind
from checkfreq.store.marks import StepMark
from checkfreq.store.source import CheckpointSource
from checkfreq.store.store import CheckpointStore
from checkfreq.types import moment, size_text

#: Folders with checkpoints that were set aside.
_SET_ASIDE = ("quarantine", "superseded")
_IS_STEP = re.compile(r"step-.*[0-9]")
_HEAD = ("STEP", "CREATED", "BYTES", "WORLD", "STATE", "MARKS")


@click.command("ls", epilog=example("checkfreq ls chk/", "checkfreq ls --json s3://bucket/run"))
@source_argument
@json_option
def command(source: CheckpointSource, as_json: bool) -> int:
    """List the checkpoints of a directory or a mirror, oldest first.

    They are judged by their records and the sizes of their files; checkfreq verify reads the files.
    Prints also what is set aside, unfinished, or still in the memory of a killed run.
    """
    marks = source.marks()
    rows = [_row(source, step, marks.get(step)) for step in steps_of(source)]
    if as_json:
        print("\n".join(text.json_of(row, indent=None) for row in rows))
        return 0
    print(text.table(_HEAD, (_cells(row) for row in rows)))
    for line in _other_content(source):
        print(line)
    return 0


def _row(store: CheckpointSource, step: int, mark: StepMark | None) -> dict[str, object]:
    row: dict[str, object] = {"step": step, "marks": text.mark(mark)}
    try:
        record = store.glance(step)
    except CheckFreqError as error:
        return {**row, "state": f"unreadable: {error}"}
    return {
        **row,
        "created_unix_s": record.created_unix_s,
        "num_bytes": record.num_bytes,
        "world": record.world,
        "state": "ok",
    }


def _cells(row: dict[str, object]) -> list[str]:
    created, num_bytes = row.get("created_unix_s"), row.get("num_bytes")
    return [
        str(row["step"]),
        moment(created) if isinstance(created, float | int) else "-",
        size_text(num_bytes) if isinstance(num_bytes, int) else "-",
        str(row.get("world", "-")),
        str(row["state"]),
        str(row["marks"]),
    ]


def _other_content(store: CheckpointSource) -> Iterator[str]:
    if not isinstance(store, CheckpointStore):
        return
    kinds = store.ops.scan(store.root)
    unfinished = sum(1 for name in kinds if name.startswith(".tmp-"))
    if unfinished:
        yield f"{unfinished} being written, or interrupted (.tmp-*)"
    for folder in _SET_ASIDE:
        inside = store.ops.scan(store.root / folder) if kinds.get(folder) is Kind.DIRECTORY else ()
        held = sum(1 for name in inside if _IS_STEP.fullmatch(name))
        if held:
            yield f"{held} in {folder}/"
    for step in store.links():
        yield f"{store.path(step).name}: {LINKED}"
    yield from in_memory(store)
