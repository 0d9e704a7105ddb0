"""Digests of state that must be the same on all ranks: its structure and its values.

Host tensors are digested at once (75 ms per GiB, 2026-11). For device tensors a sum of their bits
is queued on the current stream, which runs it before the next weight update; the host reads it
later, so that nothing waits. Shards and state that differs from rank to rank are left out, and so
are buffers that DistributedDataParallel broadcasts before each forward pass: it takes the first
rank's, as a checkpoint does. Ranks compare digests first, and details only where digests differ.
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

from checkfreq.snapshot.device import Device, Event
from checkfreq.state.capture import POSITIONS
from checkfreq.state.collector import CapturedState, LocalState, TensorRef
from checkfreq.state.tensors import DTYPE_NAMES, is_kept_on
from checkfreq.types import Json

#: Elements of a tensor that are compared to tell a rounding error from different content.
_SAMPLE = 64
#: By bytes of an element, the integer of that size.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(slots=True)
class ValueDigests:
    """Digests by name, such as "model.0.weight" or "scheduler".

    Those of device tensors are added once the devices are done. ``weights`` are the names of
    tensors that only a weight update changes.
    """

    found: dict[str, str]
    weights: frozenset[str] = frozenset()
    _names: dict[torch.device, list[str]] = field(default_factory=dict)
    _sums: dict[torch.device, tuple[Tensor, Tensor, Event]] = field(default_factory=dict)
    _device: Device | None = None

    def fetch_later(
        self, sums: Mapping[torch.device, Mapping[str, Tensor]], device: Device
    ) -> None:
        """Queue copies to the host of sums that devices are still computing."""
        self._device = device
        for index, named in sums.items():
            stacked = torch.stack([*named.values()])
            host = device.allocate_host(stacked.nbytes).view(torch.int64)
            stream = device.current_stream(index)
            device.copy([(host, stacked)], stream=stream)
            self._names[index] = [*named]
            self._sums[index] = (host, stacked, device.record(stream))

    def are_known(self) -> bool:
        """Whether all digests are known by now; does not wait."""
        for _, _, event in self._sums.values():
            assert self._device is not None
            if not self._device.is_done(event):
                return False
        for index, (host, _, _) in self._sums.items():
            pairs = zip(self._names[index], host.tolist(), strict=True)
            self.found.update((name, f"sum {number}") for name, number in pairs)
        self._sums.clear()
        return True

    def digest(self) -> str | None:
        """One digest of all digests; None while some are unknown."""
        if not self.are_known():
            return None
        return xxh3_64_hexdigest(json.dumps(self.found, sort_keys=True).encode())


def digest_values(
    local: LocalState, modules: Iterable[nn.Module], device: Device | None
) -> ValueDigests:
    """Digest the values that must be the same on all ranks, as they are now.

    ``device`` is the backend of all tensors that are not in host memory.
    """
    left_out = broadcast_by(_wrappers_in(modules))
    values = ValueDigests(dict(_objects(local)))
    sums: dict[torch.device, dict[str, Tensor]] = {}
    weights = set()
    with torch.no_grad():
        for name, ref in _common(local):
            if ref.tensor.data_ptr() in left_out:
                continue
            if ref.tensor.is_cpu:
                values.found[name] = _digest(ref.tensor)
            else:
                # An integer sum is the same in any order of additions; devices differ in theirs.
                sums.setdefault(ref.tensor.device, {})[name] = _bits(ref.tensor).sum(
                    dtype=torch.int64
                )
            if ref.settled:
                weights.add(name)
        values.weights = frozenset(weights)
        if device is not None:
            values.fetch_later(sums, device)
    return values


def samples(local: LocalState, names: Iterable[str]) -> dict[str, list[float]]:
    """A few elements, evenly spaced, of each of the tensors in ``names``. Waits for devices."""
    wanted = {*names}
    return {name: _sample(ref.tensor) for name, ref in _common(local) if name in wanted}


def broadcast_anywhere(local: LocalState) -> set[str]:
    """Names of buffers that some DistributedDataParallel broadcasts, tracked or not.

    Searches all objects of the process, so it is not for every step.
    """
    wrappers = [x for x in gc.get_objects() if issubclass(type(x), DistributedDataParallel)]
    addresses = broadcast_by(wrappers)
    return {name for name, ref in _common(local) if ref.tensor.data_ptr() in addresses}


def broadcast_by(wrappers: Iterable[DistributedDataParallel]) -> set[int]:
    """Addresses of the buffers that ``wrappers`` broadcast before each forward pass."""
    return {
        buffer.data_ptr()
        for wrapper in wrappers
        if wrapper.broadcast_buffers
        for buffer in wrapper.buffers()
        if is_kept_on(buffer.device)
    } - {0}


def _wrappers_in(modules: Iterable[nn.Module]) -> Iterator[DistributedDataParallel]:
    for module in modules:
        yield from (m for m in module.modules() if isinstance(m, DistributedDataParallel))


def _common(local: LocalState) -> Iterator[tuple[str, TensorRef]]:
    for name, (begin, end) in local.spans.items():
        if name in local.per_rank_objects:
            continue
        for index in range(begin, end):
            ref = local.refs[index]
            if index not in local.shards and (name, ref.key) not in local.per_rank_tensors:
                yield f"{name}.{ref.key}", ref


def _objects(local: LocalState) -> Iterator[tuple[str, str]]:
    """(name, digest) of each object's JSON, such as a step that each rank counts by itself."""
    for name, node in local.objects.items():
        if name not in local.per_rank_objects and name != POSITIONS:
            # Ranks of nodes without a common home have different keys.
            yield name, _digest_of_json({k: v for k, v in node.items() if k != "extra_codes"})


def _digest_of_json(node: Json) -> str:
    return xxh3_64_hexdigest(json.dumps(node, sort_keys=True).encode())


def _digest(tensor: Tensor) -> str:
    return xxh3_64_hexdigest(_bits(tensor).contiguous().flatten().numpy().data)


def _bits(tensor: Tensor) -> Tensor:
    """The same memory viewed as integers."""
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
    """Equal on all ranks exactly if ``structure_listing`` is; "" on one rank."""
    if captured.local is None:
        return ""
    return xxh3_64_hexdigest("\n".join(_lines(captured)).encode())


def structure_listing(captured: CapturedState) -> dict[str, str]:
    """What each name stands for, in words: "model.weight" -> "float32[8, 3]"."""
    if captured.local is None:
        return {}
    return dict(line.split("\t", 1) for line in _lines(captured))


def _lines(captured: CapturedState) -> list[str]:
    """A line "name<tab>text" per object, tensor and tied name, in the order of the state."""
    local = captured.local
    assert local is not None
    lines, refs = [], local.refs
    per_rank = local.per_rank_tensors
    for name, (begin, end) in local.spans.items():
        if name in local.per_rank_objects:
            continue
        lines.append(f"{name}\t{local.objects[name].get('class', '')}")
        shards = local.shards
        for index in range(begin, end):
            _, key, tensor, settled = refs[index]
            if per_rank and (name, key) in per_rank:
                lines.append(f"{name}.{key}\tof each rank")
                continue
            shard = shards.get(index) if shards else None
            shape = list(tensor.shape) if shard is None else list(shard.shape)
            text = f"{name}.{key}\t{DTYPE_NAMES[tensor.dtype]}{shape}"
            if captured.is_split and not settled:  # which rank writes it depends on that
                text += " volatile"
            lines.append(text if shard is None else f"{text} {shard.text}")
        lines += [f"{name}.{a}\tthe same as {k}" for a, k in local.aliases.get(name, {}).items()]
    return lines
