"""Which ranks' records a rank has to read, where they make a tree, and reading them.

The leader's, the rank's own, and those of ranks whose shards may overlap what the rank holds now:
the root's index of cuts tells which. So if N ranks restore what N ranks wrote, each reads two.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial

from checkfreq.restore.validation import validate_state
from checkfreq.state.capture import GRADIENTS
from checkfreq.state.checkpoint import CFCheckpoint
from checkfreq.store.manifest import MANIFEST_NAME, Manifest
from checkfreq.store.parts import tied_names
from checkfreq.store.source import CheckpointSource
from checkfreq.store.tree import Leaf, Tree
from checkfreq.types import Role


class RecordReader:
    """What one rank reads of the record of one checkpoint.

    ``manifest`` is all that the rank needs: of a record that is no tree at once, else after
    `stages`.
    """

    manifest: Manifest

    def __init__(self, source: CheckpointSource, head: Manifest | Tree, *, role: Role) -> None:
        self._source = source
        self._head = head
        self._role = role
        self._parts: dict[int, Manifest] = {}
        if isinstance(head, Manifest):
            self.manifest = head

    def stages(self, chk: CFCheckpoint) -> tuple[tuple[str, Callable[[], None]], ...]:
        """What is done one after another; each raises like `CheckpointSource.manifest`.

        The second one alone asks the users' objects.
        """
        if isinstance(self._head, Manifest):
            stages: tuple[Callable[[], None], ...] = (_nothing, _nothing, _nothing)
        else:
            tree, chosen = self._head, set[int]()
            stages = (
                partial(self._read_first, tree),
                lambda: chosen.update(self._overlapping(tree, chk)),
                lambda: self._read_chosen(tree, chosen),
            )
        names = ("reading the first records of", "choosing records of", "reading the records of")
        return tuple(zip(names, stages, strict=True))

    def _read_first(self, tree: Tree) -> None:
        """Read what a rank needs whatever it holds."""
        validate_state(tree.only_positions(), path=self._path)
        self._read(tree, set(self._always(tree)))

    def _read_chosen(self, tree: Tree, chosen: Collection[int]) -> None:
        self._read(tree, set(chosen))
        manifest = tree.joined(list(self._parts.values()))
        validate_state(manifest, path=self._path)
        self.manifest = tree.with_others(manifest)

    @property
    def _path(self) -> str:
        return self._source.where(self._head.step, MANIFEST_NAME)

    def _read(self, tree: Tree, ranks: set[int]) -> None:
        for part in self._source.parts(tree, ranks - self._parts.keys()):
            self._parts.update(dict.fromkeys(part.ranks, part))

    def _always(self, tree: Tree) -> Iterator[int]:
        yield from (tree.leader, self._role.rank)
        leaves = tree.leaves.values()
        # A new rank has the first one's buffers; and gradients that only others had count as well.
        yield from _first(leaf.rank for leaf in leaves if leaf.names)
        yield from _first(leaf.rank for leaf in leaves if GRADIENTS in leaf.names)

    def _overlapping(self, tree: Tree, chk: CFCheckpoint) -> Iterator[int]:
        if tree.is_split:
            yield from tree.leaves
        for name, adapter in chk.adapters.items():
            json = tree.objects.get(name)
            if json is None:
                yield from (leaf.rank for leaf in tree.leaves.values() if _shares(leaf, name))
                continue
            holdings, tied = adapter.holdings(), self._tied(tree, name)
            for key, (_, sizes) in json.get("sharded_tensors", {}).items():
                for one in (key, *tied.get(key, ())):
                    for box in holdings(one, tuple(sizes)):
                        yield from tree.cuts.ranks(sizes, box)

    def _tied(self, tree: Tree, name: str) -> dict[str, list[str]]:
        """The names that are tied to each key, in the records that were read."""
        owns = (part.ranks[rank] for rank, part in self._parts.items())
        return tied_names(tree.objects[name], name, owns)


def _nothing() -> None:
    """For a rank that reads no tree where others do."""


def _shares(leaf: Leaf, name: str) -> bool:
    """Whether a rank has a share of an object, and others have the rest."""
    return name in leaf.names and name not in leaf.whole


def _first(ranks: Iterable[int]) -> list[int]:
    return [min(found)] if (found := [*ranks]) else []
