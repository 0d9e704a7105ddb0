"""torch.optim.Optimizer: read and written directly, so that no value changes its dtype.

``Optimizer.load_state_dict`` casts state to the parameter's dtype, which rounds fp32 state of bf16
parameters, and ``state_dict()`` is slow; both are used only if there are hooks or an override.
Tensors are called ``state.<parameter number>.<name>``. Nearly all parameters have a flat dict of
tensors as their state; those with the same names share one record. A parameter that no tracked
object holds is saved too, as ``parameter.<number>``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from copy import deepcopy
from functools import partial
from types import MappingProxyType
from typing import Any, TypeGuard

from torch import Tensor
from torch.optim import Optimizer

from checkfreq.errors import StateError
from checkfreq.state.adapters.base import (
    Changes,
    Fallible,
    Filled,
    Findings,
    Holdings,
    all_of_it,
    type_name,
)
from checkfreq.state.adapters.composed_load import ComposedLoad
from checkfreq.state.adapters.fitting import misfits
from checkfreq.state.adapters.module import fits
from checkfreq.state.adapters.optimizer_load import OptimizerLoad, parameters_of
from checkfreq.state.adapters.optimizer_tree import (
    optimizer_state_dict,
    optimizer_tree,
    own_state_dict,
    parameter_key,
)
from checkfreq.state.classes import Classes
from checkfreq.state.collector import StateCollector
from checkfreq.state.composed import VIEW
from checkfreq.state.dtensors import is_dtensor, split_dims, tensor_types
from checkfreq.state.given import FirstGiven, given_to_groups
from checkfreq.state.saved import SavedObject
from checkfreq.state.saved_tensor import local_part
from checkfreq.state.sharding import require_optimizer_that_is_known
from checkfreq.state.unheld import warn_of_unheld
from checkfreq.store.boxes import Box
from checkfreq.types import Json

#: The beginning of a tensor's key, before its name in the parameter's state.
_STATE_KEY = re.compile(r"state(?:\.|\[)(\d+)\]?\.")

#: Names in the state of a parameter, and which of the tensors are on the host.
_Names = tuple[tuple[str, ...], tuple[bool, ...]]


class OptimizerAdapter:
    """One optimizer."""

    kind = "optimizer"

    def __init__(self, name: str, optimizer: Optimizer) -> None:
        self._name = name
        self._optimizer = optimizer
        self._given = FirstGiven(given_to_groups(optimizer.param_groups))
        # parameter number -> name -> key: formatted once, not per tensor at every capture.
        self._keys: dict[int, dict[str, str]] = {}
        #: How many of the parameters that nobody else holds were named so far.
        self._num_named = 0

    def capture(self, collector: StateCollector) -> dict[str, Json]:
        """See Adapter."""
        collector.classes = Classes(type(self._optimizer))
        json: dict[str, Json] = {"kind": self.kind, "class": type_name(self._optimizer)}
        parameters = parameters_of(self._optimizer)
        require_optimizer_that_is_known(self._name, self._optimizer, parameters)
        json["given"] = self._given.json
        json["shapes"] = [list(parameter.shape) for parameter in parameters]
        json["device_type"] = parameters[0].device.type if parameters else "cpu"
        if saves_its_own_way(self._optimizer):
            state = self._optimizer.state_dict()
            json["state_dict"] = collector.encode(state, self._name)
        else:
            json |= {
                **self._capture_state(parameters, collector),
                "groups": self._groups(collector),
            }
        if split := self._split_dims(parameters, collector):
            json["split_dims"] = split
        if of_parameters := collector.made_anew(parameters=parameters):
            json["of_parameters"] = of_parameters
        views = [k for k, r in collector.composed.get(self._name, {}).items() if r["kind"] == VIEW]
        if (of_parameters or views) and loads_its_own_way(self._optimizer):
            raise StateError(
                f"{self._name}: {[*of_parameters, *views][0]} shares memory with other state or a "
                f"parameter, which load_state_dict() of a {type(self._optimizer).__qualname__} "
                "would not restore. Keep a copy in the state instead: tensor.clone()"
            )
        if numbers := collector.held.lacks(parameters):
            self._capture_parameters(parameters, numbers, collector, of_parameters)
            json["parameters"] = list(numbers)
        return json

    def _capture_parameters(
        self,
        parameters: list[Tensor],
        numbers: list[int],
        collector: StateCollector,
        of_parameters: Collection[str],
    ) -> None:
        """Keep those that nobody else does, and name them once."""
        unknown = []
        for number in numbers:
            parameter, key = parameters[number], parameter_key(number)
            is_frozen = not parameter.requires_grad and parameter not in self._optimizer.state
            kept = collector.add(key, parameter, True, is_frozen)
            if kept == key or kept in of_parameters:
                unknown.append(number)  # it is not in a state dict of the optimizer's own
        if len(unknown) > self._num_named:
            self._num_named = len(unknown)
            copies = collector.held.has_copy
            if found := [n for n in unknown if not copies(parameters[n])]:
                warn_of_unheld(self._name, found, parameters)

    def _split_dims(self, parameters: list[Tensor], collector: StateCollector) -> dict[str, Json]:
        """How DTensors are split whose shape differs from their parameter's.

        The others are split as their parameter is.
        """
        found: dict[str, Json] = {}
        for (name, key), tensor in collector.dtensors.items():
            if name == self._name and (match := _STATE_KEY.match(key)):
                number = int(match[1])
                if number < len(parameters) and tensor.shape != parameters[number].shape:
                    found[key] = split_dims(tensor)
        return found

    def _capture_state(
        self, parameters: list[Tensor], collector: StateCollector
    ) -> dict[str, Json]:
        numbers = {id(parameter): i for i, parameter in enumerate(parameters)}
        flat: dict[_Names, list[int]] = {}
        trees: dict[str, Json] = {}
        other: list[Json] = []
        types = tensor_types()
        for owner, state in self._optimizer.state.items():
            if not isinstance(owner, Tensor):
                path = f"{self._name}.state[{owner!r}]"
                other.append([collector.encode(owner, path), collector.encode(state, path)])
                continue
            number = self._number(owner, numbers)
            if _is_flat(state, types):
                names = self._add_flat(number, state, collector)
                flat.setdefault(names, []).append(number)
            else:
                trees[str(number)] = self._tree(number, state, collector)
        return {
            "flat": [_flat_json(*item, parameters) for item in flat.items()],
            "trees": trees,
            "other": other,
        }

    def _number(self, owner: Tensor, numbers: dict[int, int]) -> int:
        if id(owner) not in numbers:
            raise StateError(
                f"{self._name}.state holds state of a tensor {list(owner.shape)} that is in no "
                "param_group; remove the entry, or add the parameter to a group"
            )
        return numbers[id(owner)]

    def _add_flat(self, number: int, state: dict[str, Tensor], collector: StateCollector) -> _Names:
        keys, add = self._keys.get(number), collector.add
        if keys is None or keys.keys() != state.keys():
            keys = self._keys[number] = {name: f"state.{number}.{name}" for name in state}
        for name, tensor in state.items():
            add(keys[name], tensor, True)
        return tuple(state), tuple([tensor.is_cpu for tensor in state.values()])

    def _tree(self, number: int, state: Any, collector: StateCollector) -> Json:
        path = f"{self._name}.state.{number}"
        if type(state) is not dict:
            return {"value": collector.encode(state, path, settled=True)}
        return {
            "items": [
                [
                    collector.encode(key, path),
                    collector.encode(value, f"{path}.{key}", settled=True),
                ]
                for key, value in state.items()
            ]
        }

    def _groups(self, collector: StateCollector) -> list[Json]:
        groups = []
        for i, group in enumerate(self._optimizer.param_groups):
            path = f"{self._name}.param_groups[{i}]"
            values = {key: value for key, value in group.items() if key != "params"}
            json = {"num_params": len(group["params"]), "values": collector.encode(values, path)}
            groups.append(json)
        return groups

    def holdings(self) -> Holdings:
        """See Adapter."""
        if saves_its_own_way(self._optimizer) or loads_its_own_way(self._optimizer):
            return all_of_it  # only the optimizer knows what its keys stand for
        parameters = parameters_of(self._optimizer)
        own = {parameter_key(number): one for number, one in enumerate(parameters)}

        def of(key: str, shape: tuple[int, ...]) -> Iterator[Box]:
            found = _STATE_KEY.match(key)
            number = int(found[1]) if found else len(parameters)
            if number >= len(parameters):
                yield local_part(own[key])[1] if key in own else Box.whole(shape)
                return
            state = self._optimizer.state.get(parameters[number])
            live = state.get(key[found.end() :]) if found and isinstance(state, dict) else None
            sharded = [t for t in (live, parameters[number]) if _is_dtensor_of(t, shape)]
            yield from (local_part(t)[1] for t in sharded) if sharded else (Box.whole(shape),)

        return of

    def prepare(self, saved: SavedObject, findings: Findings) -> Changes:
        """See Adapter."""
        saved.classes = Classes(type(self._optimizer))
        parameters = parameters_of(self._optimizer)
        require_optimizer_that_is_known(self._name, self._optimizer, parameters)
        changes = self._prepare_state(saved, findings, parameters)
        return self._with_parameters(changes, saved, findings, parameters)

    def _prepare_state(
        self, saved: SavedObject, findings: Findings, parameters: list[Tensor]
    ) -> Changes:
        tree = optimizer_tree(saved)
        if tree is None:
            state = saved.own_tree(saved.field("state_dict"), on_cpu=True)
            if unfit := list(misfits(self._name, self._optimizer, state)):
                findings.different += unfit
                return Changes()
            return Changes(fallible=[self._by_load_state_dict(saved)])
        load = OptimizerLoad(self._name, self._optimizer, saved, tree)
        if not load.compare(findings):
            return Changes()
        state = given_to_groups(load.values)
        self._given.compare(self._name, saved, state, findings)
        take_up = partial(self._given.take_up, saved, state)
        if loads_its_own_way(self._optimizer):
            live = load.live_dtensors()
            own_state_dict(saved, live=live)
            return Changes(fallible=[self._by_load_state_dict(saved, live)], sets=[take_up])
        load.place()
        return Changes(
            fallible=load.fallible,
            filled=load.filled,
            sets=[load.apply, take_up],
            new_bytes=load.new_bytes,
        )

    def _with_parameters(
        self, changes: Changes, saved: SavedObject, findings: Findings, parameters: list[Tensor]
    ) -> Changes:
        """Have parameters filled in place that were saved with the optimizer."""
        load = ComposedLoad(saved)
        for number in saved.field("parameters", []):
            key = parameter_key(number)
            if number >= len(parameters):
                findings.unexpected.append(f"{self._name}.{key}")
            elif fits(self._name, key, live := parameters[number], saved, findings):
                if key in saved.composed:
                    load.place(key, live)
                else:
                    load.filled.append(Filled(f"{self._name}.{key}", live, saved.record(key)))
        changes.fallible += load.fallible
        changes.filled += load.filled
        changes.sets += load.sets
        return changes

    def _by_load_state_dict(
        self, saved: SavedObject, live: Mapping[str, Tensor] = MappingProxyType({})
    ) -> Fallible:
        def keep() -> Callable[[], None]:
            return partial(self._optimizer.load_state_dict, deepcopy(self._optimizer.state_dict()))

        def load() -> None:
            self._optimizer.load_state_dict(optimizer_state_dict(saved, live=live))

        return Fallible(self._name, keep, load)


def _is_dtensor_of(tensor: Any, shape: tuple[int, ...]) -> TypeGuard[Tensor]:
    return is_dtensor(tensor) and tuple(tensor.shape) == shape


def _is_flat(state: Any, types: frozenset[type]) -> bool:
    if type(state) is not dict:
        return False
    for name, value in state.items():
        if type(value) not in types or type(name) is not str:
            return False
    return True


def _flat_json(names: _Names, numbers: list[int], parameters: list[Tensor]) -> dict[str, Json]:
    json: dict[str, Json] = {"names": list(names[0]), "params": numbers}
    if not parameters[0].is_cpu:
        json["host"] = [name for name, on_host in zip(*names, strict=True) if on_host]
    return json


def saves_its_own_way(optimizer: Optimizer) -> bool:
    """True if only ``state_dict()`` knows the state: hooks or an override."""
    return bool(
        _has_hooks(optimizer, "_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks")
        or type(optimizer).state_dict is not Optimizer.state_dict
    )


def loads_its_own_way(optimizer: Optimizer) -> bool:
    """True if only ``load_state_dict()`` may set the state."""
    return bool(
        _has_hooks(
            optimizer,
            "_optimizer_load_state_dict_pre_hooks",
            "_optimizer_load_state_dict_post_hooks",
        )
        or type(optimizer).load_state_dict is not Optimizer.load_state_dict
    )


def _has_hooks(optimizer: Optimizer, *names: str) -> bool:
    # Wrappers that do not call Optimizer.__init__ have none of these.
    return any(getattr(optimizer, name, None) for name in names)
