"""Reads the training state at an iteration boundary.

``capture`` runs on the training thread at every checkpoint and has no side effects: it creates no
optimizer state, waits for no device, draws no random number and copies no tensor. Names are
resolved to tensors anew each time, since objects rebind their tensors (LBFGS does at each step).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from checkfreq.errors import StateError
from checkfreq.state.adapters.generic import ObjectAdapter
from checkfreq.state.adapters.optimizer import OptimizerAdapter
from checkfreq.state.adapters.rng import capture_rng
from checkfreq.state.checkpoint import CFCheckpoint
from checkfreq.state.collector import CapturedState, LocalState, StateCollector, sole_part
from checkfreq.state.composed import part_name
from checkfreq.state.gradients import Gradients, capture_gradients
from checkfreq.state.parts import part_of
from checkfreq.state.tensors import devices_in_use
from checkfreq.store.gc_pause import gc_paused
from checkfreq.store.manifest import POSITIONS as POSITIONS
from checkfreq.types import Json, Role

#: Keys of ``objects`` that are not tracked names.
RNG = "rng"
GRADIENTS = "$gradients"

_ALONE = Role()
_NO_GRADIENTS: Gradients = MappingProxyType({})


def capture(
    chk: CFCheckpoint,
    *,
    positions: Mapping[str, Mapping[str, Any]] | None = None,
    gradients: Gradients = _NO_GRADIENTS,
    role: Role = _ALONE,
) -> CapturedState:
    """Read everything that ``chk`` tracks; returns the part of it that ``role`` writes.

    ``gradients`` are those that a later update will use (``PendingGradients``). Raises StateError
    with the path of anything that cannot be kept.
    """
    # Many small objects are made here, all of them needed: a garbage collection would only cost
    # time while training waits.
    with gc_paused():
        local = read_local_state(
            chk,
            positions=positions or {},
            gradients=gradients,
            world=role.world,
        )
        return sole_part(local) if role.is_alone else part_of(local, role)


def read_local_state(
    chk: CFCheckpoint,
    *,
    positions: Mapping[str, Mapping[str, Any]],
    gradients: Gradients = _NO_GRADIENTS,
    world: int = 1,
) -> LocalState:
    """Read the whole state as this process sees it, whichever rank writes what."""
    collector = StateCollector(trained_ids=chk.trained_ids())
    objects: dict[str, Json] = dict.fromkeys(chk.adapters)  # in their order
    spans: dict[str, tuple[int, int]] = {}

    def add(name: str, read: Callable[[StateCollector], dict[str, Json]]) -> None:
        collector.start(name)
        begin = len(collector.refs)
        objects[name] = read(collector)
        spans[name] = (begin, len(collector.refs))

    optimizers = _of_kind(chk, OptimizerAdapter.kind)
    for name, adapter in chk.adapters.items():
        if name not in optimizers:
            add(name, adapter.capture)
    collector.held.opaque = frozenset(_of_kind(chk, ObjectAdapter.kind))
    collector.held.refs = [*collector.refs]
    for name in optimizers:
        add(name, chk.adapters[name].capture)
    if chk.settled or chk.volatile:
        _declare(chk, collector)
    per_rank_tensors = _per_rank_tensors(chk, collector)
    if chk.rng:
        # After the objects: only now is it known which devices hold tensors. Others may be used
        # without one, as where all state is offloaded to the host and dropout runs on a device.
        devices = {ref.tensor.device for ref in collector.refs if not ref.tensor.is_cpu}
        devices.update(devices_in_use())
        add(RNG, partial(capture_rng, devices=devices))
    if gradients:
        add(GRADIENTS, partial(capture_gradients, gradients=gradients, world=world))
    for name, aliases in collector.aliases.items():
        objects[name]["aliases"] = aliases
    for name, composed in collector.composed.items():
        objects[name]["composed"] = composed
    for name, strides in collector.strides.items():
        objects[name]["strides"] = strides
    if positions:
        collector.start(POSITIONS)
        objects[POSITIONS] = {
            name: _position(name, position, collector) for name, position in positions.items()
        }
        spans[POSITIONS] = (len(collector.refs), len(collector.refs))
    per_rank_objects = frozenset((*chk.per_rank_objects, RNG, POSITIONS, GRADIENTS))
    return LocalState(
        collector.refs,
        spans,
        objects,
        collector.aliases,
        collector.shards,
        per_rank_objects,
        per_rank_tensors,
        frozenset(collector.frozen),
        frozenset(collector.non_persistent),
    )


def _of_kind(chk: CFCheckpoint, kind: str) -> list[str]:
    return [name for name, adapter in chk.adapters.items() if adapter.kind == kind]


def _position(name: str, position: Mapping[str, Any], collector: StateCollector) -> Json:
    before = len(collector.refs)
    node = collector.encode(dict(position), f"position of iterator {name!r}")
    if len(collector.refs) != before:
        raise StateError(
            f"position of iterator {name!r} holds a tensor ({collector.refs[-1].key}); "
            "expected numbers, strings and lists"
        )
    return node


def _declare(chk: CFCheckpoint, collector: StateCollector) -> None:
    """Apply ``settled=`` and ``volatile=``; of several matching names the longest wins."""
    declared = {**dict.fromkeys(chk.settled, True), **dict.fromkeys(chk.volatile, False)}
    unmatched = set(declared)
    for index, matches in _matches(collector, declared):
        unmatched.difference_update(matches)
        ref = collector.refs[index]
        collector.refs[index] = ref._replace(settled=declared[max(matches, key=len)])
    _require_matches(chk, unmatched, "settled= or volatile=")


def _per_rank_tensors(chk: CFCheckpoint, collector: StateCollector) -> frozenset[tuple[str, str]]:
    """(object, key) of tensors that differ from rank to rank, by their kind or as declared."""
    declared = [name for name in chk.per_rank if name not in chk.per_rank_objects]
    for owner, key in [*collector.per_rank]:
        if key in collector.composed.get(owner, {}):
            begin = part_name(key, "")
            collector.per_rank.update(
                (owner, ref.key)
                for ref in collector.refs
                if ref.stem == owner and ref.key.startswith(begin)
            )
            collector.per_rank.discard((owner, key))
    if not declared:
        return frozenset(collector.per_rank)
    unmatched, found = set(declared), set(collector.per_rank)
    for index, matches in _matches(collector, declared):
        unmatched.difference_update(matches)
        ref = collector.refs[index]
        found.add((ref.stem, ref.key))
        if index in collector.shards:
            raise StateError(
                f"per_rank= names {ref.stem}.{ref.key}, which is a DTensor: every rank keeps its "
                "shard as it is. Leave it out"
            )
    _require_matches(chk, unmatched, "per_rank=")
    return frozenset(found)


def _matches(collector: StateCollector, declared: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    """(index, declared names) of each tensor that some cover, by its name or by a tied one."""
    other_names = _other_names(collector)
    for index, ref in enumerate(collector.refs):
        names = [ref.key, *other_names.get((ref.stem, ref.key), ())]
        matches = [d for d in declared if any(covers(d, ref.stem, n) for n in names)]
        if matches:
            yield index, matches


def _other_names(collector: StateCollector) -> dict[tuple[str, str], list[str]]:
    names: dict[tuple[str, str], list[str]] = {}
    for object_name, aliases in collector.aliases.items():
        for alias, key in aliases.items():
            names.setdefault((object_name, key), []).append(alias)
    return names


def covers(declared: str, object_name: str, key: str) -> bool:
    """Whether a declared name is the tensor's name or a prefix of it."""
    name = f"{object_name}.{key}."
    return name.startswith((f"{declared}.", part_name(declared, "")))


def _require_matches(chk: CFCheckpoint, unmatched: set[str], argument: str) -> None:
    # Optimizers, scalers and dicts may create the tensor later; a module already has all its own.
    for name in sorted(unmatched):
        if "." in name and chk.adapters[name.partition(".")[0]].kind == "module":
            raise StateError(
                f"{argument} names {name!r}, which is no tensor of the tracked module; "
                "expected a name as in state_dict(), or a prefix of some"
            )
