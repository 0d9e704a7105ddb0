"""The part of the state that one rank of several writes.

Replicated tensors are written by the leader of the group, with files of their own for what is
frozen, or divided among the group (``Role.split``). Each rank writes its shards of DTensors; of the
ranks that hold the same shard, the first of the group does. State that differs from rank to rank is
written by every rank. The ranks do not talk about it: all compute the same from the same structure.
"""

from __future__ import annotations

from collections.abc import Iterator

from checkfreq.state.collector import (
    CapturedState,
    LocalState,
    TensorRef,
    aliases_of,
    files_of,
    make_ref,
    without_buffers,
)
from checkfreq.state.division import TensorSize, divide
from checkfreq.state.dtensors import LocalShard
from checkfreq.state.tensors import DTYPE_NAMES
from checkfreq.store.parts import stem_of
from checkfreq.types import Json, Role


def part_of(local: LocalState, role: Role) -> CapturedState:
    """What the rank of ``role`` writes."""
    part = _Part(local, role)
    for name in local.spans:
        part.add(name)
    return CapturedState(
        part.tensors, part.objects, part.aliases, part.rank_objects, local, is_split=role.split
    )


class _Part:
    """One part while it is being built."""

    def __init__(self, local: LocalState, role: Role) -> None:
        self._local = local
        self._role = role
        self._assigned = dict(_division(local, role)) if role.split else None
        self._mixed = _objects_in_rank_files(local)
        self.tensors: list[TensorRef] = []
        self.objects: dict[str, Json] = {}
        self.rank_objects: dict[str, Json] = {}
        self.aliases: dict[str, dict[str, str]] = {}

    def add(self, name: str) -> None:
        """Add what this rank writes of one object."""
        local, span = self._local, range(*self._local.spans[name])
        is_per_rank = name in local.per_rank_objects
        json = local.objects[name]
        if is_per_rank:
            self.rank_objects[name] = self._with_names(name, json, span)
        elif self._role.leads:
            self.objects[name] = self._with_names(name, json, span)
        if not is_per_rank and name not in self._mixed and self._assigned is None:
            for stem, refs in files_of(local, name) if self._role.leads else ():
                self._take(name, stem, refs)
            return
        self._add_by_tensor(name, span, is_per_rank=is_per_rank)

    def _with_names(self, name: str, json: Json, span: range) -> Json:
        """The JSON, with the names of the tensors that lie in the files of the ranks.

        A restore thereby knows of them even if it sees no such file.
        """
        if name not in self._mixed:
            return json
        own = [key for owner, key in sorted(self._local.per_rank_tensors) if owner == name]
        sharded = {}
        for index in span:
            shard, ref = self._shard_of(index), self._local.refs[index]
            if shard is not None:
                sharded[ref.key] = [DTYPE_NAMES[ref.tensor.dtype], list(shard.shape)]
        extra = {"own_tensors": own, "sharded_tensors": sharded}
        return {**json, **{field: names for field, names in extra.items() if names}}

    def _add_by_tensor(self, name: str, span: range, *, is_per_rank: bool) -> None:
        whole: list[TensorRef] = []
        mine: list[TensorRef] = []
        boxes: dict[str, Json] = {}
        stem = stem_of(name, self._role.rank)
        for index in span:
            ref, shard = self._ref(index), self._shard_of(index)
            if shard is not None:
                if shard.writer(self._role.group) == self._role.rank and shard.box.num_elements:
                    mine.append(make_ref(TensorRef, (stem, *ref[1:])))
                    boxes[ref.key] = [list(shard.shape), list(shard.box.offsets)]
            elif is_per_rank or (name, ref.key) in self._local.per_rank_tensors:
                mine.append(ref._replace(stem=stem))
            elif self._assigned is None:
                if self._role.leads:
                    whole.append(ref)
            elif (rows := self._assigned.get(index, _NOT_MINE)) is None and self._role.leads:
                whole.append(ref)
            elif rows is not _NOT_MINE:
                mine.append(_rows_of(ref, rows)._replace(stem=stem))
                boxes[ref.key] = [list(ref.tensor.shape), _offsets(ref, rows)]
        whole, apart = without_buffers(local=self._local, refs=whole)
        self._take(name, name, whole)
        for buffers_stem, buffers in apart:
            self._take(name, buffers_stem, buffers)
        self._take(name, stem, mine)
        if boxes:
            self.rank_objects[name] = {**self.rank_objects.get(name, {}), "shards": boxes}

    def _ref(self, index: int) -> TensorRef:
        ref, shard = self._local.refs[index], self._local.shards.get(index)
        # A DTensor without elements has no shard anywhere; its shape still has to be recorded.
        if shard is not None and 0 in shard.shape:
            return ref._replace(tensor=ref.tensor.new_empty(shard.shape))
        return ref

    def _shard_of(self, index: int) -> LocalShard | None:
        shard = self._local.shards.get(index)
        return None if shard is None or _is_replica(shard, self._role.group) else shard

    def _take(self, name: str, stem: str, refs: list[TensorRef]) -> None:
        self.tensors += refs
        if here := aliases_of(self._local, name, refs):
            self.aliases[stem] = here


#: Rows of a tensor that a different rank writes.
_NOT_MINE = (-1, -1)


def _is_replica(shard: LocalShard, group: tuple[int, ...]) -> bool:
    """Whether a DTensor is written like a plain tensor: every rank of the group has all of it."""
    return shard.is_replicated_in(group) or 0 in shard.shape


def _objects_in_rank_files(local: LocalState) -> set[str]:
    refs = local.refs
    return {refs[index].stem for index in local.shards} | {
        name for name, _ in local.per_rank_tensors
    }


def _rows_of(ref: TensorRef, rows: tuple[int, int] | None) -> TensorRef:
    return ref if rows is None else ref._replace(tensor=ref.tensor[rows[0] : rows[1]])


def _offsets(ref: TensorRef, rows: tuple[int, int] | None) -> list[int]:
    offsets = [0] * ref.tensor.dim()
    if rows is not None:
        offsets[0] = rows[0]
    return offsets


def _division(local: LocalState, role: Role) -> Iterator[tuple[int, tuple[int, int] | None]]:
    """(index, rows or None for all) of each replicated tensor that this rank writes some of.

    Volatile tensors stay with the leader: DistributedDataParallel broadcasts buffers from there,
    and those of the other ranks differ until it does.
    """
    indices = list(_replicated(local, role.group))
    sizes = [_size(local.refs[index]) for index in indices]
    me = role.group.index(role.rank)
    for index, assignments in zip(indices, divide(sizes, len(role.group)), strict=True):
        for assignment in assignments:
            if assignment.member == me:
                yield index, assignment.rows


def _replicated(local: LocalState, group: tuple[int, ...]) -> Iterator[int]:
    for name, span in local.spans.items():
        if name in local.per_rank_objects:
            continue
        if not local.shards and not local.per_rank_tensors:
            yield from range(*span)
            continue
        for index in range(*span):
            shard = local.shards.get(index)
            is_per_rank = (name, local.refs[index].key) in local.per_rank_tensors
            if not is_per_rank and (shard is None or _is_replica(shard, group)):
                yield index


def _size(ref: TensorRef) -> TensorSize:
    tensor = ref.tensor
    return TensorSize(tensor.nbytes, tensor.shape[0] if tensor.dim() else 0, not ref.settled)
