"""Digests of what all ranks have alike, to be compared: each such tensor, and each object's JSON.

Host tensors are digested at once (75 ms a GiB, 2026-11). Of device tensors a sum of their bits is
queued on the current stream, in order before the next weight update, and is known later: nobody
waits. Left out are shards, what is each rank's own, and buffers that DistributedDataParallel
broadcasts before each forward pass, of which it takes the first rank's as a checkpoint does.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from xxhash import xxh3_64_hexdigest

from checkfreq.snapshot.device import CudaDevice, Device, Event
from checkfreq.state.capture import POSITIONS
from checkfreq.state.collector import TensorRef
from checkfreq.state.parts import CapturedState, Everything
from checkfreq.state.tensors import DTYPE_NAMES
from checkfreq.types import Json

#: Elements that are looked at to tell a rounding error from other content.
_SAMPLE = 64
#: Integers with as many bytes as an element.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(slots=True)
class Values:
    """Digests by name, "model.0.weight" or "scheduler"; of device tensors once those are done.

    ``weights`` are the names of what only a weight update changes.
    """

    found: dict[str, str]
    weights: frozenset[str] = frozenset()
    _names: dict[torch.device, list[str]] = field(default_factory=dict)
    _sums: dict[torch.device, tuple[Tensor, Tensor, Event]] = field(default_factory=dict)
    _device: Device = field(default_factory=CudaDevice)

    def queue(self, sums: Mapping[torch.device, Mapping[str, Tensor]], device: Device) -> None:
        """Have sums that devices are working on copied to the host."""
        self._device = device
        for index, named in sums.items():
            stacked = torch.stack([*named.values()])
            host = device.allocate_host(stacked.nbytes).view(torch.int64)
            stream = device.current_stream(index)
            device.copy([(host, stacked)], stream=stream)
            self._names[index] = [*named]
            self._sums[index] = (host, stacked, device.record(stream))

    def are_known(self) -> bool:
        """Whether all of them are; does not wait."""
        if not all(self._device.is_done(event) for _, _, event in self._sums.values()):
            return False
        for index, (host, _, _) in self._sums.items():
            pairs = zip(self._names[index], host.tolist(), strict=True)
            self.found.update((name, f"sum {number}") for name, number in pairs)
        self._sums.clear()
        return True

    def digest(self) -> str | None:
        """Of all of them; None while they are not known."""
        if not self.are_known():
            return None
        return xxh3_64_hexdigest(json.dumps(self.found, sort_keys=True).encode())


def values_of(everything: Everything, modules: Iterable[nn.Module], device: Device) -> Values:
    """What is to be the same on all ranks, as of now."""
    left_out = broadcast_by(_wrappers_in(modules))
    values = Values(dict(_objects(everything)))
    sums: dict[torch.device, dict[str, Tensor]] = {}
    weights = set()
    with torch.no_grad():
        for name, ref in _common(everything):
            if ref.tensor.data_ptr() in left_out:
                continue
            if ref.tensor.is_cpu:
                values.found[name] = _digest(ref.tensor)
            elif (index := device.owner(ref.tensor)) is not None:
                sums.setdefault(index, {})[name] = _bits(ref.tensor).sum(dtype=torch.int64)
            if ref.settled:
                weights.add(name)
        values.weights = frozenset(weights)
        values.queue(sums, device)
    return values


def samples(everything: Everything, names: Iterable[str]) -> dict[str, list[float]]:
    """Some numbers of each tensor called so, evenly spaced. Waits for devices."""
    wanted = {*names}
    return {name: _sample(ref.tensor) for name, ref in _common(everything) if name in wanted}


def broadcast_anywhere(everything: Everything) -> set[str]:
    """Names of buffers that a wrapper broadcasts which is not tracked itself. Looks at all objects
    of the process: not for every step."""
    wrappers = [x for x in gc.get_objects() if issubclass(type(x), DistributedDataParallel)]
    addresses = broadcast_by(wrappers)
    return {name for name, ref in _common(everything) if ref.tensor.data_ptr() in addresses}


def broadcast_by(wrappers: Iterable[DistributedDataParallel]) -> set[int]:
    """Addresses of the buffers that these make equal before each forward pass."""
    return {
        buffer.data_ptr()
        for wrapper in wrappers
        if wrapper.broadcast_buffers
        for buffer in wrapper.buffers()
    } - {0}


def _wrappers_in(modules: Iterable[nn.Module]) -> Iterator[DistributedDataParallel]:
    for module in modules:
        yield from (m for m in module.modules() if isinstance(m, DistributedDataParallel))


def _common(everything: Everything) -> Iterator[tuple[str, TensorRef]]:
    for name, (begin, end) in everything.spans.items():
        if name in everything.own_objects:
            continue
        for index in range(begin, end):
            ref = everything.refs[index]
            if index not in everything.cuts and (name, ref.key) not in everything.own_tensors:
                yield f"{name}.{ref.key}", ref


def _objects(everything: Everything) -> Iterator[tuple[str, str]]:
    """What is no tensor. A step, say, that a rank counts by itself."""
    for name, node in everything.objects.items():
        if name not in everything.own_objects and name != POSITIONS:
            yield name, _digest_of_json(node)


def _digest_of_json(node: Json) -> str:
    return xxh3_64_hexdigest(json.dumps(node, sort_keys=True).encode())


def _digest(tensor: Tensor) -> str:
    return xxh3_64_hexdigest(_bits(tensor).contiguous().flatten().numpy().data)


def _bits(tensor: Tensor) -> Tensor:
    """The same memory as integers."""
    plain = tensor.resolve_conj().resolve_neg()
    real = torch.view_as_real(plain) if plain.is_complex() else plain
    return real.view(_BITS[real.itemsize])


def _sample(tensor: Tensor) -> list[float]:
    flat = tensor.detach().resolve_conj().resolve_neg().flatten()
    flat = torch.view_as_real(flat).flatten() if flat.is_complex() else flat
    step = max(1, flat.numel() // _SAMPLE)
    numbers: list[float] = flat[::step][:_SAMPLE].to(torch.float64).tolist()
    return numbers


# ---- structure


def structure_digest(captured: CapturedState) -> str:
    """Equal on all ranks if, and only if, ``structure_listing`` is; "" on one rank."""
    if captured.whole is None:
        return ""
    return xxh3_64_hexdigest("\n".join(_lines(captured)).encode())


def structure_listing(captured: CapturedState) -> dict[str, str]:
    """What every name stands for, in words: "model.weight" -> "float32[8, 3]"."""
    if captured.whole is None:
        return {}
    return dict(line.split("\t", 1) for line in _lines(captured))


def _lines(captured: CapturedState) -> list[str]:
    """A line "name<tab>text" per object, tensor and tied name, sorted by nothing but order."""
    everything = captured.whole
    assert everything is not None
    lines, refs = [], everything.refs
    own = everything.own_tensors
    for name, (begin, end) in everything.spans.items():
        if name in everything.own_objects:
            continue
        lines.append(f"{name}\t{everything.objects[name].get('class', '')}")
        cuts = everything.cuts
        for index in range(begin, end):
            _, key, tensor, settled = refs[index]
            if own and (name, key) in own:
                lines.append(f"{name}.{key}\tof each rank")
                continue
            cut = cuts.get(index) if cuts else None
            shape = list(tensor.shape) if cut is None else list(cut.shape)
            text = f"{name}.{key}\t{DTYPE_NAMES[tensor.dtype]}{shape}"
            if captured.is_split and not settled:  # who writes it depends on that
                text += " volatile"
            lines.append(text if cut is None else f"{text} {cut.text}")
        lines += [
            f"{name}.{a}\tthe same as {k}" for a, k in everything.aliases.get(name, {}).items()
        ]
    return lines
