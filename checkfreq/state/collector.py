"""Collects the tensors of the objects that adapters read: unique per file, settled or volatile.

A tensor that an object reaches by two names (tied weights) is kept once, under the first name; the
second becomes an alias. Tensors are compared by address, which is safe because every tensor added
stays referenced until the capture ends. Used by the training thread only.
"""

from __future__ import annotations

from collections.abc import KeysView, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from checkfreq.errors import StateError
from checkfreq.state.classes import Classes
from checkfreq.state.codec import encode_tree
from checkfreq.state.composed import is_composed, part_name, take_apart, view_of
from checkfreq.state.dtensors import LocalShard, is_dtensor, local_of, shard_of
from checkfreq.state.sharing import Placed, memory_of, overlapping, placed
from checkfreq.state.tensors import detached, encode_torch, is_ordinary, require_kept
from checkfreq.state.unheld import Held
from checkfreq.store.parts import buffers_stem_of, frozen_stem_of
from checkfreq.types import Json

#: Less than so many bytes of an object are not worth a file of their own.
LEAST_FROZEN_BYTES = 1 << 20


class TensorRef(NamedTuple):
    """One live tensor to copy: detached, on the storage that it had at the boundary.

    ``stem`` is the name of its file without the suffix: the name of the object, with an ending if
    it is frozen, or if it is one rank's own.
    ``settled``: only a weight update changes it, so its copy may take until the next update.
    A NamedTuple, because one is made per tensor on the training thread (0.3 us against 0.9 for a
    dataclass).
    """

    stem: str
    key: str
    tensor: Tensor
    settled: bool


make_ref = tuple.__new__  # what TensorRef() calls; made per tensor while training waits


@dataclass(frozen=True, slots=True)
class LocalState:
    """The whole state as one rank sees it, object after object.

    ``refs[begin:end]`` are the tensors of an object, where ``spans[name]`` is (begin, end).
    ``shards`` describes, by index, the refs that are local tensors of DTensors.
    ``per_rank_objects`` and ``per_rank_tensors`` (object, key) differ from rank to rank.
    ``frozen`` are the indices of refs that no weight update is expected to change,
    ``non_persistent`` (object, key) of buffers that are no part of a state dict.
    """

    refs: list[TensorRef]
    spans: Mapping[str, tuple[int, int]]
    objects: dict[str, Json]
    aliases: dict[str, dict[str, str]]
    shards: dict[int, LocalShard] = field(default_factory=dict)
    per_rank_objects: frozenset[str] = frozenset()
    per_rank_tensors: frozenset[tuple[str, str]] = frozenset()
    frozen: frozenset[int] = frozenset()
    non_persistent: frozenset[tuple[str, str]] = frozenset()


@dataclass(frozen=True, slots=True)
class CapturedState:
    """What this rank writes of the state as of one boundary.

    ``tensors`` are live and unique per object; settled ones do not change until the next weight
    update, the others must be copied before training goes on. ``objects`` is all other state, as
    JSON by tracked name; ``aliases`` maps, per file, a tied name to the key that holds its bytes.
    ``rank_objects`` is JSON that differs from rank to rank, and ``local`` the whole that this is
    a part of, for comparing ranks; both are None on one rank. ``is_split``: replicated tensors
    are divided among the ranks.
    """

    tensors: list[TensorRef]
    objects: dict[str, Json]
    aliases: dict[str, dict[str, str]]
    rank_objects: dict[str, Json] | None = None
    local: LocalState | None = None
    is_split: bool = False


