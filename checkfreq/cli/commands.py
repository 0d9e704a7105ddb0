"""``ls``, ``show`` and ``verify``. Each prints to standard output and returns the exit status."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Iterator
from typing import TypeAlias

from checkfreq.cli import text
from checkfreq.errors import CheckFreqError, CorruptCheckpointError, NoCheckpointError, printable
from checkfreq.persist.handover import ranks_in, status
from checkfreq.persist.listing import best_in
from checkfreq.store.fileops import Kind
from checkfreq.store.manifest import FileEntry, Manifest
from checkfreq.store.marks import StepMark
from checkfreq.store.source import CheckpointSource
from checkfreq.store.store import CheckpointStore
from checkfreq.types import Json, size_text

Command: TypeAlias = Callable[[CheckpointSource, argparse.Namespace], int]

#: Folders with checkpoints that were set aside.
_SET_ASIDE = ("quarantine", "superseded")
_IS_STEP = re.compile(r"step-.*[0-9]")
_LINKED = "a symbolic link: no checkpoint, not followed"


def ls(store: CheckpointSource, args: argparse.Namespace) -> int:
    """Print one line per checkpoint, judged by manifest and file sizes, not by digests."""
    marks = store.marks()
    rows = [_row(store, step, marks.get(step)) for step in _steps(store)]
    if args.json:
        print("\n".join(text.json_of(row, indent=None) for row in rows))
        return 0
    head = ("step", "created", "bytes", "world", "state", "marks")
    print(text.table([name.upper() for name in head], (_cells(row) for row in rows)))
    for line in _other_content(store):
        print(line)
    return 0


def _row(store: CheckpointSource, step: int, mark: StepMark | None) -> dict[str, object]:
    row: dict[str, object] = {"step": step, "marks": text.mark(mark)}
    try:
        manifest = store.inspect(step)
    except CheckFreqError as error:
        return {**row, "state": f"unreadable: {error}"}
    return {
        **row,
        "created_unix_s": manifest.created_unix_s,
        "num_bytes": manifest.num_bytes,
        "world": manifest.world,
        "state": "ok",
    }


def _cells(row: dict[str, object]) -> list[str]:
    created, num_bytes = row.get("created_unix_s"), row.get("num_bytes")
    return [
        str(row["step"]),
        text.moment(created) if isinstance(created, float | int) else "-",
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
        yield f"{store.path(step).name}: {_LINKED}"
    yield from _in_memory(store)


def _in_memory(store: CheckpointStore) -> Iterator[str]:
    """What workers that lingered after a killed run keep for the next one."""
    for rank in ranks_in(store.root):
        held = status(store.root, rank)
        if held is not None:
            yield (
                f"rank {rank} in memory: step {held.step} ({held.stage.value}), "
                f"{size_text(held.num_bytes)}, for {held.left_s:.0f} s more (process {held.pid})"
            )


def show(store: CheckpointSource, args: argparse.Namespace) -> int:
    """Print what the manifest of one checkpoint says."""
    step = _steps(store)[-1] if args.step is None else args.step
    if isinstance(step, str):
        step = best_in(store, step)
    manifest = store.manifest(step)
    if args.json:
        print(manifest.encode().decode().replace("\x7f", "\\u007f"), end="")
        return 0
    _show_head(store, manifest)
    print()
    print(text.table(("FILE", "BYTES", "TENSORS"), map(_file_cells, manifest.files)))
    for file in manifest.files if args.tensors else ():
        _show_tensors(file)
    print(f"\nstate that is not tensors: {text.names(manifest.objects)}")
    if args.objects:
        print(text.json_of(manifest.objects))
    for rank, own in manifest.ranks.items():
        _show_rank(rank, own, objects=args.objects)
    for line in _in_memory(store) if isinstance(store, CheckpointStore) else ():
        print(line)
    return 0


def _show_rank(rank: int, own: dict[str, Json], *, objects: bool) -> None:
    print(f"rank {rank}'s own: {text.names(own)}")
    if objects:
        print(text.json_of(own))


def _show_head(store: CheckpointSource, manifest: Manifest) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    facts = {
        "path": store.where(manifest.step),
        "step": str(manifest.step),
        "created": text.moment(manifest.created_unix_s),
        "attempt": manifest.attempt,
        "world": _world(manifest),
        "size": size_text(manifest.num_bytes),
        "versions": versions or "-",
        "marks": text.mark(store.marks().get(manifest.step)) or "-",
    }
    for name, fact in facts.items():
        print(f"{name:9}{printable(fact)}")


def _world(manifest: Manifest) -> str:
    """``4``; if other ranks committed to other directories, also which ranks are here."""
    if not manifest.ranks or len(manifest.ranks) == manifest.world:
        return str(manifest.world)
    return f"{manifest.world}, here: rank {', '.join(map(str, manifest.ranks))}"


def _file_cells(file: FileEntry) -> list[str]:
    return [file.name, size_text(file.num_bytes), str(len(file.tensors))]


def _show_tensors(file: FileEntry) -> None:
    rows = (
        (
            tensor.name,
            tensor.dtype,
            text.shape(tensor.shape),
            str(tensor.num_bytes),
            text.digest(tensor),
        )
        for tensor in file.tensors
    )
    print(f"\n{file.name}:")
    print(text.table(("TENSOR", "DTYPE", "SHAPE", "BYTES", "XXH3"), rows))


def verify(store: CheckpointSource, args: argparse.Namespace) -> int:
    """Read and digest everything. A damaged step does not end it: all steps are verified."""
    steps = _steps(store) if args.step is None else [args.step]
    found = [_verify(store, step, named=args.step is not None) for step in steps]
    linked = store.links() if args.step is None else []
    for step in linked:
        print(f"step {step}: {_LINKED}", flush=True)
    return 0 if all(found) and not linked else 1


def _verify(store: CheckpointSource, step: int, *, named: bool) -> bool:
    began_s = time.monotonic()
    try:
        manifest = store.verify(step)
    except CorruptCheckpointError as error:
        print(f"step {step}: DAMAGED: {error}", flush=True)
        return False
    except NoCheckpointError:
        if named:
            raise
        print(f"step {step}: removed meanwhile (retention)", flush=True)
        return True
    num_bytes, seconds = manifest.num_bytes, time.monotonic() - began_s
    print(f"step {step}: ok, {size_text(num_bytes)} in {seconds:.2f} s", flush=True)
    return True


def _steps(store: CheckpointSource) -> list[int]:
    """Committed steps, ascending, at least one."""
    if isinstance(store, CheckpointStore) and not store.ops.is_dir(store.root):
        raise NoCheckpointError(f"{store.root} is not a directory")
    steps = store.steps()
    if not steps:
        names = (store.where(step).rpartition("/")[2] for step in store.links())
        but = "".join(f"; {name}: {_LINKED}" for name in names)
        raise NoCheckpointError(f"{store.name} holds no checkpoint{but}")
    return steps
