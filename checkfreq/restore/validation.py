"""Validates the state that a manifest describes, before any live object is looked at.

Digests show damage, but not that somebody made a manifest up. So every object is decoded once as a
reader would decode it, with stand-ins for tensors. Nothing but our own decoding runs here, on
nothing but the checkpoint, so whatever fails is the checkpoint's fault: it is corrupt, and a
restore walks past it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from checkfreq.errors import CheckFreqError, CorruptCheckpointError
from checkfreq.state.adapters.generic import tree_value
from checkfreq.state.adapters.module import module_state_dict
from checkfreq.state.adapters.optimizer_tree import optimizer_tree, optimizer_value
from checkfreq.state.adapters.rng import require_rng_fields
from checkfreq.state.adapters.scaler import require_scaler_fields
from checkfreq.state.capture import POSITIONS
from checkfreq.state.codec import decode_tree
from checkfreq.state.gradients import require_gradient_fields
from checkfreq.state.saved import SavedObject, every_tensor, no_tensor
from checkfreq.state.tensors import DTYPES, decode_torch, sizes_of
from checkfreq.store.gc_pause import gc_paused
from checkfreq.store.manifest import Manifest
from checkfreq.store.parts import file_of, shared_files_of
from checkfreq.types import Json

#: The kind of what torch.distributed.checkpoint wrote; only its own reader decodes that.
_DCP = "dcp"
#: In a position: those that several ranks had under one name (``checkfreq.state.positions``).
_CARRIED = "$carried"


class _Outline(SavedObject):
    """The saved state of one object, with empty tensors of the right dtypes in place of its own.

    ``is_partial``: other directories hold some of its tensors.
    """

    is_partial = False
    _stand_ins: ClassVar[dict[str, Tensor]] = {}

    def owned(self, name: str, device: str = "cpu", *, live: Tensor | None = None) -> Tensor:
        """A stand-in."""
        if name in self.composed:
            return torch.empty(0, device="cpu")
        if self.is_partial and self.aliases.get(name, name) not in self.records:
            return torch.empty(0, device="cpu")
        dtype = self.record(name).dtype
        if dtype not in self._stand_ins:
            self._stand_ins[dtype] = torch.empty(0, dtype=DTYPES[dtype], device="cpu")
        return self._stand_ins[dtype]

    def decode(
        self, node: Json, *, on_cpu: bool = False, live: Mapping[str, Tensor] = MappingProxyType({})
    ) -> Any:
        """The value of a tree, with stand-ins."""
        return decode_tree(node, leaf=lambda tag, inner: decode_torch(tag, inner, self.owned))


@contextlib.contextmanager
def content_errors(path: str) -> Iterator[None]:
    """Turn every error into corruption of ``path``: the block looks at nothing else."""
    try:
        yield
    except CheckFreqError:
        raise
    except Exception as error:
        raise CorruptCheckpointError(
            path,
            check="state of its objects",
            expected="what this version can read",
            got=f"{type(error).__name__}: {error!s:.200}",
        ) from error


def validate_state(manifest: Manifest, *, path: str) -> None:
    """Raise CorruptCheckpointError, naming ``path``, unless all of the state can be decoded."""
    with content_errors(path), gc_paused():
        _validate_state(manifest, path)


def _validate_state(manifest: Manifest, path: str) -> None:
    _require_objects(manifest)
    for saved in _outlines(manifest, path):
        saved.is_partial = 0 < len(manifest.ranks) < manifest.world
        if not saved.is_partial:
            for key in saved.composed:
                saved.check_composed(key)
        _CHECKS[saved.field("kind")](saved)
    for own in (manifest.objects, *manifest.ranks.values()):
        for node in own.get(POSITIONS, {}).values():
            _require_position(decode_tree(node))


def _require_objects(manifest: Manifest) -> None:
    for rank, own in [(None, manifest.objects), *manifest.ranks.items()]:
        for name, json in own.items():
            _require(isinstance(json, dict), f"object {name!r:.80}", json)
            if name == POSITIONS:
                continue
            _require_texts(json.get("aliases", {}), "aliases")
            composed = json.get("composed", {})
            _require(isinstance(composed, dict), "composed", composed)
            shards = json.get("shards", {})
            is_placed = rank is not None or not shards or json.get("kind") == _DCP
            _require(isinstance(shards, dict) and is_placed, "shards", shards)
            for place in shards.values():
                shape, offsets = map(sizes_of, place)
                _require(len(shape) == len(offsets), "shard", place)
            for described in json.get("sharded_tensors", {}).values():
                dtype, shape = described
                _require(dtype in DTYPES, "dtype", dtype)
                sizes_of(shape)
            own_tensors = json.get("own_tensors", [])
            _require(isinstance(own_tensors, list), "own_tensors", own_tensors)


def _outlines(manifest: Manifest, path: str) -> Iterator[_Outline]:
    """Each object that is the same for all ranks once, and each one that is a rank's own."""
    files = {file.name: file for file in manifest.files}

    def outline(name: str, json: Json, ranks: Iterable[int], own_rank: int | None) -> _Outline:
        shared = [files[one] for one in shared_files_of(name) if one in files]
        saved = _Outline(name, json, path=path, files=shared)
        for rank in ranks:
            file = files.get(file_of(name, rank))
            if file is not None:
                shards = manifest.ranks[rank].get(name, {}).get("shards", {})
                counts = every_tensor if rank == own_rank else no_tensor
                saved.add_file(file, shards=shards, counts=counts)
        return saved

    ranks = sorted(manifest.ranks)
    first = next((r for r in ranks if manifest.ranks[r].keys() - {POSITIONS}), None)
    for name, json in manifest.objects.items():
        if name != POSITIONS and json.get("kind") != _DCP:
            yield outline(name, json, ranks, first)
    for rank in ranks:
        for name, json in manifest.ranks[rank].items():
            if name != POSITIONS and json.get("kind", _DCP) != _DCP:
                yield outline(name, json, [rank], rank)


