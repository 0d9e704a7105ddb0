"""``checkfreq verify``: every digest of one checkpoint, or of all.

A checkpoint is read by several threads, as a restore does it: `checkfreq.restore.stream`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

import click

from checkfreq.cli import text
from checkfreq.cli.arguments import STEP, example, json_option, source_argument
from checkfreq.cli.checkpoints import LINKED, resolved, steps_of
from checkfreq.cli.progress import bytes_bar
from checkfreq.errors import CheckFreqError, CorruptCheckpointError, NoCheckpointError
from checkfreq.restore.stream import MOST_THREADS, Wanted, stream
from checkfreq.store.manifest import Manifest
from checkfreq.store.source import CheckpointSource
from checkfreq.store.verify import verify_digests
from checkfreq.types import Json, size_text

Report = dict[str, Json]

_THREADS = 4


@click.command(
    "verify", epilog=example("checkfreq verify chk/", "checkfreq verify chk/ 1200 --threads 16")
)
@source_argument
@click.argument("step", metavar="[STEP]", type=STEP, required=False)
@click.option(
    "--threads",
    type=click.IntRange(1, 256),
    default=_THREADS,
    show_default=True,
    metavar="N",
    help=f"Threads that read and digest; where reads are slow up to {MOST_THREADS} are started.",
)
@json_option
def command(source: CheckpointSource, step: int | str | None, threads: int, as_json: bool) -> int:
    """Read every byte of all checkpoints, or of one, and check every digest.

    A damaged checkpoint does not end it. Exit status: 0 if all are good, 1 if one is damaged, 2 if
    one cannot be read and none is damaged.
    """
    steps = steps_of(source) if step is None else [resolved(source, step)]
    links = source.links() if step is None else []
    states = []
    with bytes_bar("verifying", lambda: _num_bytes(source, steps)) as on_read:
        for one in steps:
            report = _verify(source, one, threads, on_read, named=step is not None)
            states.append(report["state"])
            _tell(report, as_json=as_json)
    for one in links:
        _tell({"step": one, "state": "link", "error": LINKED}, as_json=as_json)
    if links or "damaged" in states:
        return 1
    return 2 if "unreadable" in states else 0


def _num_bytes(source: CheckpointSource, steps: Sequence[int]) -> int:
    total = 0
    for step in steps:
        with contextlib.suppress(CheckFreqError, OSError):
            total += source.head(step).num_bytes
    return total


def _verify(
    source: CheckpointSource,
    step: int,
    threads: int,
    on_read: Callable[[int], None],
    *,
    named: bool,
) -> Report:
    began_s = time.monotonic()
    try:
        root = source.head(step)
        for part in source.parts(root):
            _read_all(source, part, threads, on_read)
    except CorruptCheckpointError as error:
        return {"step": step, "state": "damaged", "error": str(error)}
    except NoCheckpointError:
        if named:
            raise
        return {"step": step, "state": "removed"}
    except (CheckFreqError, OSError) as error:
        if named or not source.is_local:  # a store that cannot be reached has no other steps either
            raise
        return {"step": step, "state": "unreadable", "error": str(error)}
    seconds = time.monotonic() - began_s
    return {"step": step, "state": "ok", "num_bytes": root.num_bytes, "seconds": seconds}


def _read_all(
    source: CheckpointSource, manifest: Manifest, threads: int, on_read: Callable[[int], None]
) -> None:
    wanted = [Wanted(file, tensor, None) for file in manifest.files for tensor in file.tensors]
    stream(source, manifest.step, wanted, num_threads=threads, on_read=on_read)
    for entry in manifest.files:
        if not entry.tensors:  # a header alone
            with contextlib.closing(source.open_payload(manifest.step, entry)) as file:
                verify_digests(source.where(manifest.step, entry.name), entry, file)


def _tell(report: Report, *, as_json: bool) -> None:
    print(text.json_of(report, indent=None) if as_json else _line(report), flush=True)


def _line(report: Report) -> str:
    match report["state"]:
        case "ok":
            said = f"ok, {size_text(report['num_bytes'])} in {report['seconds']:.2f} s"
        case "damaged":
            said = f"DAMAGED: {report['error']}"
        case "unreadable":
            said = f"CANNOT BE READ: {report['error']}"
        case "removed":
            said = "removed meanwhile (retention)"
        case _:
            said = report["error"]
    return f"step {report['step']}: {said}"
