"""Loads a saved optimizer state into a live optimizer, bit for bit.

A live tensor of the saved shape and dtype is written in place. Otherwise a tensor is created as the
optimizer would do it: on the parameter's device and with its strides, except for tensors that were
on the host ("step", unless the optimizer is capturable or fused). Nothing is cast.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from checkfreq.state.adapters.base import Findings, type_name
from checkfreq.state.adapters.fitting import alike
from checkfreq.state.adapters.optimizer_tree import OptimizerTree
from checkfreq.state.codec import decode_tree
from checkfreq.state.dtensors import empty_split, is_dtensor
from checkfreq.state.saved import SavedObject, copy_bits
from checkfreq.state.tensors import DTYPES, decode_torch, require_memory
from checkfreq.types import Json

#: These select an implementation and not a result, so the script's values stay.
_IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """All parameters, in the order of their numbers."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class OptimizerLoad:
    """One load, compared first and applied once."""

    def __init__(
        self, name: str, optimizer: Optimizer, saved: SavedObject, tree: OptimizerTree
    ) -> None:
        self._name = name
        self._optimizer = optimizer
        self._saved = saved
        self._tree = tree
        self._split: dict[str, list[int | None]] = saved.field("split_dims", {})
        self._values: list[dict[str, Any]] = []
        self._made: dict[str, Tensor] = {}  # DTensors that no live tensor is split like
        self._placed: dict[str, Tensor] = {}
        self._written: set[int] = set()

    def compare(self, findings: Findings, scheduled: frozenset[str]) -> bool:
        """Add differences to ``findings``; True if the state can be applied."""
        before = len(findings.different)
        live_class, saved_class = type_name(self._optimizer), self._saved.field("class")
        if live_class != saved_class:
            findings.different.append(
                f"{self._name}: checkpoint is of a {saved_class}, live is a {live_class}"
            )
        self._compare_groups(findings)
        if len(findings.different) != before:
            return False
        self._compare_shapes(findings)
        self._require_memory()
        self._compare_meshes(findings)
        if len(findings.different) != before:
            return False
        self._check_nodes()
        self._decode_groups(findings)
        if len(findings.different) != before:
            return False
        self._compare_values(findings, scheduled)
        return True

    def _compare_groups(self, findings: Findings) -> None:
        saved = [group.num_params for group in self._tree.groups]
        live = [len(group["params"]) for group in self._optimizer.param_groups]
        if saved != live:
            findings.different.append(
                f"{self._name}.param_groups: checkpoint has groups of {saved} parameters, "
                f"live has {live}"
            )

    def _compare_shapes(self, findings: Findings) -> None:
        parameters = parameters_of(self._optimizer)
        for i, (parameter, shape) in enumerate(zip(parameters, self._tree.shapes, strict=False)):
            if list(parameter.shape) != list(shape):
                findings.different.append(
                    f"{self._name} parameter {i}: checkpoint has shape {list(shape)}, "
                    f"live has {list(parameter.shape)}"
                )

    def _require_memory(self) -> None:
        for i, parameter in enumerate(parameters_of(self._optimizer)):
            require_memory(f"{self._name} parameter {i}", parameter)
            state = self._optimizer.state.get(parameter)
            for name, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, Tensor):
                    require_memory(f"{self._name}.state.{i}.{name}", value)

    def _compare_meshes(self, findings: Findings) -> None:
        for number, parameter in enumerate(parameters_of(self._optimizer)):
            if not is_dtensor(parameter) or not self._split:
                continue
            pairs = self._tree.state.get(number, [])
            like = self._like(parameter, pairs)
            for name, node in pairs:
                key = node.get("$tensor") if isinstance(node, dict) else None
                if key in self._split and key not in like:
                    findings.different.append(
                        f"{self._name}.{key}: checkpoint has it on a mesh of "
                        f"{len(self._split[key])} dimensions, the parameter is on a different one; "
                        f"create the optimizer's {name!r} with a step before restore()"
                    )

    def _check_nodes(self) -> None:
        tree = self._tree
        live = self.live_dtensors()
        for pairs in tree.state.values():
            for name, value in pairs:
                self._saved.check(name)
                self._saved.check(value, live=live)
        for name, value in tree.other:
            self._saved.check(name)
            self._saved.check(value)
        for node in (*tree.whole.values(), *(g.values for g in tree.groups)):
            self._saved.check(node)

    def live_dtensors(self) -> dict[str, Tensor]:
        """By key, DTensors that are split as the restored tensors will be."""
        found: dict[str, Tensor] = {}
        for number, parameter in enumerate(parameters_of(self._optimizer)):
            if is_dtensor(parameter):
                found.update(self._like(parameter, self._tree.state.get(number, [])))
        return found

    def _like(self, parameter: Tensor, pairs: list[tuple[Json, Json]]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        states = self._optimizer.state.get(parameter, {})
        for name, node in pairs:
            if isinstance(node, dict) and isinstance(name, str) and "$tensor" in node:
                key = node["$tensor"]
                shape = self._saved.record(key).shape
                live = states.get(name) if isinstance(states, dict) else None
                for tensor in (live, None if name == "step" else parameter):
                    if is_dtensor(tensor) and tuple(tensor.shape) == shape:
                        found[key] = tensor
                        break
                else:
                    if self._is_split_alike(key, parameter):
                        found[key] = self._made_for(key, parameter)
        return found

    def _is_split_alike(self, key: str, parameter: Any) -> bool:
        return bool(len(self._split.get(key, ())) == parameter.device_mesh.ndim)

    def _made_for(self, key: str, parameter: Tensor) -> Tensor:
        record = self._saved.record(key)
        if record.name not in self._made:
            self._made[record.name] = empty_split(
                record.shape, self._split[key], parameter, DTYPES[record.dtype]
            )
        return self._made[record.name]

    def _decode_groups(self, findings: Findings) -> None:
        """Decode the entries of the groups, before anything live changes: it may fail."""
        self._values = [
            {key: self._saved.decode(node) for key, node in group.values.items()}
            for group in self._tree.groups
        ]
        groups = zip(self._values, self._optimizer.param_groups, strict=True)
        for i, (saved, live) in enumerate(groups):
            for key in saved.keys() & live.keys():
                if not _may_replace(live[key], saved[key]):
                    findings.different.append(
                        f"{self._name}.param_groups[{i}].{key}: checkpoint has "
                        f"{_show(saved[key])}, live has {_show(live[key])}"
                    )

    def _compare_values(self, findings: Findings, scheduled: frozenset[str]) -> None:
        groups = zip(self._values, self._optimizer.param_groups, strict=True)
        for i, (saved, live) in enumerate(groups):
            for key, value in saved.items():
                if key not in live or key in scheduled:
                    continue
                if not _same(live[key], value):
                    place = f"{self._name}.param_groups[{i}].{key}"
                    text = f"{place}: {_show(live[key])} -> {_show(value)}"
                    kept = key in _IMPLEMENTATION
                    (findings.notes if kept else findings.overridden).append(text)

    def apply(self) -> None:
        """Write all of the state; runs no user code."""
        with torch.no_grad():
            for saved, live in zip(self._values, self._optimizer.param_groups, strict=True):
                for key, value in saved.items():
                    self._set_group_value(live, key, value)
            starts = accumulate((g.num_params for g in self._tree.groups), initial=0)
            for start, group in zip(starts, self._optimizer.param_groups, strict=False):
                for i, parameter in enumerate(group["params"], start):
                    self._set_state(i, parameter, group)
            for key, node in self._tree.other:
                self._optimizer.state[self._saved.decode(key)] = self._saved.decode(node)

    def _set_group_value(self, live: dict[str, Any], key: str, value: Any) -> None:
        if key in _IMPLEMENTATION and key in live:
            return
        current = live.get(key)
        # A tensor stays the same object: captured graphs and compiled steps read it.
        if isinstance(current, Tensor) and isinstance(value, Tensor):
            if current.shape == value.shape and current.dtype == value.dtype:
                copy_bits(current, value)
                return
        elif isinstance(current, Tensor) and isinstance(value, int | float):
            current.fill_(value)
            return
        live[key] = value

    def _set_state(self, number: int, parameter: Tensor, group: dict[str, Any]) -> None:
        states = self._optimizer.state
        if number in self._tree.whole:
            states[parameter] = self._decode(self._tree.whole[number], "", parameter, group)
            return
        if number not in self._tree.state:
            states.pop(parameter, None)  # it had none; the optimizer creates it when it steps
            return
        live = states.get(parameter, {})
        new = {
            self._saved.decode(name): self._value(name, node, live, parameter, group)
            for name, node in self._tree.state[number]
        }
        live.clear()
        live.update(new)
        states[parameter] = live

    def _value(
        self, name: Json, node: Json, live: dict[Any, Any], parameter: Tensor, group: dict[str, Any]
    ) -> Any:
        key = name if isinstance(name, str) else ""
        if isinstance(node, dict) and "$tensor" in node:
            return self._place(node, key, live.get(key), parameter, group)
        return self._decode(node, key, parameter, group)

    def _decode(self, node: Json, name: str, parameter: Tensor, group: dict[str, Any]) -> Any:
        def leaf(tag: str, inner: dict[str, Json]) -> Any:
            if tag == "$tensor":
                return self._place(inner, name, None, parameter, group)
            return decode_torch(tag, inner, self._saved.owned)

        return decode_tree(node, leaf=leaf)

    def _place(
        self,
        node: dict[str, Json],
        name: str,
        live: object,
        parameter: Tensor,
        group: dict[str, Any],
    ) -> Tensor:
        """The live tensor for a saved one; names that shared a tensor share one again."""
        record = self._saved.record(node["$tensor"])
        placed = self._placed.get(record.name)
        if placed is not None:
            return placed
        target = live if isinstance(live, Tensor) else None
        if target is None or not self._is_writable(target, record.shape, DTYPES[record.dtype]):
            target = self._made.get(record.name)
        if target is None:
            on_host = self._on_host(node, name, group)
            target = _create(
                tuple(record.shape),
                DTYPES[record.dtype],
                parameter,
                torch.device("cpu") if on_host else parameter.device,
                is_plain=on_host or name == "step",
            )
        self._saved.copy_to(target, record.name)
        self._written.add(id(target))
        self._placed[record.name] = target
        return target

    def _is_writable(self, live: Tensor, shape: Any, dtype: torch.dtype) -> bool:
        return (
            tuple(live.shape) == tuple(shape)
            and live.dtype == dtype
            and id(live) not in self._written  # one live tensor cannot hold two saved ones
        )

    def _on_host(self, node: dict[str, Json], name: str, group: dict[str, Any]) -> bool:
        if name == "step" and (group.get("capturable") or group.get("fused")):
            return False
        if self._tree.device_type != "cpu":
            return "device" not in node
        return name == "step"


def _create(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    parameter: Tensor,
    device: torch.device,
    *,
    is_plain: bool,
) -> Tensor:
    if shape == tuple(parameter.shape) and not (is_plain and is_dtensor(parameter)):
        return torch.empty_like(parameter, dtype=dtype, device=device, requires_grad=False)
    return torch.empty(shape, dtype=dtype, device=device)


def _may_replace(live: Any, saved: Any) -> bool:
    """Whether the saved value may replace a live entry of a group."""
    if callable(live) or not alike(live, saved):
        return False
    if isinstance(live, Tensor):
        if isinstance(saved, Tensor):
            return True
        try:
            torch.empty(1, dtype=live.dtype, device="cpu").fill_(saved)
        except (TypeError, RuntimeError, OverflowError):  # no number, or out of the dtype's range
            return False
    return True


def _same(live: Any, saved: Any) -> bool:
    if isinstance(live, Tensor) or isinstance(saved, Tensor):
        try:
            one, other = torch.as_tensor(live).cpu(), torch.as_tensor(saved).cpu()
        except (TypeError, ValueError, RuntimeError, OverflowError):  # no number, or too large
            return False
        return one.shape == other.shape and bool((one == other).all())
    if isinstance(live, list | tuple) and isinstance(saved, list | tuple):
        return len(live) == len(saved) and all(map(_same, live, saved))
    return bool(live == saved)


def _show(value: Any) -> str:
    if isinstance(value, Tensor):
        value = value.item() if value.numel() == 1 else f"tensor{list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