def _require_module(saved: SavedObject) -> None:
    extra = saved.field("extra", {})
    _require(isinstance(extra, dict), "extra", extra)
    _require(isinstance(codes := saved.field("extra_codes", {}), dict), "extra_codes", codes)
    if (flags := saved.json.get("flags")) is not None:  # an import has none
        for one in (flags, flags.get("first", flags)):
            for names in (one["frozen"], one["evaluating"]):
                good = isinstance(names, list) and all(isinstance(name, str) for name in names)
                _require(good, "flags", names)
    for name in saved.field("non_persistent", []):
        saved.is_of_other_ranks(name) or saved.record(name)
    module_state_dict(saved)


def _require_optimizer(saved: SavedObject) -> None:
    _require_text(saved, "class")
    _require_text(saved, "device_type")
    for shape in saved.field("shapes"):
        sizes_of(shape)
    for dims in saved.field("split_dims", {}).values():
        _require(all(dim is None or (type(dim) is int and dim >= 0) for dim in dims), "dims", dims)
    for key, (number, offset, strides, own) in saved.field("of_parameters", {}).items():
        sizes_of([number, offset, *strides, *own])
        good = number < len(saved.field("shapes")) and len(strides) == len(saved.record(key).shape)
        _require(good, "of_parameters", number)
    tree = optimizer_tree(saved)
    for group in () if tree is None else tree.groups:
        _require("params" not in group.values, "entries of a group", "params")
        count = group.num_params
        _require(type(count) is int and 0 <= count <= 1 << 31, "num_params", count)
    if tree is not None:
        count = sum(group.num_params for group in tree.groups)
        _require(len(tree.shapes) == count, "number of parameters", count)
        numbers = [*tree.state, *tree.whole]
        _require(all(type(n) is int and 0 <= n < count for n in numbers), "parameters", numbers)
    numbers = saved.field("parameters", [])
    _require(
        all(type(n) is int and 0 <= n < len(saved.field("shapes")) for n in numbers),
        "parameters",
        numbers,
    )
    optimizer_value(saved)


def _require_tree(saved: SavedObject) -> None:
    _require_text(saved, "class")
    tree_value(saved)


def _require_dict(saved: SavedObject) -> None:
    value = tree_value(saved)
    _require(isinstance(value, dict), "content of a dict", value)


def _require_list(saved: SavedObject) -> None:
    value = tree_value(saved)
    _require(isinstance(value, list), "content of a list", value)


def _require_position(position: Any) -> None:
    _require(isinstance(position, dict), "position", position)
    carried = position.get(_CARRIED, [])
    good = isinstance(carried, list) and all(isinstance(c, dict | None) for c in carried)
    _require(good, "positions carried on", carried)


def _require_texts(value: Json, what: str) -> None:
    good = isinstance(value, dict) and all(isinstance(text, str) for text in value.values())
    _require(good, what, value)


def _require_text(saved: SavedObject, key: str) -> None:
    _require(isinstance(saved.field(key), str), key, saved.field(key))


def _require(holds: bool, what: str, got: object) -> None:
    if not holds:
        raise ValueError(f"{what}: got {got!r:.80}")


_CHECKS: dict[str, Callable[[SavedObject], None]] = {
    "module": _require_module,
    "optimizer": _require_optimizer,
    "scaler": require_scaler_fields,
    "object": _require_tree,
    "dict": _require_dict,
    "list": _require_list,
    "rng": require_rng_fields,
    "gradients": require_gradient_fields,
}