class StateCollector:
    """Collects the tensors of one capture, object by object."""

    def __init__(self, *, trained_ids: frozenset[int] = frozenset()) -> None:
        #: ``id`` of every parameter in a group of a tracked optimizer.
        self.trained_ids = trained_ids
        self.refs: list[TensorRef] = []
        self.aliases: dict[str, dict[str, str]] = {}
        #: By object and key, what puts the parts of a composed tensor together.
        self.composed: dict[str, dict[str, Json]] = {}
        #: By object and key, the strides of tensors that a restore makes anew, if not row-major.
        self.strides: dict[str, dict[str, Json]] = {}
        #: By index, of each ref that is the local tensor of a DTensor, its place in the whole.
        self.shards: dict[int, LocalShard] = {}
        #: (object, key) of every DTensor, aliases included.
        self.dtensors: dict[tuple[str, str], Tensor] = {}
        #: (object, key) of tensors that differ from rank to rank.
        self.per_rank: set[tuple[str, str]] = set()
        #: Indices of the refs that no weight update is expected to change.
        self.frozen: set[int] = set()
        #: (object, key) of buffers that are no part of a state dict.
        self.non_persistent: set[tuple[str, str]] = set()
        #: What other objects than optimizers hold; complete when the first optimizer is read.
        self.held = Held()
        self.start("")

    def start(self, object_name: str) -> None:
        """Begin the next object, with keys and aliases of its own."""
        self._object = object_name
        #: The classes at hand for objects in its state.
        self.classes: Classes | None = None
        self._by_address: dict[int, int] = {}  # the first tensor there; views follow in _more
        self._more: dict[int, list[int]] = {}
        self._keys: dict[str, None] = {}
        self._begin = len(self.refs)

    @property
    def keys(self) -> KeysView[str]:
        """Names used in the current object so far, aliases included, in order."""
        return self._keys.keys()

    def add(self, key: str, tensor: Tensor, settled: bool, frozen: bool = False) -> str:
        """Keep ``tensor`` under ``key``; of an alias, the key that has its bytes is returned.

        ``frozen``: no weight update is expected to change it.
        Raises StateError for a tensor that cannot be kept and for a key used twice.
        """
        plain = is_ordinary(tensor)
        if not plain and is_composed(tensor):
            return self._add_parts(key, tensor, settled)
        live = tensor.detach() if plain else self._converted(key, tensor)
        if key in self._keys:
            raise StateError(f"{self._object}: two tensors are called {key!r}; rename one")
        self._keys[key] = None
        index = len(self.refs)
        address = live.data_ptr() or self._stand_in(key, tensor, live)
        if address and self._by_address.setdefault(address, index) != index:
            twin = self._twin(address, live)
            if twin is not None:
                self.shards.pop(index, None)
                if not frozen:
                    self.frozen.discard(twin)
                return self._alias(key, twin, settled)
            self._more.setdefault(address, []).append(index)
        if frozen:
            self.frozen.add(index)
        self.refs.append(make_ref(TensorRef, (self._object, key, live, settled)))
        return key

    def _add_parts(self, key: str, tensor: Tensor, settled: bool) -> str:
        path = f"{self._object}.{key}"
        require_kept(path, tensor.device)
        record, parts = take_apart(tensor, path)
        if key in self._keys:
            raise StateError(f"{self._object}: two tensors are called {key!r}; rename one")
        self._keys[key] = None
        for name, part in parts.items():
            self.add(part_name(key, name), part, settled)
        self.composed.setdefault(self._object, {})[key] = record
        return key

    def _converted(self, key: str, tensor: Tensor) -> Tensor:
        path = f"{self._object}.{key}"
        local = local_of(tensor)
        live = detached(local, path)
        require_kept(path, live.device)
        if not is_dtensor(tensor):
            return live
        self.shards[len(self.refs)] = shard_of(tensor, path)
        self.dtensors[self._object, key] = tensor
        return live

    def _stand_in(self, key: str, tensor: Tensor, live: Tensor) -> int:
        """An address for an empty shard: all ranks must find the same ties, those without elements
        included. 0 for any other tensor without elements."""
        if live.numel():
            raise StateError(
                f"{self._object}.{key}: a tensor of shape {list(live.shape)} has no memory: its "
                "storage was freed, or it was never more than a stand-in. Checkpoint it while it "
                "has its data"
            )
        if len(self.refs) not in self.shards:
            return 0
        # state_dict() makes new tensors on the same storage, so it is the storage that counts.
        local = local_of(tensor)
        return hash((local.untyped_storage()._cdata, local.storage_offset()))

    def _twin(self, address: int, live: Tensor) -> int | None:
        """Index of a tensor that was added and has exactly these bytes, if there is one."""
        indices: list[int] = [self._by_address[address], *self._more.get(address, ())]
        for index in indices:
            if self.shards.get(index) != self.shards.get(len(self.refs)):
                continue
            if _same_bytes(self.refs[index].tensor, live):
                return index
        return None

    def _alias(self, key: str, index: int, settled: bool) -> str:
        ref = self.refs[index]
        if not settled and ref.settled:  # volatile under one name is volatile under both
            self.refs[index] = ref._replace(settled=False)
        self.aliases.setdefault(self._object, {})[key] = ref.key
        return ref.key

    def drop_alias(self, key: str) -> None:
        """Forget the name that ``add`` has just made an alias."""
        aliases = self.aliases[self._object]
        del aliases[key], self._keys[key]
        if not aliases:
            del self.aliases[self._object]

    def encode(self, value: Any, path: str, *, settled: bool = False) -> Json:
        """JSON of a value; tensors inside are kept under their path within the object.

        ``path`` begins with the object's name. Raises StateError with the path of anything that
        cannot be kept.
        """

        def add(tensor: Tensor, where: str) -> str:
            return self.add(self._free_key(where), tensor, settled)

        return encode_tree(
            value,
            path,
            leaf=lambda leaf, where: encode_torch(leaf, where, add),
            classes=self.classes,
        )

    def made_anew(
        self, begin: int | None = None, parameters: Sequence[Tensor] = ()
    ) -> dict[str, list[Json]]:
        """Note of the current object's tensors what a restore needs to make them anew: strides that
        are not row-major, and memory that several of them share.

        ``begin``: the index of the first ref that is meant; None for all of the object. Returns by
        key what shares the memory of one of ``parameters``: its number, the offset and strides in
        it, and its own strides. Raises StateError for memory that cannot be shared again.
        """
        begin = self._begin if begin is None else begin
        may_share = bool(self._more)
        for index in range(begin, len(self.refs)):
            ref = self.refs[index]
            tensor = self.dtensors[self._object, ref.key] if index in self.shards else ref.tensor
            if not tensor.is_contiguous():
                strides = [*tensor.stride()]
                self.strides.setdefault(self._object, {})[ref.key] = strides
                may_share = True
            # Of tensors that share a storage, at least one is not at its beginning.
            elif ref.tensor.storage_offset():
                may_share = True
        plain = [
            (number, local)
            for number, local in enumerate(map(local_of, parameters))
            if is_ordinary(local)
        ]
        for _, local in plain:
            if local.data_ptr() in self._by_address or local.storage_offset():
                may_share = True
        return self._share(begin, plain) if may_share else {}

    def _share(self, begin: int, parameters: list[tuple[int, Tensor]]) -> dict[str, list[Json]]:
        refs = [(index, self.refs[index].tensor) for index in range(begin, len(self.refs))]
        own = [placed(tensor, index) for index, tensor in refs if tensor.numel()]
        theirs = [
            placed(tensor, number, is_parameter=True)
            for number, tensor in parameters
            if tensor.numel()
        ]
        of_parameters: dict[str, list[Json]] = {}
        groups = []
        # By number, since addresses are in another order on each rank.
        for group in sorted(overlapping([*theirs, *own]), key=_least_number):
            mine = [one for one in group if not one.is_parameter]
            if mine and len(mine) < len(group):
                of_parameters.update(self._in_parameter(one, group) for one in mine)
            elif mine:
                groups.append((group, self._memory_of(group)))
        if groups:
            self._keep_views(groups)
        return of_parameters

    def _in_parameter(self, one: Placed, group: list[Placed]) -> tuple[str, list[Json]]:
        """Where in a parameter of the group a tensor lies."""
        tensor = one.tensor
        for other in group:
            parameter = other.tensor
            is_inside = (
                other.is_parameter
                and other.first <= one.first
                and one.end <= other.end
                and parameter.dtype == tensor.dtype
            )
            if is_inside and (one.number not in self.shards or _same_bytes(parameter, tensor)):
                offset = (one.first - other.first) // tensor.element_size()
                place = [other.number, offset, [*tensor.stride()], [*parameter.stride()]]
                return self.refs[one.number].key, place
        names = f"{self._object}.{self.refs[one.number].key} and a parameter"
        raise StateError(_shared_text(names))

    def _memory_of(self, group: list[Placed]) -> Tensor:
        keys = [self.refs[one.number].key for one in group]
        parts = {
            part_name(name, part)
            for name, record in self.composed.get(self._object, {}).items()
            for part in record["parts"]
        }
        is_plain = not parts.intersection(keys) and not any(o.number in self.shards for o in group)
        memory = memory_of(group) if is_plain else None
        if memory is None:
            raise StateError(_shared_text(" and ".join(f"{self._object}.{k}" for k in keys[:2])))
        return memory

    def _keep_views(self, groups: list[tuple[list[Placed], Tensor]]) -> None:
        """Keep all the memory of each group instead of the tensors in it."""
        composed = self.composed.setdefault(self._object, {})
        aliases = self.aliases.setdefault(self._object, {})
        gone: set[int] = set()
        memories = []
        for group, memory in groups:
            refs = [self.refs[one.number] for one in group]
            first = part_name(refs[0].key, "memory")
            settled = all(ref.settled for ref in refs)
            memories.append(make_ref(TensorRef, (self._object, first, memory, settled)))
            for ref in refs:
                tied = [alias for alias, key in aliases.items() if key == ref.key]
                for name in (ref.key, *tied):
                    composed[name] = view_of(memory, ref.tensor)
                    aliases.pop(name, None)
                    if name != refs[0].key:
                        aliases[part_name(name, "memory")] = first
                self.strides.get(self._object, {}).pop(ref.key, None)
            gone.update(one.number for one in group)
        kept = [index for index in range(self._begin, len(self.refs)) if index not in gone]
        numbers = {index: number for number, index in enumerate(kept, self._begin)}
        self.refs[self._begin :] = [*(self.refs[index] for index in kept), *memories]
        self._by_address, self._more = {}, {}  # they have the old numbers
        self.shards = {numbers.get(i, i): shard for i, shard in self.shards.items()}
        self.frozen = {numbers.get(i, i) for i in self.frozen}
        if not aliases:
            del self.aliases[self._object]

    def _free_key(self, path: str) -> str:
        key = wanted = path.removeprefix(self._object).removeprefix(".") or "value"
        number = 2
        while key in self._keys:  # {"a.b": x, "a": {"b": y}} make one path twice
            key, number = f"{wanted}#{number}", number + 1
        return key


