"""``checkfreq show``: what one checkpoint holds."""

from __future__ import annotations

import click

from checkfreq.cli import text
from checkfreq.cli.arguments import STEP, example, json_option, source_argument
from checkfreq.cli.checkpoints import in_memory, resolved
from checkfreq.errors import printable
from checkfreq.store.manifest import FileEntry, Manifest
from checkfreq.store.source import CheckpointSource
from checkfreq.store.tree import Tree
from checkfreq.types import Json, moment, size_text


@click.command(
    "show",
    epilog=example(
        "checkfreq show chk/", "checkfreq show chk/ 1200 --tensors", "checkfreq show chk/ best:loss"
    ),
)
@source_argument
@click.argument("step", metavar="[STEP]", type=STEP, required=False)
@click.option("--tensors", is_flag=True, help="Also list every tensor.")
@click.option("--objects", is_flag=True, help="Also print the state that is not tensors.")
@json_option
def command(
    source: CheckpointSource, step: int | str | None, tensors: bool, objects: bool, as_json: bool
) -> int:
    """Show what a checkpoint holds, by default the newest.

    STEP is 1200, step-00001200/ or best:METRIC[:max|:min]. With --json the whole record is printed.
    """
    root = source.head(resolved(source, step))
    if as_json:
        print(root.encode().decode().replace("\x7f", "\\u007f"), end="")
        return 0
    _show_head(source, root)
    for part in source.parts(root):
        print()
        _show_files(part, tensors=tensors)
        if root is part:
            _show_objects(root, objects=objects)
        for rank, own in part.ranks.items():
            _show_rank(rank, own, objects=objects)
    if isinstance(root, Tree):
        _show_objects(root, objects=objects)
    for line in in_memory(source):
        print(line)
    return 0


def _show_files(part: Manifest, *, tensors: bool) -> None:
    """The files of a record: all there are, or of a tree one rank's."""
    print(text.table(("FILE", "BYTES", "TENSORS"), map(_file_cells, part.files)))
    for file in part.files if tensors else ():
        _show_tensors(file)


def _show_objects(root: Manifest | Tree, *, objects: bool) -> None:
    print(f"\nstate that is not tensors: {text.names(root.objects)}")
    if objects:
        print(text.json_of(root.objects))


def _show_rank(rank: int, own: dict[str, Json], *, objects: bool) -> None:
    print(f"rank {rank}'s own: {text.names(own)}")
    if objects:
        print(text.json_of(own))


def _show_head(store: CheckpointSource, manifest: Manifest | Tree) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    facts = {
        "path": store.where(manifest.step),
        "step": str(manifest.step),
        "created": moment(manifest.created_unix_s),
        "attempt": manifest.attempt,
        "world": _world(manifest),
        "size": size_text(manifest.num_bytes),
        "versions": versions or "-",
        "marks": text.mark(store.marks().get(manifest.step)) or "-",
    }
    for name, fact in facts.items():
        print(f"{name:9}{printable(fact)}")


def _world(manifest: Manifest | Tree) -> str:
    """``4``; if other ranks committed to other directories, also which ranks are here."""
    ranks = manifest.leaves if isinstance(manifest, Tree) else manifest.ranks
    if not ranks or len(ranks) == manifest.world:
        return str(manifest.world)
    return f"{manifest.world}, here: rank {', '.join(map(str, ranks))}"


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
