"""The kinds of accelerators whose tensors can be kept: one line registers one.

All other code asks here for the ``Device`` of a tensor, or of the process, and names no kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from checkfreq.errors import StateError
from checkfreq.snapshot.cuda import CudaDevice
from checkfreq.snapshot.device import Device, Stream
from checkfreq.state.tensors import keep_tensors_on, require_kept

#: By type of ``torch.device``, as in ``tensor.device.type``.
BACKENDS: dict[str, Device] = {}


def register(kind: str, device: Device) -> None:
    """Support tensors whose device is of type ``kind``."""
    BACKENDS[kind] = device
    keep_tensors_on(kind, device.devices)


register("cuda", CudaDevice())  # ROCm too: PyTorch gives it the same name


class UpdateStreams:
    """The streams that were current at weight updates, by device.

    A loop may train on a stream of its own and pass its boundaries on another, and nothing but
    these orders a snapshot after the update, or what is queued there next after the snapshot.
    """

    def __init__(self, backends: Mapping[str, Device] = BACKENDS) -> None:
        self._backends = backends
        self._streams: dict[torch.device, list[Stream]] = {}
        self._devices: list[tuple[Device, torch.device]] = []
        self._is_read = False
        self._was_read = False

    def note(self) -> None:
        """An update is about to be queued; not during a graph capture."""
        if self._is_read or not self._was_read:  # later not each time: it asks the driver
            self._devices = [
                (backend, device)
                for backend in self._backends.values()
                if backend.is_in_use()
                for device in backend.devices()
            ]
        if self._is_read:
            self._streams.clear()
            self._is_read = False
        for backend, device in self._devices:
            known, stream = self._streams.setdefault(device, []), backend.current_stream(device)
            if stream not in known:
                known.append(stream)

    def read(self, device: torch.device) -> Sequence[Stream]:
        """The streams of the updates before a snapshot, which begins now.

        The next update starts a new list; without one, the next snapshot reads the same.
        """
        self._is_read = self._was_read = True
        return self._streams.get(device, ())


def backend_of(devices: Iterable[torch.device]) -> Device | None:
    """The backend for state on these devices; None if all of it is in host memory.

    Raises StateError for a device that is not supported, and for devices of several kinds.
    """
    for device in devices:
        require_kept("tracked state", device)
    kinds = sorted({device.type for device in devices} & BACKENDS.keys())
    if len(kinds) > 1:
        raise StateError(
            f"tracked state is on accelerators of several kinds ({', '.join(kinds)}); expected one "
            "kind beside the CPU. Move the tensors to one of them"
        )
    return BACKENDS[kinds[0]] if kinds else None


def owner_of(tensor: Tensor) -> Device | None:
    """The backend whose memory holds a tensor; None for host memory, or one without a backend."""
    return next((one for one in BACKENDS.values() if one.owner(tensor) is not None), None)


def backend_in_use() -> Device | None:
    """The backend of an accelerator that this process has used; None if it has used none."""
    return next((device for device in BACKENDS.values() if device.is_in_use()), None)


def backend_for_slots() -> Device:
    """The backend that slots are pinned for, although state may be moved to a device later."""
    found = backend_in_use()
    if found is None:
        current = torch.accelerator.current_accelerator()
        found = None if current is None else BACKENDS.get(current.type)
    return found or next(iter(BACKENDS.values()))


def is_capturing() -> bool:
    """Whether the current stream of an accelerator is being captured into a graph."""
    for device in BACKENDS.values():  # noqa: SIM110 (asked before every update: a third of any())
        if device.is_in_use() and device.is_capturing():
            return True
    return False