def sole_part(local: LocalState) -> CapturedState:
    """What a run of one rank writes: all of it."""
    for index, shard in local.shards.items():
        if not shard.box.is_whole(shard.shape):
            ref = local.refs[index]
            raise StateError(
                f"{ref.stem}.{ref.key}: a DTensor of shape {list(shard.shape)}, of which this "
                f"process holds {shard.box}, needs a checkpoint of all ranks; initialise "
                "torch.distributed before CFManager is made"
            )
    if not local.frozen and not local.non_persistent:
        return CapturedState(local.refs, local.objects, local.aliases)
    return _with_files_apart(local)


def _with_files_apart(local: LocalState) -> CapturedState:
    """The whole state, with files of their own for what is frozen in each object, and buffers."""
    tensors: list[TensorRef] = []
    aliases: dict[str, dict[str, str]] = {}
    for name in local.spans:
        for stem, refs in files_of(local, name):
            tensors += refs
            if here := aliases_of(local, name, refs):
                aliases[stem] = here
    return CapturedState(tensors, local.objects, aliases)


def files_of(local: LocalState, name: str) -> list[tuple[str, list[TensorRef]]]:
    """Stem and tensors of each file of an object that one rank writes whole.

    Frozen tensors have one of their own if there are enough of them. What was declared volatile is
    not frozen.
    """
    begin, end = local.spans[name]
    refs, apart = without_buffers(local, local.refs[begin:end])
    frozen = {id(local.refs[i]) for i in local.frozen if begin <= i < end and local.refs[i].settled}
    if frozen and sum(r.tensor.nbytes for r in refs if id(r) in frozen) >= LEAST_FROZEN_BYTES:
        stem = frozen_stem_of(name)
        apart = [*apart, (stem, [r._replace(stem=stem) for r in refs if id(r) in frozen])]
        refs = [ref for ref in refs if id(ref) not in frozen]
    return [(name, refs), *apart]


