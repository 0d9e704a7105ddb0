"""The saved state of an optimizer in one form, whichever way it was read.

Values stay JSON nodes: the code that loads a tensor decides where it goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor

from checkfreq.state.saved import SavedObject
from checkfreq.state.tensors import ON_PARAMETER
from checkfreq.types import Json


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """One param_group: its number of parameters, and its other entries as JSON nodes."""

    num_params: int
    values: dict[str, Json]


@dataclass(frozen=True, slots=True)
class OptimizerTree:
    """``state`` maps a parameter's number to [name node, value node] pairs.

    ``whole`` has the states of parameters that are not dicts, ``other`` state that belongs to no
    parameter. ``device_type`` is the type of device that the parameters were on.
    """

    groups: list[SavedGroup]
    state: dict[int, list[tuple[Json, Json]]]
    whole: dict[int, Json]
    other: list[tuple[Json, Json]]
    shapes: list[list[int]]
    device_type: str


def parameter_key(number: int) -> str:
    """The key of a parameter that only the optimizer holds."""
    return f"parameter.{number}"


def optimizer_tree(saved: SavedObject) -> OptimizerTree | None:
    """The tree; None if an override's ``state_dict()`` does not have torch's form."""
    try:
        if "state_dict" in saved.json:
            return _from_state_dict(saved)
        return _from_fields(saved)
    except (KeyError, TypeError, ValueError) as error:
        raise saved.corrupt("state of the optimizer", "groups and state", repr(error)) from error


def _from_fields(saved: SavedObject) -> OptimizerTree:
    state: dict[int, list[tuple[Json, Json]]] = {}
    for record in saved.field("flat"):
        host = set(record.get("host", ()))
        for number in record["params"]:
            state[number] = [(name, _flat(number, name, host)) for name in record["names"]]
    whole = {}
    for text, tree in saved.field("trees").items():
        if "items" in tree:
            state[int(text)] = [(name, value) for name, value in tree["items"]]
        else:
            whole[int(text)] = tree["value"]
    return OptimizerTree(
        groups=[SavedGroup(g["num_params"], _entries(g["values"])) for g in saved.field("groups")],
        state=state,
        whole=whole,
        other=[(key, value) for key, value in saved.field("other")],
        shapes=saved.field("shapes"),
        device_type=saved.field("device_type"),
    )


def _flat(number: int, name: str, host: set[str]) -> dict[str, Json]:
    node: dict[str, Json] = {"$tensor": f"state.{number}.{name}"}
    return node if name in host else {**node, "device": ON_PARAMETER}


def _from_state_dict(saved: SavedObject) -> OptimizerTree | None:
    tree: Any = saved.field("state_dict")
    if not isinstance(tree, dict) or not {"state", "param_groups"} <= tree.keys():
        return None
    groups = tree["param_groups"]
    state = dict(tree["state"].get("$dict", ()))
    if not all(isinstance(number, int) and _is_plain(item) for number, item in state.items()):
        return None
    if not all(_is_plain(group) and "params" in group for group in groups):
        return None
    return OptimizerTree(
        groups=[
            SavedGroup(len(g["params"]), {k: v for k, v in g.items() if k != "params"})
            for g in groups
        ],
        state={number: list(item.items()) for number, item in state.items()},
        whole={},
        other=[],
        shapes=saved.field("shapes"),
        device_type=saved.field("device_type"),
    )


def _is_plain(node: Json) -> bool:
    return isinstance(node, dict) and not next(iter(node), "").startswith("$")


def _entries(node: Json) -> dict[str, Json]:
    if _is_plain(node):
        return dict(node)
    return dict(node["$dict"])


def optimizer_state_dict(
    saved: SavedObject, *, live: Mapping[str, Tensor] = MappingProxyType({})
) -> dict[str, Any]:
    """What ``optimizer.state_dict()`` returned: copies on the CPU, or DTensors like ``live``."""
    if "state_dict" in saved.json:
        node = saved.field("state_dict")
        state: dict[str, Any] = saved.decode(node, on_cpu=True, live=live)
        return state
    tree = optimizer_tree(saved)
    assert tree is not None
    numbered: dict[Any, Any] = {
        number: {
            saved.decode(name): saved.decode(value, on_cpu=True, live=live) for name, value in items
        }
        for number, items in sorted(tree.state.items())
    }
    numbered.update(
        (number, saved.decode(node, on_cpu=True)) for number, node in tree.whole.items()
    )
    numbered.update(
        (saved.decode(key), saved.decode(value, on_cpu=True)) for key, value in tree.other
    )
    return {"state": numbered, "param_groups": _numbered_groups(saved, tree.groups)}


def optimizer_value(saved: SavedObject) -> dict[str, Any]:
    """The state dict for readers: parameters that no tracked object held are in "parameters"."""
    state = optimizer_state_dict(saved)
    numbers = saved.field("parameters", [])
    own = {number: saved.owned(parameter_key(number)) for number in numbers}
    return {**state, "parameters": own} if own else state


def _numbered_groups(saved: SavedObject, groups: list[SavedGroup]) -> list[dict[str, Any]]:
    packed, start = [], 0
    for group in groups:
        values = {key: saved.decode(node, on_cpu=True) for key, node in group.values.items()}
        packed.append({**values, "params": list(range(start, start + group.num_params))})
        start += group.num_params
    return packed


def own_state_dict(
    saved: SavedObject, *, live: Mapping[str, Tensor] = MappingProxyType({})
) -> None:
    """Say that ``optimizer_state_dict`` will be called with these arguments."""
    if "state_dict" in saved.json:
        saved.own_tree(saved.field("state_dict"), on_cpu=True, live=live)
        return
    tree = optimizer_tree(saved)
    assert tree is not None
    for items in tree.state.values():
        for name, value in items:
            saved.own_tree(name)
            saved.own_tree(value, on_cpu=True, live=live)
    for node in (*tree.whole.values(), *(value for _, value in tree.other)):
        saved.own_tree(node, on_cpu=True)
    for key, _ in tree.other:
        saved.own_tree(key)
    for group in tree.groups:
        for node in group.values.values():
            saved.own_tree(node, on_cpu=True)
