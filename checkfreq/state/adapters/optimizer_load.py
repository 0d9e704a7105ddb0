"""Loads a saved optimizer state into a live optimizer, bit for bit.

A live tensor of the saved shape, strides and dtype is filled in place. Otherwise one is made with
those: on the parameter's device, except for tensors that were on the host ("step", unless the
optimizer is capturable or fused). It is filled too, and becomes the optimizer's when all of them
are. Nothing is cast.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from checkfreq.state.adapters.base import Fallible, Filled, Findings, type_name
from checkfreq.state.adapters.composed_load import ComposedLoad
from checkfreq.state.adapters.group_values import may_replace, same, show
from checkfreq.state.adapters.optimizer_tree import OptimizerTree
from checkfreq.state.adapters.trees import Refill, tensors_in
from checkfreq.state.codec import decode_tree
from checkfreq.state.composed import is_composed
from checkfreq.state.dtensors import empty_like, empty_split, is_dtensor, local_of
from checkfreq.state.given import IMPLEMENTATION
from checkfreq.state.saved import SavedObject, new_tensor
from checkfreq.state.saved_tensor import SavedTensor, copy_bits, local_part
from checkfreq.state.tensors import DTYPES, decode_torch, require_memory
from checkfreq.types import Json


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """All parameters, in the order of their numbers."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class OptimizerLoad:
    """One load: compared, then placed, then filled by the caller, and applied once."""

    def __init__(
        self, name: str, optimizer: Optimizer, saved: SavedObject, tree: OptimizerTree
    ) -> None:
        self._name = name
        self._optimizer = optimizer
        self._saved = saved
        self._tree = tree
        self._split: dict[str, list[int | None]] = saved.field("split_dims", {})
        #: The entries of the groups, once they were compared.
        self.values: list[dict[str, Any]] = []
        #: By key, state in the memory of a parameter: see `StateCollector.made_anew`.
        self._of_parameters: dict[str, list[Any]] = saved.field("of_parameters", {})
        self._made: dict[str, Tensor] = {}  # DTensors that no live tensor is split like
        self._placed: dict[str, Tensor] = {}
        self._written: set[int] = set()
        #: Composed tensors: the live one that is filled, or where a new one goes, by key.
        self._composed = ComposedLoad(saved)
        self._composed_at: dict[str, Tensor | str] = {}
        self._refill = Refill()
        #: What is to be filled before ``apply``, and the memory of that which is not live yet.
        self.filled: list[Filled] = []
        self.new_bytes = 0

    def compare(self, findings: Findings) -> bool:
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
        self._compare_shared(findings)
        if len(findings.different) != before:
            return False
        self._check_nodes()
        self._decode_groups(findings)
        if len(findings.different) != before:
            return False
        self._compare_implementations(findings)
        return True

    def _compare_groups(self, findings: Findings) -> None:
        saved = [group.num_params for group in self._tree.groups]
        live = [len(group["params"]) for group in self._optimizer.param_groups]
        if saved != live:
            findings.different.append(
                f"{self._name}.param_groups: checkpoint has groups of {saved} parameters, "
                f"live has {live}; where groups come in the course of training, "
                "CFManager.peek(chk_dir) tells them before the optimizer is made"
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

    def _compare_shared(self, findings: Findings) -> None:
        """State in the memory of a parameter, which now must be laid out as it was."""
        parameters = parameters_of(self._optimizer)
        for key, (number, offset, strides, own) in self._of_parameters.items():
            record, parameter = self._saved.record(key), parameters[number]
            local = local_of(parameter)
            fits = local.dtype == DTYPES[record.dtype] and (
                _is_whole(offset, strides, own, record, parameter)
                or ([*local.stride()] == own and _is_within(offset, record.shape, strides, local))
            )
            if not fits:
                findings.different.append(
                    f"{self._name}.{key}: checkpoint has it in the memory of parameter {number}, "
                    f"with strides {own}; live is {local.dtype} with strides {[*local.stride()]}"
                )

    def _check_nodes(self) -> None:
        tree = self._tree
        live = self.live_dtensors()
        for pairs in tree.state.values():
            for name, value in pairs:
                self._saved.own_tree(name)
                self._check_value(value, live)
        for name, value in tree.other:
            self._saved.own_tree(name)
            self._saved.own_tree(value)
        for node in tree.whole.values():
            self._check_value(node, {})
        for group in tree.groups:
            for node in group.values.values():
                self._saved.own_tree(node)

    def _check_value(self, node: Json, live: dict[str, Tensor]) -> None:
        """Check part of a parameter's state; what is no tensor but is kept as one is owned."""
        self._saved.check(node, live=live)

        def leaf(tag: str, inner: dict[str, Json]) -> Any:
            if tag != "$tensor":
                self._saved.own_tree(inner)

        decode_tree(node, leaf=leaf, classes=self._saved.classes)

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
                if key in self._saved.composed:
                    continue
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
                record.shape, self._split[key], parameter, DTYPES[record.dtype], record.strides
            )
        return self._made[record.name]

    def _decode_groups(self, findings: Findings) -> None:
        """Read the entries of the groups, before anything live changes."""
        self._saved.fetch()
        self.values = [
            {key: self._saved.decode(node) for key, node in group.values.items()}
            for group in self._tree.groups
        ]
        groups = zip(self.values, self._optimizer.param_groups, strict=True)
        for i, (saved, live) in enumerate(groups):
            for key in saved.keys() & live.keys():
                if not may_replace(live[key], saved[key]):
                    findings.different.append(
                        f"{self._name}.param_groups[{i}].{key}: checkpoint has "
                        f"{show(saved[key])}, live has {show(live[key])}"
                    )

    def _compare_implementations(self, findings: Findings) -> None:
        groups = zip(self.values, self._optimizer.param_groups, strict=True)
        for i, (saved, live) in enumerate(groups):
            for key in IMPLEMENTATION & saved.keys() & live.keys():
                if not same(live[key], saved[key]):
                    findings.notes.append(
                        f"{self._name}.param_groups[{i}].{key}: {show(live[key])}, where the "
                        f"checkpoint has {show(saved[key])}"
                    )

    def place(self) -> None:
        """Choose the memory of every tensor of the state: the live one's, or a new one's."""
        places = [*self._places()]
        self._composed.compare((node["$tensor"], live) for node, _, live, *_ in places)
        for place in places:
            self._place(*place)
        self.filled += self._composed.filled

    def _places(self) -> Iterator[tuple[dict[str, Json], str, object, Tensor, dict[str, Any]]]:
        """Of each tensor of the state: its node, the name in it of what holds it, what is live
        there, and the parameter with its group."""
        starts = accumulate((g.num_params for g in self._tree.groups), initial=0)
        for start, group in zip(starts, self._optimizer.param_groups, strict=False):
            for i, parameter in enumerate(group["params"], start):
                live = self._optimizer.state.get(parameter, {})
                for name, node in self._tree.state.get(i, ()):
                    there = live.get(name) if isinstance(live, dict) and _is_key(name) else None
                    key = name if isinstance(name, str) else ""
                    for inner, one in tensors_in(node, there, self._saved.decode):
                        yield inner, key, one, parameter, group
                if i in self._tree.whole:
                    for inner, one in tensors_in(self._tree.whole[i], live, self._saved.decode):
                        yield inner, "", one, parameter, group

    @property
    def fallible(self) -> list[Fallible]:
        """Builds what is not filled; changes nothing."""
        return self._composed.fallible

    def apply(self) -> None:
        """Set all of the state, whose tensors have been filled; runs no user code."""
        with torch.no_grad():
            for put in self._composed.sets:
                put()
            for saved, live in zip(self.values, self._optimizer.param_groups, strict=True):
                for key, value in saved.items():
                    self._set_group_value(live, key, value)
            starts = accumulate((g.num_params for g in self._tree.groups), initial=0)
            for start, group in zip(starts, self._optimizer.param_groups, strict=False):
                for i, parameter in enumerate(group["params"], start):
                    self._set_state(i, parameter)
            for key, node in self._tree.other:
                self._optimizer.state[self._saved.decode(key)] = self._saved.decode(node)

    def _set_group_value(self, live: dict[str, Any], key: str, value: Any) -> None:
        if key in IMPLEMENTATION and key in live:
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

    def _set_state(self, number: int, parameter: Tensor) -> None:
        states = self._optimizer.state
        if number in self._tree.whole:
            whole = self._decode(self._tree.whole[number])
            states[parameter] = self._refill.value(states.get(parameter), whole)
            return
        if number not in self._tree.state:
            states.pop(parameter, None)  # it had none; the optimizer creates it when it steps
            return
        live = states.get(parameter)
        kept = live if isinstance(live, dict) else {}
        new = {
            self._saved.decode(name): self._decode(node) for name, node in self._tree.state[number]
        }
        self._refill.fill_dict(kept, new)
        states[parameter] = kept

    def _decode(self, node: Json) -> Any:
        def leaf(tag: str, inner: dict[str, Json]) -> Any:
            if tag == "$tensor" and inner["$tensor"] in self._composed_at:
                at = self._composed_at[inner["$tensor"]]
                return self._saved.owned(inner["$tensor"], at) if isinstance(at, str) else at
            if tag == "$tensor":
                return self._placed[self._saved.record(inner["$tensor"]).name]
            return decode_torch(tag, inner, self._saved.owned)

        return decode_tree(node, leaf=leaf, classes=self._saved.classes)

    def _place(
        self,
        node: dict[str, Json],
        name: str,
        live: object,
        parameter: Tensor,
        group: dict[str, Any],
    ) -> None:
        """Choose the tensor for a saved one; names that shared a tensor share one again."""
        if node["$tensor"] in self._saved.composed:
            self._place_composed(node, name, live, parameter, group)
            return
        record = self._saved.record(node["$tensor"])
        if record.name in self._placed:
            return
        if record.name in self._of_parameters:
            self._placed[record.name] = self._in_parameter(record)
            return
        if isinstance(live, Tensor) and self._is_writable(live, record):
            target = live
        else:
            target = self._new(node, name, record, parameter, group)
            self.new_bytes += local_part(target)[0].nbytes
        self.filled.append(Filled(f"{self._name}.{record.name}", target, record))
        self._written.add(id(target))
        self._placed[record.name] = target

    def _in_parameter(self, record: SavedTensor) -> Tensor:
        """The same part of the live parameter as before; `_compare_shared` saw that it fits."""
        number, offset, strides, own = self._of_parameters[record.name]
        parameter = parameters_of(self._optimizer)[number]
        if _is_whole(offset, strides, own, record, parameter):
            whole: Tensor = parameter.detach()
            return whole
        local = local_of(parameter).detach()
        return local.as_strided(record.shape, strides, local.storage_offset() + offset)

    def _place_composed(
        self,
        node: dict[str, Json],
        name: str,
        live: object,
        parameter: Tensor,
        group: dict[str, Any],
    ) -> None:
        key = node["$tensor"]
        is_free = isinstance(live, Tensor) and id(live) not in self._written
        if isinstance(live, Tensor) and is_free and self._composed.fits(key, live):
            self._composed.place(key, live)
            self._composed_at[key] = live
            self._written.add(id(live))
            return
        device = "cpu" if self._on_host(node, name, group) else str(parameter.device)
        self._composed.ask(key, device)
        self._composed_at[key] = device

    def _new(
        self,
        node: dict[str, Json],
        name: str,
        record: SavedTensor,
        parameter: Tensor,
        group: dict[str, Any],
    ) -> Tensor:
        if record.name in self._made:
            return self._made[record.name]
        on_host = self._on_host(node, name, group)
        device = torch.device("cpu") if on_host else parameter.device
        dtype = DTYPES[record.dtype]
        is_plain = on_host or name == "step" or record.shape != tuple(parameter.shape)
        if is_dtensor(parameter) and not is_plain:
            return empty_like(parameter, dtype, record.strides)  # type: ignore[no-any-return]
        return new_tensor(record.shape, dtype, device, record.strides)

    def _is_writable(self, live: Tensor, record: SavedTensor) -> bool:
        return (
            not is_composed(live)
            and tuple(live.shape) == record.shape
            and live.dtype == DTYPES[record.dtype]
            and record.has_strides_of(live)
            and id(live) not in self._written  # one live tensor cannot hold two saved ones
        )

    def _on_host(self, node: dict[str, Json], name: str, group: dict[str, Any]) -> bool:
        if name == "step" and (group.get("capturable") or group.get("fused")):
            return False
        if self._tree.device_type != "cpu":
            return "device" not in node
        return name == "step"


def _is_whole(
    offset: int, strides: list[int], own: list[int], record: SavedTensor, parameter: Tensor
) -> bool:
    """Whether what lay there in a parameter with strides ``own`` was all of it."""
    return offset == 0 and strides == own and record.shape == tuple(parameter.shape)


def _is_within(offset: int, shape: tuple[int, ...], strides: list[int], whole: Tensor) -> bool:
    """Whether a view of ``whole`` with this place, shape and strides touches nothing beyond it."""

    def last(sizes: Iterable[int], steps: Iterable[int]) -> int:
        return sum((size - 1) * step for size, step in zip(sizes, steps, strict=True))

    return offset + last(shape, strides) <= last(whole.shape, whole.stride())


def _is_key(name: Json) -> bool:
    return isinstance(name, str | int)