def without_buffers(
    local: LocalState, refs: list[TensorRef]
) -> tuple[list[TensorRef], list[tuple[str, list[TensorRef]]]]:
    """Refs of one object without its non-persistent buffers; stem and refs of those, if any."""
    if not local.non_persistent:
        return refs, []
    buffers = [ref for ref in refs if ref[:2] in local.non_persistent]
    if not buffers:
        return refs, []
    stem = buffers_stem_of(buffers[0].stem)
    others = [ref for ref in refs if ref[:2] not in local.non_persistent]
    return others, [(stem, [ref._replace(stem=stem) for ref in buffers])]


def aliases_of(local: LocalState, name: str, refs: list[TensorRef]) -> dict[str, str]:
    """The further names that an object has for these of its tensors."""
    aliases = local.aliases.get(name)
    if not aliases or not refs:
        return {}
    keys = {ref.key for ref in refs}
    return {alias: key for alias, key in aliases.items() if key in keys}


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    return bool(
        one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
        and one.device == other.device
        and one.is_conj() == other.is_conj()
        and one.is_neg() == other.is_neg()
    )


def _least_number(group: list[Placed]) -> int:
    return min((one.number for one in group if not one.is_parameter), default=0)


def _shared_text(names: str) -> str:
    return (
        f"{names} share memory in a way that a restore could not repeat. Keep a copy in the state "
        "instead: tensor.clone()"
    )
