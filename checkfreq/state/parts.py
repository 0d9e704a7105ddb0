"""The whole state as one rank sees it, and the part of it that this rank writes.

Replicated tensors: the leader of the group, or each of the group a share (``Role.split``).
DTensors: each rank its box; of those that hold the same box the first of the group. What is a
rank's own: itself. No rank is asked; all compute the same from the same structure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from checkfreq.errors import StateError
from checkfreq.state.collector import TensorRef, make_ref
from checkfreq.state.division import Item, divide
from checkfreq.state.dtensors import Cut
from checkfreq.state.tensors import DTYPE_NAMES
from checkfreq.store.parts import stem_of
from checkfreq.types import Json, Role


@dataclass(frozen=True, slots=True)
class Everything:
    """The whole state as one rank sees it, object after object.

    ``spans[name]`` are the refs of an object; ``cuts`` say of which DTensor a ref is the local
    tensor. ``own_objects`` and ``own_tensors`` (object, key) differ from rank to rank.
    """

    refs: list[TensorRef]
    spans: Mapping[str, tuple[int, int]]
    objects: dict[str, Json]
    aliases: dict[str, dict[str, str]]
    cuts: dict[int, Cut] = field(default_factory=dict)
    own_objects: frozenset[str] = frozenset()
    own_tensors: frozenset[tuple[str, str]] = frozenset()


@dataclass(frozen=True, slots=True)
class CapturedState:
    """What this rank writes of the state as of one boundary.

    ``tensors`` are live, unique per object; settled ones hold still until the next weight
    update, the others must be copied before the training goes on. ``objects`` is everything
    else, as JSON by tracked name; ``aliases`` maps, per file, a tied name to the key that
    holds its bytes. ``own``: JSON of what differs from rank to rank; None on one rank.
    ``whole`` is what this is a part of, for ``structure``; None on one rank.
    ``is_split``: replicated tensors are divided among the ranks.
    """

    tensors: list[TensorRef]
    objects: dict[str, Json]
    aliases: dict[str, dict[str, str]]
    own: dict[str, Json] | None = None
    whole: Everything | None = None
    is_split: bool = False


def alone(everything: Everything) -> CapturedState:
    """What a run of one rank writes: everything."""
    for index, cut in everything.cuts.items():
        if not cut.box.is_whole(cut.shape):
            ref = everything.refs[index]
            raise StateError(
                f"{ref.stem}.{ref.key}: a DTensor of shape {list(cut.shape)}, of which this "
                f"process holds {cut.box}, needs a checkpoint of all ranks; initialise "
                "torch.distributed before CFManager is made"
            )
    return CapturedState(everything.refs, everything.objects, everything.aliases)


def part_of(everything: Everything, role: Role) -> CapturedState:
    """What the rank of ``role`` writes of everything."""
    part = _Part(everything, role)
    for name in everything.spans:
        part.add(name)
    return CapturedState(
        part.tensors, part.objects, part.aliases, part.own, everything, is_split=role.split
    )


class _Part:
    """One part while it is put together."""

    def __init__(self, everything: Everything, role: Role) -> None:
        self._all = everything
        self._role = role
        self._portions = dict(_division(everything, role)) if role.split else None
        self._mixed = _objects_with_more_than_replicas(everything)
        self.tensors: list[TensorRef] = []
        self.objects: dict[str, Json] = {}
        self.own: dict[str, Json] = {}
        self.aliases: dict[str, dict[str, str]] = {}

    def add(self, name: str) -> None:
        """Add what this rank writes of one object."""
        everything, span = self._all, range(*self._all.spans[name])
        is_own = name in everything.own_objects
        json = everything.objects[name]
        if is_own:
            self.own[name] = self._with_names(name, json, span)
        elif self._role.leads:
            self.objects[name] = self._with_names(name, json, span)
        if not is_own and name not in self._mixed and self._portions is None:
            if self._role.leads:
                self._take(name, name, everything.refs[span.start : span.stop])
            return
        self._sort(name, span, is_own=is_own)

    def _with_names(self, name: str, json: Json, span: range) -> Json:
        """The JSON and, in it, what tensors are in the ranks' files, be those there or not."""
        if name not in self._mixed:
            return json
        own = [key for owner, key in sorted(self._all.own_tensors) if owner == name]
        shards = {}
        for index in span:
            cut, ref = self._cut_of(index), self._all.refs[index]
            if cut is not None:
                shards[ref.key] = [DTYPE_NAMES[ref.tensor.dtype], list(cut.shape)]
        extra = {"own_tensors": own, "sharded_tensors": shards}
        return {**json, **{field: names for field, names in extra.items() if names}}

    def _sort(self, name: str, span: range, *, is_own: bool) -> None:
        whole: list[TensorRef] = []
        mine: list[TensorRef] = []
        boxes: dict[str, Json] = {}
        stem = stem_of(name, self._role.rank)
        for index in span:
            ref, cut = self._ref(index), self._cut_of(index)
            if cut is not None:
                if cut.writer(self._role.group) == self._role.rank and cut.box.num_elements:
                    mine.append(make_ref(TensorRef, (stem, *ref[1:])))
                    boxes[ref.key] = [list(cut.shape), list(cut.box.offsets)]
            elif is_own or (name, ref.key) in self._all.own_tensors:
                mine.append(ref._replace(stem=stem))
            elif self._portions is None:
                if self._role.leads:
                    whole.append(ref)
            elif (rows := self._portions.get(index, _NOT_MINE)) is None and self._role.leads:
                whole.append(ref)
            elif rows is not _NOT_MINE:
                mine.append(_rows_of(ref, rows)._replace(stem=stem))
                boxes[ref.key] = [list(ref.tensor.shape), _offsets(ref, rows)]
        self._take(name, name, whole)
        self._take(name, stem, mine)
        if boxes:
            self.own[name] = {**self.own.get(name, {}), "shards": boxes}

    def _ref(self, index: int) -> TensorRef:
        ref, cut = self._all.refs[index], self._all.cuts.get(index)
        if cut is not None and 0 in cut.shape:  # nobody has a shard of it, but it has a shape
            return ref._replace(tensor=ref.tensor.new_empty(cut.shape))
        return ref

    def _cut_of(self, index: int) -> Cut | None:
        cut = self._all.cuts.get(index)
        return None if cut is None or _is_replica(cut, self._role.group) else cut

    def _take(self, name: str, stem: str, refs: list[TensorRef]) -> None:
        self.tensors += refs
        aliases = self._all.aliases.get(name)
        if aliases and refs:
            keys = {ref.key for ref in refs}
            here = {alias: key for alias, key in aliases.items() if key in keys}
            if here:
                self.aliases[stem] = here


