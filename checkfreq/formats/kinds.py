"""State dicts of others as our objects: of which kind each is, and the JSON that describes it.

What restores a state needs more than its values: the class of an optimizer, the shapes of its
parameters, which weights are tied. That is taken from the live objects (``like``). Without them the
kind is told from the values, and the classes are ``unknown``: `checkfreq.load` returns the state,
and a module or dict can be restored from it, an optimizer or scheduler cannot.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer

from checkfreq.errors import ConfigError
from checkfreq.formats.stand_ins import StandIns, same_bits
from checkfreq.state.adapters.base import type_name
from checkfreq.state.adapters.optimizer_load import parameters_of
from checkfreq.state.adapters.optimizer_tree import parameter_key
from checkfreq.state.adapters.rng import is_rng_state
from checkfreq.state.capture import RNG
from checkfreq.state.checkpoint import CFCheckpoint
from checkfreq.state.collector import StateCollector
from checkfreq.state.names import EXTRA_STATE, ModuleIndex, persistent_tensors
from checkfreq.state.tensors import LAZY
from checkfreq.types import Json

_UNKNOWN = "unknown"
_SCALER = frozenset(
    ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
)


@dataclass(frozen=True, slots=True)
class Ready:
    """An object as one of our checkpoints described it: its JSON, and its tensors by key."""

    json: dict[str, Json]
    tensors: dict[str, Tensor] = field(default_factory=dict)


def kind_of(name: str, value: object) -> str:
    """The kind of an object whose state dict this is, by its form."""
    if name == RNG:
        if not is_rng_state(value):
            raise ConfigError(
                f"{RNG!r} is the name of the random generators, and this entry does not hold their "
                "states: pass names={'another': 'rng'} to give it another one"
            )
        return "rng"
    if not isinstance(value, Mapping):
        return "object"
    if is_optimizer_state(value):
        return "optimizer"
    if value.keys() == _SCALER:
        return "scaler"
    return "module" if is_module_state(value) else "object"


def is_module_state(value: object) -> bool:
    """Whether it is a flat mapping of names to tensors, as ``Module.state_dict()`` returns it."""
    if not isinstance(value, Mapping) or not any(isinstance(v, Tensor) for v in value.values()):
        return False
    return all(
        isinstance(key, str) and (isinstance(one, Tensor) or _is_extra(key))
        for key, one in value.items()
    )


def is_optimizer_state(value: Mapping[Any, Any]) -> bool:
    """Whether it is what ``Optimizer.state_dict()`` returns, by numbers of parameters."""
    if value.keys() - {"parameters"} != {"state", "param_groups"}:
        return False
    state, groups, own = value["state"], value["param_groups"], value.get("parameters", {})
    if not isinstance(state, Mapping) or not isinstance(groups, list):
        return False
    if not isinstance(own, Mapping) or not all(isinstance(p, Tensor) for p in own.values()):
        return False
    if not all(isinstance(group, dict) and "params" in group for group in groups):
        return False
    numbers = [number for group in groups for number in group["params"]]
    return numbers == list(range(len(numbers))) and all(
        type(number) is int and 0 <= number < len(numbers) for number in (*state, *own)
    )


def add_object(
    name: str,
    value: Any,
    collector: StateCollector,
    *,
    like: CFCheckpoint | None,
    stand_ins: StandIns,
) -> dict[str, Json]:
    """Add an object's tensors to ``collector``; returns its JSON, aliases left out."""
    collector.start(name)
    if isinstance(value, Ready):
        for key, tensor in value.tensors.items():
            collector.add(key, tensor, False)
        if aliases := value.json.get("aliases"):
            collector.aliases[name] = dict(aliases)
        return {key: one for key, one in value.json.items() if key != "aliases"}
    live = None if like is None else like.tracked.get(name)
    kind = kind_of(name, value) if like is None or live is None else like.adapters[name].kind
    json: dict[str, Json] = {"kind": kind}
    if kind != "rng":
        json["class"] = _UNKNOWN if live is None else type_name(live)
    if kind == "module":
        return json | _module(name, value, collector, live, stand_ins)
    if kind == "optimizer":
        return json | _optimizer(name, value, collector, live)
    if kind == "scaler":
        json["class"] = (
            type_name(GradScaler("cpu", enabled=False)) if live is None else json["class"]
        )
    tree = collector.encode(value, name)
    return {**json, ("state" if kind in ("scaler", "rng") else "tree"): tree}


def _module(
    name: str, state: Any, collector: StateCollector, live: Any, stand_ins: StandIns
) -> dict[str, Json]:
    if not isinstance(state, Mapping):
        raise ConfigError(
            f"{name}: expected the state dict of a module, found a {type(state).__qualname__}"
        )
    ties = _ties(live) if isinstance(live, nn.Module) else {}
    extra, aliases = {}, {}
    for key, value in state.items():
        if not isinstance(value, Tensor) or _is_extra(key):
            extra[key] = value
        elif _is_copy(value, state.get(ties.get(key)), stand_ins):
            aliases[key] = ties[key]
        else:
            collector.add(key, value, False)
    direct = {*collector.keys}
    trees = {key: collector.encode(value, f"{name}.{key}") for key, value in extra.items()}
    # As HF's files have it: of tied weights only one name is written.
    aliases |= {tied: to for tied, to in ties.items() if tied not in state and to in direct}
    if aliases:
        collector.aliases.setdefault(name, {}).update(aliases)
    if not trees:
        return {}
    return {"extra": trees, "extra_tensors": [key for key in collector.keys if key not in direct]}


