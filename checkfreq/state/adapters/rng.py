"""Random generators of Python, NumPy and torch, on the CPU and on the devices that are used.

Reading draws no number. NumPy's generator is kept if NumPy has been imported. Generators are set
last in a restore, since building the iterators of loaders draws from them.
"""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from checkfreq.state.adapters.base import Findings
from checkfreq.state.collector import StateCollector
from checkfreq.state.saved import SavedObject
from checkfreq.state.tensors import devices_in_use, is_device
from checkfreq.types import Json

_ON_HOST = ("python", "torch", "numpy")


def capture_rng(collector: StateCollector, devices: Iterable[torch.device]) -> dict[str, Json]:
    """Add the generators' states to ``collector`` and return the rest as JSON."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": {
            "version": version,
            "words": torch.frombuffer(array("I", words), dtype=torch.uint32),
            "gauss": gauss,
        },
        "torch": torch.get_rng_state(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state(legacy=False)
    for device in sorted(devices, key=str):
        state[str(device)] = _device_module(device).get_rng_state(device)
    return {"kind": "rng", "state": collector.encode(state, "rng")}


def _device_module(device: torch.device) -> Any:
    return torch.get_device_module(device)


def prepare_rng(saved: SavedObject, findings: Findings) -> Callable[[], None]:
    """A function that sets every generator, from data of its own; it does not fail.

    Each state is first tried on a new generator. Raises CorruptCheckpointError for one that cannot
    be set; a state of a different kind of generator than the live one is a finding.
    """
    saved.own_tree(saved.field("state"))
    state = saved.decode(saved.field("state"))
    usable = {}
    for name, value in _on_devices_here(state, findings).items():
        problem = _problem(name)
        if problem is not None:
            findings.notes.append(f"rng.{name}: not restored, {problem}")
        elif _fits(name, value, saved, findings):
            usable[name] = value
    return lambda: _set_all(usable)


def _on_devices_here(state: dict[str, Any], findings: Findings) -> dict[str, Any]:
    """``state`` by the names of this process's generators.

    A rank may run on another device than it did. Where it uses as many devices as it did, each
    takes the place of the one that had its rank in order; otherwise they go by their names.
    """
    # As text: a checkpoint may name a kind of device that this torch does not know.
    saved = sorted((name for name in state if name not in _ON_HOST), key=_kind_and_index)
    live = sorted(map(str, devices_in_use()), key=_kind_and_index)
    if [_kind_and_index(name)[0] for name in saved] == [_kind_and_index(name)[0] for name in live]:
        names = dict(zip(saved, live, strict=True))
        return {names.get(name, name): value for name, value in state.items()}
    if saved:
        findings.notes += [
            f"rng.{name}: not restored, the checkpoint has the states of {', '.join(saved)}"
            for name in live
            if name not in saved
        ]
    return state


def _kind_and_index(name: str) -> tuple[str, int]:
    kind, _, index = name.partition(":")
    return kind, int(index or 0)


def require_rng_fields(saved: SavedObject) -> None:
    """Raise ValueError unless the fields are those of generators."""
    state = saved.decode(saved.field("state"))
    _require_generators(state)


def is_rng_state(state: object) -> bool:
    """Whether it has the form of what ``rng_state`` returns."""
    try:
        _require_generators(state)
    except ValueError:
        return False
    return True


def _require_generators(state: Any) -> None:
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise ValueError("expected the states of random generators by name")
    for name, value in state.items():
        if name == "python":
            if not isinstance(value, dict):
                raise ValueError("expected the state of Python's generator")
            if value.keys() != {"version", "words", "gauss"}:
                raise ValueError(f"expected version, words and gauss, got {list(value)!r:.80}")
        elif name == "numpy":
            if not isinstance(value, dict) or type(value.get("bit_generator")) is not str:
                raise ValueError("expected the state of a bit generator of NumPy")
        elif name not in _ON_HOST and not is_device(name):
            raise ValueError(f"expected the name of a generator, got {name!r:.80}")


def _fits(name: str, value: Any, saved: SavedObject, findings: Findings) -> bool:
    """Whether a state can be set, which is tried on a new generator."""
    if name == "numpy" and (live := _numpy_kind()) != value["bit_generator"]:
        findings.different.append(
            f"rng.numpy: checkpoint is of a {value['bit_generator']}, live is a {live}"
        )
        return False
    try:
        _TRIALS.get(name, partial(_try_torch, name))(value)
    except Exception as error:  # generators raise many types for bytes that are no state
        text = f"{type(error).__name__}: {error!s:.200}"
        raise saved.corrupt(f"state of the generator {name}", "one that can be set", text) from None
    return True


def _try_python(value: Any) -> None:
    words, gauss = value["words"], value["gauss"]
    if gauss is not None and type(gauss) is not float:
        raise TypeError(f"gauss is a {type(gauss).__name__}")
    random.Random(0).setstate((value["version"], tuple(words.tolist()), gauss))


def _try_numpy(value: Any) -> None:
    """Check the fields too: ``set_state`` hardly does, and reads memory at whatever ``pos`` is."""
    random_of = _numpy().random
    live = random_of.mtrand._rand._bit_generator
    fresh = random_of.RandomState(type(live)(0))
    _require_like(random_of.get_state(legacy=False), value)
    inner = value["state"]
    if "pos" in inner and not 0 <= inner["pos"] <= inner["key"].size:
        raise ValueError(f"pos is {inner['pos']}")
    fresh.set_state(value)


def _require_like(live: Any, saved: Any) -> None:
    """Raise ValueError unless both have the same fields, with the same types and shapes."""
    if type(live) is not type(saved):
        raise ValueError(f"expected a {type(live).__name__}, got a {type(saved).__name__}")
    if isinstance(live, dict):
        if live.keys() != saved.keys():
            raise ValueError(f"expected {list(live)}, got {list(saved)!r:.80}")
        for name in live:
            _require_like(live[name], saved[name])
    elif hasattr(live, "dtype") and (live.dtype, live.shape) != (saved.dtype, saved.shape):
        raise ValueError(f"expected {live.dtype}{live.shape}, got {saved.dtype}{saved.shape}")
    elif isinstance(live, int) and saved < 0:
        raise ValueError(f"expected a count, got {saved}")


def _try_torch(name: str, value: Any) -> None:
    device = torch.device("cpu" if name == "torch" else name)
    torch.Generator(device=device).set_state(value)


_TRIALS: dict[str, Callable[[Any], None]] = {"python": _try_python, "numpy": _try_numpy}


def _numpy_kind() -> str:
    kind: str = _numpy().random.get_state(legacy=False)["bit_generator"]
    return kind


def _problem(name: str) -> str | None:
    if name in ("python", "torch"):
        return None
    if name == "numpy":
        return None if _numpy() is not None else "NumPy cannot be imported"
    current = torch.accelerator.current_accelerator()
    if current is None or current.type != name.partition(":")[0]:
        return "this process has no such device"
    device = torch.device(name)
    count = torch.accelerator.device_count()
    return None if (device.index or 0) < count else f"this process has {count} devices"


def _numpy() -> Any:
    try:
        import numpy
    except ImportError:
        return None
    return numpy


def _set_all(state: dict[str, Any]) -> None:
    for name, value in state.items():
        if name == "python":
            random.setstate((value["version"], tuple(value["words"].tolist()), value["gauss"]))
        elif name == "numpy":
            _numpy().random.set_state(value)
        elif name == "torch":
            torch.set_rng_state(value)
        else:
            _set_device(torch.device(name), value)


def _set_device(device: torch.device, state: Tensor) -> None:
    _device_module(device).set_rng_state(state, device)


def rng_state(saved: SavedObject) -> Any:
    """The states as data: python, numpy, torch and device names."""
    return saved.decode(saved.field("state"))
