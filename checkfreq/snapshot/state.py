"""Reading the training state at an iteration boundary.

``capture`` runs on the training thread at every checkpoint. It has no side effects: it creates
no optimizer state, waits for no device, draws no random number and copies no tensor. Names are
resolved to tensors anew each time, since objects rebind their tensors (LBFGS at each step).
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from checkfreq.checkpoint import CFCheckpoint
from checkfreq.errors import StateError
from checkfreq.snapshot.adapters.rng import capture_rng
from checkfreq.snapshot.sink import Sink, TensorRef
from checkfreq.types import Json

#: Keys of ``objects`` that are not tracked names.
RNG = "rng"
POSITIONS = "$positions"

__all__ = ["POSITIONS", "RNG", "CapturedState", "TensorRef", "capture"]


@dataclass(frozen=True, slots=True)
class CapturedState:
    """The state as of one boundary.

    ``tensors`` are live, unique per object; settled ones hold still until the next weight
    update, the others must be copied before the training goes on. ``objects`` is everything
    else, as JSON by tracked name; ``aliases`` maps, per object, a tied name to the key that
    holds its bytes.
    """

    tensors: list[TensorRef]
    objects: dict[str, Json]
    aliases: dict[str, dict[str, str]]


def capture(
    chk: CFCheckpoint,
    *,
    positions: Mapping[str, Mapping[str, Any]] | None = None,
    barrier_on_device: bool,
) -> CapturedState:
    """Read everything that ``chk`` tracks.

    ``barrier_on_device``: the next weight update waits on the device, so every host tensor is
    volatile. Raises StateError naming the path of whatever cannot be kept.
    """
    with _collector_paused():
        return _capture(chk, positions or {}, barrier_on_device=barrier_on_device)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """No garbage collection meanwhile.

    Two objects are made per tensor, enough to set off full collections: 10,000 tensors in a
    process with a large heap took 270 ms instead of 30 (2026-11).
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _capture(
    chk: CFCheckpoint, positions: Mapping[str, Mapping[str, Any]], *, barrier_on_device: bool
) -> CapturedState:
    sink = Sink(optimised=chk.optimised(), barrier_on_device=barrier_on_device)
    objects: dict[str, Json] = {}
    for name, adapter in chk.adapters.items():
        sink.start(name)
        objects[name] = adapter.capture(sink)
    if chk.settled or chk.volatile:
        _declare(chk, sink, barrier_on_device=barrier_on_device)
    if chk.rng:
        devices = {ref.tensor.device for ref in sink.refs if not ref.tensor.is_cpu}
        sink.start(RNG)
        objects[RNG] = capture_rng(sink, devices)
    for name, aliases in sink.aliases.items():
        objects[name]["aliases"] = aliases
    if positions:
        sink.start(POSITIONS)
        objects[POSITIONS] = {
            name: _position(name, position, sink) for name, position in positions.items()
        }
    return CapturedState(sink.refs, objects, sink.aliases)


def _position(name: str, position: Mapping[str, Any], sink: Sink) -> Json:
    before = len(sink.refs)
    node = sink.encode(dict(position), f"position of iterator {name!r}")
    if len(sink.refs) != before:
        raise StateError(
            f"position of iterator {name!r} holds a tensor ({sink.refs[-1].key}); "
            "expected numbers, strings and lists"
        )
    return node


def _declare(chk: CFCheckpoint, sink: Sink, *, barrier_on_device: bool) -> None:
    """Apply ``settled=`` and ``volatile=``; the longest matching name wins."""
    declared = {**dict.fromkeys(chk.settled, True), **dict.fromkeys(chk.volatile, False)}
    unmatched = set(declared)
    other_names = _other_names(sink)
    for index, ref in enumerate(sink.refs):
        names = [ref.key, *other_names.get((ref.object_name, ref.key), ())]
        matches = [d for d in declared if any(_covers(d, ref.object_name, n) for n in names)]
        unmatched.difference_update(matches)
        if matches:
            settled = declared[max(matches, key=len)]
            if settled and barrier_on_device and ref.tensor.is_cpu:
                settled = False
            sink.refs[index] = ref._replace(settled=settled)
    _require_matches(chk, unmatched)


def _other_names(sink: Sink) -> dict[tuple[str, str], list[str]]:
    names: dict[tuple[str, str], list[str]] = {}
    for object_name, aliases in sink.aliases.items():
        for alias, key in aliases.items():
            names.setdefault((object_name, key), []).append(alias)
    return names


def _covers(declared: str, object_name: str, key: str) -> bool:
    return f"{object_name}.{key}.".startswith(f"{declared}.")


def _require_matches(chk: CFCheckpoint, unmatched: set[str]) -> None:
    # Optimizers, scalers and dicts may get the tensor later; a module has all it will have.
    for name in sorted(unmatched):
        if "." in name and chk.adapters[name.partition(".")[0]].kind == "module":
            raise StateError(
                f"settled= or volatile= names {name!r}, which is no tensor of the tracked module; "
                "expected a name as in state_dict(), or a prefix of some"
            )
