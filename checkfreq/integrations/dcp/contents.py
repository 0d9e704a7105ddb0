"""What a checkpoint holds, by the flat names of torch.distributed.checkpoint, without its bytes.

The state dicts are built as `checkfreq.load` builds them, but tensors stay on disk and stand-ins on
the meta device take their places. DCP's own code flattens them, so that names and containers are
as DCP expects them.
"""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from checkfreq.errors import ConfigError, printable
from checkfreq.integrations.dcp.chunks import StoredTensor, own_json, rank_for, tensors_of
from checkfreq.restore.validation import content_errors
from checkfreq.state.adapters.generic import tree_value
from checkfreq.state.adapters.module import module_state_dict
from checkfreq.state.adapters.optimizer_tree import optimizer_value
from checkfreq.state.adapters.rng import rng_state
from checkfreq.state.capture import GRADIENTS, POSITIONS
from checkfreq.state.codec import decode_tree
from checkfreq.state.composed import build, can_build
from checkfreq.state.saved import SavedObject, new_tensor
from checkfreq.state.tensors import DTYPE_NAMES, decode_torch
from checkfreq.store.manifest import Manifest
from checkfreq.types import Json

logger = logging.getLogger(__name__)

#: Kind, and name, of the one object in a checkpoint that DCP wrote.
DCP = "dcp"

#: Reads and verifies a whole tensor.
Read = Callable[[StoredTensor], Tensor]


@dataclass(eq=False, slots=True)
class _Later:
    """Stands in for a value that is made from the bytes of a tensor."""

    make: Callable[[Read], Any]


@dataclass(slots=True)
class Contents:
    """By flat name: tensors, values (pickled only on demand), and blobs that DCP had pickled."""

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    blobs: dict[str, StoredTensor] = field(default_factory=dict)
    planner_data: Any = field(default_factory=dict)
    #: Of the save by DCP; None for a CFManager's checkpoint.
    save_id: str | None = None
    _values: dict[str, Any] = field(default_factory=dict)
    #: By id of the stand-in; ``_kept`` holds the stand-ins, so that no id is used again.
    _makers: dict[int, Callable[[Read], Any]] = field(default_factory=dict)
    _kept: list[Any] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """All names, in the order of the state dicts."""
        known = dict.fromkeys([*self.tensors, *self._values, *self.blobs])
        ordered = self.planner_data if isinstance(self.planner_data, dict) else {}
        return list(dict.fromkeys([*(name for name in ordered if name in known), *known]))

    def pickled(self, name: str, read: Read) -> io.BytesIO:
        """A value, pickled as DCP's planner would have done it."""
        data = io.BytesIO()
        torch.save(self.value(name, read), data)
        data.seek(0)
        return data

    def value(self, name: str, read: Read) -> Any:
        """A value, with what it has from tensors."""
        return copy.deepcopy(self._values[name], _Memo(self._makers, read))

    def add_state(self, state: _State, tree: Any) -> None:
        """Add one object's state dict, which has stand-ins of ``state`` in place of tensors."""
        planner = DefaultSavePlanner()
        try:
            planner.set_up_planner({state.name: tree})
        except ValueError as error:  # {"a.b": 1, "a": {"b": 2}}
            text = printable(f"{state.name} has no place in a flat state dict, left out: {error}")
            logger.warning("%s", text)
            return
        for name, leaf in planner.state_dict.items():
            if isinstance(leaf, Tensor):
                self.tensors[name] = state.tensors[id(leaf)]
            else:
                self._values[name] = leaf
        self.planner_data.update(planner.mappings)
        self._makers.update(state.makers)
        self._kept.append(state)

    def add_dcp(self, manifest: Manifest, *, path: str) -> None:
        """Add what DCP wrote. Its names are flat already."""
        parts = [manifest.objects[DCP], *(own_json(manifest, DCP, r) for r in manifest.ranks)]
        blobs = {name for part in parts for name in part.get("bytes", ())}
        for name, tensor in tensors_of(manifest, DCP, rank=None, path=path).items():
            (self.blobs if name in blobs else self.tensors)[name] = tensor
        self.planner_data = decode_tree(manifest.objects[DCP]["planner_data"])
        self.save_id = str(manifest.objects[DCP].get("save_id", ""))


class _Memo(dict[int, Any]):
    """A memo that makes ``copy.deepcopy`` replace each stand-in by the real value."""

    def __init__(self, makers: Mapping[int, Callable[[Read], Any]], read: Read) -> None:
        super().__init__()
        self._makers, self._read = makers, read

    def get(self, key: Any, default: Any = None) -> Any:
        if key not in self and key in self._makers:
            self[key] = self._makers[key](self._read)
        return super().get(key, default)


