"""GradScaler: its two tensors are read directly, since ``state_dict()`` waits for the device."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from torch.amp import GradScaler

from checkfreq.state.adapters.base import (
    Changes,
    Fallible,
    Findings,
    Holdings,
    all_of_it,
    type_name,
)
from checkfreq.state.collector import StateCollector
from checkfreq.state.saved import SavedObject
from checkfreq.types import Json

# name in state_dict() -> (live tensor, value before the first use)
_TENSORS = {
    "scale": ("_scale", "_init_scale"),
    "_growth_tracker": ("_growth_tracker", "_init_growth_tracker"),
}
_NUMBERS = ("growth_factor", "backoff_factor", "growth_interval")


class ScalerAdapter:
    """One GradScaler, whether or not it is enabled or has been used."""

    kind = "scaler"

    def __init__(self, name: str, scaler: GradScaler) -> None:
        self._name = name
        self._scaler = scaler

    def capture(self, collector: StateCollector) -> dict[str, Json]:
        """See Adapter."""
        scaler: Any = self._scaler
        json: dict[str, Json] = {"kind": self.kind, "class": type_name(scaler), "state": {}}
        if not scaler.is_enabled():
            return json
        state = {key: getattr(scaler, f"_{key}") for key in _NUMBERS}
        for key, (live, initial) in _TENSORS.items():
            tensor = getattr(scaler, live)
            state[key] = getattr(scaler, initial) if tensor is None else tensor
        json["state"] = collector.encode(state, self._name)
        return json

    def holdings(self) -> Holdings:
        """See Adapter."""
        return all_of_it

    def prepare(self, saved: SavedObject, findings: Findings) -> Changes:
        """See Adapter."""
        saved.own_tree(saved.field("state"))
        was, now = bool(saved.field("state")), self._scaler.is_enabled()
        if was != now:
            words = {True: "enabled", False: "disabled"}
            findings.different.append(
                f"{self._name}: checkpoint has it {words[was]}, live is {words[now]}"
            )
            return Changes()
        return Changes(fallible=[Fallible(self._name, self._keep, partial(self._load, saved))])

    def _keep(self) -> Callable[[], None]:
        return partial(self._scaler.load_state_dict, self._scaler.state_dict())

    def _load(self, saved: SavedObject) -> None:
        self._scaler.load_state_dict(scaler_state_dict(saved))


def require_scaler_fields(saved: SavedObject) -> None:
    """Raise ValueError unless the fields are numbers or tensors of one number."""
    state = saved.decode(saved.field("state"))
    if not isinstance(state, dict) or state.keys() not in (set(), {*_TENSORS, *_NUMBERS}):
        raise ValueError("expected the state of a GradScaler")
    for key, node in saved.field("state").items():
        if isinstance(state[key], Tensor):
            sizes = saved.record(node["$tensor"]).shape
            if math.prod(sizes) != 1:
                raise ValueError(f"{key}: expected one number, got {list(sizes)}")
        elif type(state[key]) not in (int, float):
            raise ValueError(f"{key}: expected a number, got a {type(state[key]).__name__}")


def scaler_state_dict(saved: SavedObject) -> dict[str, Any]:
    """What ``GradScaler.state_dict()`` would have returned: numbers only."""
    state = saved.decode(saved.field("state"))
    return {key: getattr(value, "item", lambda v=value: v)() for key, value in state.items()}
