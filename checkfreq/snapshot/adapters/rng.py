"""Random generators: Python's, NumPy's, torch's on the CPU and on devices with tracked state.

Reading draws nothing. NumPy's is kept if NumPy was imported. Setting is a step of its own,
done last: building loader iterators draws from these generators.
"""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from checkfreq.snapshot.adapters.base import Findings, Saved
from checkfreq.snapshot.sink import Sink
from checkfreq.types import Json


def capture_rng(sink: Sink, devices: Iterable[torch.device]) -> dict[str, Json]:
    """Add the generators' states to ``sink`` and return the rest as JSON."""
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
    return {"kind": "rng", "state": sink.encode(state, "rng")}


def _device_module(device: torch.device) -> Any:
    return torch.get_device_module(device)


def prepare_rng(saved: Saved, findings: Findings) -> Callable[[], None]:
    """A function that sets every generator; it owns its data."""
    state = saved.decode(saved.field("state"))
    usable = {}
    for name, value in state.items():
        problem = _problem(name)
        if problem is None:
            usable[name] = value
        else:
            findings.notes.append(f"rng.{name}: not restored, {problem}")
    return lambda: _set_all(usable)


def _problem(name: str) -> str | None:
    if name in ("python", "torch"):
        return None
    if name == "numpy":
        return None if _numpy() is not None else "NumPy cannot be imported"
    device = torch.device(name)
    current = torch.accelerator.current_accelerator()
    if current is None or current.type != device.type:
        return "this process has no such device"
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


def rng_state(saved: Saved) -> Any:
    """The states as data: python, numpy, torch and device names."""
    return saved.decode(saved.field("state"))