#: Stands for a portion of another rank.
_NOT_MINE = (-1, -1)


def _is_replica(cut: Cut, group: tuple[int, ...]) -> bool:
    """A DTensor that is written like a plain tensor: all of the group have all of it."""
    return cut.is_replicated_in(group) or 0 in cut.shape


def _objects_with_more_than_replicas(everything: Everything) -> set[str]:
    refs = everything.refs
    return {refs[index].stem for index in everything.cuts} | {
        name for name, _ in everything.own_tensors
    }


def _rows_of(ref: TensorRef, rows: tuple[int, int] | None) -> TensorRef:
    return ref if rows is None else ref._replace(tensor=ref.tensor[rows[0] : rows[1]])


def _offsets(ref: TensorRef, rows: tuple[int, int] | None) -> list[int]:
    offsets = [0] * ref.tensor.dim()
    if rows is not None:
        offsets[0] = rows[0]
    return offsets


def _division(everything: Everything, role: Role) -> Iterator[tuple[int, tuple[int, int] | None]]:
    """By index of each replicated tensor of which this rank writes some: its rows, None for all.

    What a forward pass may change stays with the leader: DistributedDataParallel broadcasts
    buffers from there, and the others' differ until it does.
    """
    indices = list(_replicated(everything, role.group))
    items = [_item(everything.refs[index]) for index in indices]
    me = role.group.index(role.rank)
    for index, portions in zip(indices, divide(items, len(role.group)), strict=True):
        for portion in portions:
            if portion.member == me:
                yield index, portion.rows


def _replicated(everything: Everything, group: tuple[int, ...]) -> Iterator[int]:
    for name, span in everything.spans.items():
        if name in everything.own_objects:
            continue
        if not everything.cuts and not everything.own_tensors:
            yield from range(*span)
            continue
        for index in range(*span):
            cut = everything.cuts.get(index)
            is_own = (name, everything.refs[index].key) in everything.own_tensors
            if not is_own and (cut is None or _is_replica(cut, group)):
                yield index


def _item(ref: TensorRef) -> Item:
    tensor = ref.tensor
    return Item(tensor.nbytes, tensor.shape[0] if tensor.dim() else 0, not ref.settled)