class _State(SavedObject):
    """The saved state of one object, with its tensors left on disk."""

    def __init__(
        self, name: str, json: Mapping[str, Json], stored: Mapping[str, StoredTensor], *, path: str
    ) -> None:
        super().__init__(name, json, path=path)
        self.records = {
            key: self._tensor(key, DTYPE_NAMES[tensor.dtype], tensor.shape)
            for key, tensor in stored.items()
        }
        self.tensors: dict[int, StoredTensor] = {}
        self.makers: dict[int, Callable[[Read], Any]] = {}
        self._stored = stored
        self._stand_ins: dict[str, Tensor] = {}
        self._later: list[_Later] = []

    def owned(self, name: str, device: str = "cpu", *, live: Tensor | None = None) -> Tensor:
        """A stand-in; aliases share one."""
        if name in self.composed:
            stand_in: Any = self.later(lambda read: self._made(name, read))
            return stand_in  # type: ignore[no-any-return]
        key = self.record(name).name
        if key not in self._stand_ins:
            stored = self._stored[key]
            stand_in = torch.empty(stored.shape, dtype=stored.dtype, device="meta")
            self._stand_ins[key] = stand_in
            self.tensors[id(stand_in)] = stored
            self.makers[id(stand_in)] = lambda read: read(stored)
        return self._stand_ins[key]

    def _made(self, name: str, read: Read) -> Any:
        """A tensor that consists of others, read and put together; DCP knows it as a value."""
        parts = {
            part: self._made(key, read) if key in self.composed else read(self._stored_as(key))
            for part, key in self._parts_of(name).items()
        }
        record = self.composed[name]
        return build(record, parts) if can_build(record) else parts

    def _stored_as(self, key: str) -> StoredTensor:
        return self._stored[self.record(key).name]

    def decode(
        self, node: Json, *, on_cpu: bool = False, live: Mapping[str, Tensor] = MappingProxyType({})
    ) -> Any:
        """The value of a tree, with stand-ins."""
        try:
            return decode_tree(node, leaf=self._leaf)
        except ValueError as error:
            raise self.corrupt("state of the object", "JSON of this version", error) from error

    def _leaf(self, tag: str, node: dict[str, Json]) -> Any:
        if tag == "$ndarray":
            record = self.record(node[tag])
            stored = self._stored[record.name]

            def array(read: Read) -> Any:
                values = read(stored)
                made = new_tensor(record.shape, values.dtype, values.device, record.strides)
                return decode_torch(tag, node, lambda *_: made.copy_(values))

            return self.later(array)
        return decode_torch(tag, node, self.owned)

    def later(self, make: Callable[[Read], Any]) -> _Later:
        """A stand-in for the value that ``make`` will return."""
        stand_in = _Later(make)
        self._later.append(stand_in)
        self.makers[id(stand_in)] = make
        return stand_in


def contents_of(
    manifest: Manifest,
    *,
    rank: int,
    path: str,
    parameter_names: Mapping[str, Sequence[str]],
) -> Contents:
    """The contents of a checkpoint, as ``rank`` sees them.

    ``path`` is the manifest's. ``parameter_names``: by optimizer, names to use instead of the
    numbers of its parameters. Raises CorruptCheckpointError, and ConfigError for names that do not
    fit.
    """
    with content_errors(path):
        return _contents_of(manifest, rank, path, parameter_names)


def _contents_of(
    manifest: Manifest, rank: int, path: str, parameter_names: Mapping[str, Sequence[str]]
) -> Contents:
    contents = Contents()
    for name in _names(manifest):
        json = _json_of(manifest, name, rank)
        if json.get("kind") == DCP:
            contents.add_dcp(manifest, path=path)
            continue
        state = _State(name, json, tensors_of(manifest, name, rank=rank, path=path), path=path)
        tree = _tree(state)
        if name in parameter_names:
            tree = _with_names(state, tree, parameter_names[name])
        contents.add_state(state, tree)
    if unknown := sorted({*parameter_names} - {*_names(manifest)}):
        raise ConfigError(f"parameter_names: {path} holds no {', '.join(unknown)}")
    return contents


def is_of_dcp(manifest: Manifest) -> bool:
    """Whether DCP wrote any of it, so that it contains pickled values."""
    everything = (manifest.objects, *manifest.ranks.values())
    return any(
        isinstance(json, dict) and json.get("kind") == DCP
        for own in everything
        for json in own.values()
    )


def _names(manifest: Manifest) -> list[str]:
    """Names of the tracked objects, and "rng"."""
    own = (name for objects in manifest.ranks.values() for name in objects)
    found = dict.fromkeys([*manifest.objects, *own])
    return [name for name in found if name not in (POSITIONS, GRADIENTS)]


def _json_of(manifest: Manifest, name: str, rank: int) -> dict[str, Json]:
    """The object as ``rank`` sees it: a rank's own if there is one, else that of all ranks."""
    ranks = [rank_for(manifest, rank), *sorted(manifest.ranks)]
    own = (own_json(manifest, name, number) for number in ranks)
    shared: dict[str, Json] = manifest.objects.get(name, {})
    return next((json for json in own if "kind" in json), shared)


_TREES: dict[str, Callable[[_State], Any]] = {
    "module": module_state_dict,
    "optimizer": optimizer_value,
    "object": tree_value,
    "dict": tree_value,
    "list": tree_value,
    "rng": rng_state,
    "scaler": lambda state: _numbers(state),
}


def _tree(state: _State) -> Any:
    kind = state.field("kind")
    if kind not in _TREES:
        raise state.corrupt("kind of object", f"one of {', '.join(_TREES)}", kind)
    return _TREES[kind](state)


def _numbers(state: _State) -> dict[str, Any]:
    """The state dict of a GradScaler, which has numbers where we save tensors."""

    def number(tensor: Tensor) -> _Later:
        stored = state.tensors[id(tensor)]
        return state.later(lambda read: read(stored).item())

    values = state.decode(state.field("state"))
    return {k: number(v) if isinstance(v, Tensor) else v for k, v in values.items()}


def _with_names(state: _State, tree: Any, names: Sequence[str]) -> Any:
    """An optimizer's state dict as torch's get_optimizer_state_dict would return it."""
    num_parameters = len(state.field("shapes", []))
    if state.field("kind") != "optimizer" or len(names) != num_parameters:
        expected = f"{num_parameters} names" if num_parameters else "an optimizer"
        raise ConfigError(f"parameter_names[{state.name!r}]: expected {expected}, got {len(names)}")
    groups = [
        {**group, "params": [names[i] for i in group["params"]]} for group in tree["param_groups"]
    ]
    named = {
        key: {name: tree[key][i] for i, name in enumerate(names) if i in tree[key]}
        for key in ("state", "parameters")
        if key in tree
    }
    return {**tree, **named, "param_groups": groups}