def _is_copy(value: Tensor, first: object, stand_ins: StandIns) -> bool:
    """Whether the weight that a tied one is tied to is there too, with the same bytes."""
    if not isinstance(first, Tensor) or first is value or not value.numel():
        return False
    if first.data_ptr() == value.data_ptr():
        return False  # the collector sees it
    return same_bits(stand_ins.real(value), stand_ins.real(first))


def _ties(module: nn.Module) -> dict[str, str]:
    """For each name of tied weights but the first, the first."""
    first: dict[object, str] = {}
    tied: dict[str, str] = {}
    for node in ModuleIndex(module).nodes:
        for key, tensor, _ in persistent_tensors(node):
            place = id(tensor) if isinstance(tensor, LAZY) else tensor.data_ptr() or id(tensor)
            known = first.setdefault((place, *_form(tensor)), key)
            if known != key:
                tied[key] = known
    return tied


def _form(tensor: Tensor) -> tuple[object, ...]:
    return () if isinstance(tensor, LAZY) else (tensor.shape, tensor.stride(), tensor.dtype)


def _optimizer(name: str, state: Any, collector: StateCollector, live: Any) -> dict[str, Json]:
    parameters = parameters_of(live) if isinstance(live, Optimizer) else None
    state = _numbered(state)
    if not isinstance(state, Mapping) or not is_optimizer_state(state):
        return {
            "shapes": [] if parameters is None else [list(p.shape) for p in parameters],
            "device_type": parameters[0].device.type if parameters else "cpu",
            "state_dict": collector.encode(state, name),
        }
    flat: dict[tuple[str, ...], list[int]] = {}
    trees: dict[str, Json] = {}
    for number, items in state["state"].items():
        key = f"state.{number}"
        if isinstance(items, dict) and all(
            type(one) is str and isinstance(value, Tensor) for one, value in items.items()
        ):
            for one, value in items.items():
                collector.add(f"{key}.{one}", value, True)
            flat.setdefault(tuple(items), []).append(number)
        elif type(items) is dict:
            pairs = [(k, v, f"{name}.{key}.{k}") for k, v in items.items()]
            trees[str(number)] = {
                "items": [[collector.encode(k, p), collector.encode(v, p)] for k, v, p in pairs]
            }
        else:
            trees[str(number)] = {"value": collector.encode(items, f"{name}.{key}")}
    groups = [
        {
            "num_params": len(group["params"]),
            "values": collector.encode(
                {k: v for k, v in group.items() if k != "params"}, f"{name}.param_groups[{i}]"
            ),
        }
        for i, group in enumerate(state["param_groups"])
    ]
    own = state.get("parameters", {})
    for number, parameter in own.items():
        collector.add(parameter_key(number), parameter, True)
    count = sum(len(group["params"]) for group in state["param_groups"])
    device = parameters[0].device.type if parameters else "cpu"
    return {
        "shapes": _shapes(state["state"], count)
        if parameters is None
        else [list(parameter.shape) for parameter in parameters],
        "device_type": device,
        "flat": [_flat(names, numbers, device) for names, numbers in flat.items()],
        "trees": trees,
        "other": [],
        "groups": groups,
        **({"parameters": list(own)} if own else {}),
    }


def _flat(names: tuple[str, ...], numbers: list[int], device: str) -> dict[str, Json]:
    json: dict[str, Json] = {"names": list(names), "params": numbers}
    if device != "cpu":  # where torch's optimizers keep it, unless they are capturable or fused
        json["host"] = [one for one in names if one == "step"]
    return json


def _numbered(state: Any) -> Any:
    """A state dict by names of parameters, as ``get_optimizer_state_dict`` has it, by numbers.

    DCP's files have the numbers as text.
    """
    if not isinstance(state, Mapping) or not {*state} <= {"state", "param_groups", "parameters"}:
        return state
    # DCP's files lack what is empty.
    groups, by_name = state.get("param_groups"), state.get("state", {})
    own = state.get("parameters", {})
    if not all(isinstance(one, Mapping) for one in (by_name, own)) or not isinstance(groups, list):
        return state
    if not all(isinstance(group, dict) and "params" in group for group in groups):
        return state
    names = [name for group in groups for name in group["params"]]
    numbers = {str(name): number for number, name in enumerate(names)}
    if len(numbers) != len(names) or not {str(n) for n in (*by_name, *own)} <= numbers.keys():
        return state
    count = iter(range(len(names)))
    return {
        "state": {numbers[str(name)]: value for name, value in by_name.items()},
        "param_groups": [
            {**group, "params": [next(count) for _ in group["params"]]} for group in groups
        ],
        **({"parameters": {numbers[str(name)]: one for name, one in own.items()}} if own else {}),
    }


def _shapes(state: Mapping[int, Any], count: int) -> list[list[int]]:
    """The shapes of parameters as far as their state shows them."""
    found: list[list[int]] = []
    for number in range(count):
        own = state.get(number)
        values = own.values() if isinstance(own, Mapping) else ()
        sizes = (list(value.shape) for value in values if isinstance(value, Tensor))
        found.append(max(sizes, key=len, default=[]))
    return found


def _is_extra(key: str) -> bool:
    return key.rpartition(".")[2] == EXTRA_STATE
