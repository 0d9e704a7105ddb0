"""The part of the state that one rank writes.

Replicated tensors: the leader of the group, or each of the group a share (``Role.split``).
DTensors: each rank its box; of those that hold the same box the first of the group. What is a
rank's own: itself. No rank is asked; all compute the same from the same structure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from checkfreq.errors import StateError
from checkfreq.snapshot.captured import CapturedState, Everything
from checkfreq.snapshot.division import Item, Portion, divide
from checkfreq.snapshot.dtensors import Cut
from checkfreq.snapshot.sink import TensorRef
from checkfreq.snapshot.tensors import DTYPE_NAMES
from checkfreq.types import Json, Role


def stem_of(name: str, rank: int) -> str:
    """Stem of the file with what one rank adds to an object."""
    return f"{name}.rank-{rank:05d}"


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
    return CapturedState(part.tensors, part.objects, part.aliases, part.own, everything)


class _Part:
    """One part while it is put together."""

    def __init__(self, everything: Everything, role: Role) -> None:
        self._all = everything
        self._role = role
        self._portions = dict(_division(everything, role)) if role.split else {}
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
        if not is_own and name not in self._mixed and not self._role.split:
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
                    mine.append(ref._replace(stem=stem))
                    boxes[ref.key] = [list(cut.shape), list(cut.box.offsets)]
            elif is_own or (name, ref.key) in self._all.own_tensors:
                mine.append(ref._replace(stem=stem))
            elif not self._role.split:
                if self._role.leads:
                    whole.append(ref)
            else:
                self._add_portion(ref, self._portions[index], whole, mine, boxes)
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

    def _add_portion(
        self,
        ref: TensorRef,
        portions: list[Portion],
        whole: list[TensorRef],
        mine: list[TensorRef],
        boxes: dict[str, Json],
    ) -> None:
        rank, group = self._role.rank, self._role.group
        rows = next((p.rows for p in portions if group[p.member] == rank), _NOT_MINE)
        if rows is _NOT_MINE:
            return
        if rows is None and self._role.leads:
            whole.append(ref)
            return
        begin, end = rows or (0, 0)
        tensor = ref.tensor if rows is None else ref.tensor[begin:end]
        mine.append(ref._replace(stem=stem_of(ref.stem, rank), tensor=tensor))
        offsets = [begin, *[0] * (ref.tensor.dim() - 1)][: ref.tensor.dim()]
        boxes[ref.key] = [list(ref.tensor.shape), offsets]

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


def _division(everything: Everything, role: Role) -> Iterable[tuple[int, list[Portion]]]:
    """By index of each replicated tensor: who writes which rows of it.

    What a forward pass may change stays with the leader: DistributedDataParallel broadcasts
    buffers from there, and the others' differ until it does.
    """
    indices = list(_replicated(everything, role.group))
    items = [_item(everything.refs[index]) for index in indices]
    return zip(indices, divide(items, len(role.group)), strict=True)


def _replicated(everything: Everything, group: tuple[int, ...]) -> Iterator[int]:
    for name, span in everything.spans.items():
        if name in everything.own_objects:
            continue
        for index in range(*span):
            cut = everything.cuts.get(index)
            is_own = (name, everything.refs[index].key) in everything.own_tensors
            if not is_own and (cut is None or _is_replica(cut, group)):
                yield index


def _item(ref: TensorRef) -> Item:
    tensor = ref.tensor
    num_bytes = tensor.numel() * tensor.element_size()
    return Item(num_bytes, tensor.shape[0] if tensor.dim() else 0, not ref.settled)
