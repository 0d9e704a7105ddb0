"""The boundary to an accelerator: streams, events, copies, pinning, and nothing else.

The engine decides every order; a ``Device`` only carries it out. That keeps the ordering
testable without an accelerator, against a fake that delays and reorders whatever streams and
events leave open. Streams and events are opaque: they go back to the Device that made them.
All methods belong to the training thread unless they say otherwise.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from checkfreq.snapshot.packing import grouped

Stream: TypeAlias = Any
Event: TypeAlias = Any
#: (target, source), of the same shape and dtype.
Pair: TypeAlias = tuple[Tensor, Tensor]
_cuda: Any = torch.cuda  # parts of it have no annotations


class Device(Protocol):
    """All accelerators of one kind in this process, told apart by ``torch.device``."""

    def owner(self, tensor: Tensor) -> torch.device | None:
        """The accelerator that holds ``tensor``; None for host memory."""
        ...

    def current_stream(self, device: torch.device) -> Stream:
        """The stream on which the caller's work for ``device`` runs now."""
        ...

    def side_stream(self, device: torch.device) -> Stream:
        """A new stream that is ordered after nothing, the default stream included."""
        ...

    def record(self, stream: Stream) -> Event:
        """An event that is done when local queued on ``stream`` so far is done."""
        ...

    def wait(self, stream: Stream, event: Event) -> None:
        """What is queued on ``stream`` from now on starts after ``event``; does not block."""
        ...

    def is_done(self, event: Event) -> bool:
        """Whether the event has happened; does not block. Any thread."""
        ...

    def synchronize(self, event: Event) -> None:
        """Block the calling thread, without spinning, until the event happened. Any thread."""
        ...

    def elapsed_s(self, start: Event, end: Event) -> float:
        """Device time between two events that are done. Any thread."""
        ...

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        """Device memory `[num_bytes] uint8`, of the current stream. torch.OutOfMemoryError."""
        ...

    def allocate_host(self, num_bytes: int) -> Tensor:
        """Page-locked host memory `[num_bytes] uint8`; ordinary where that fails."""
        ...

    def copy(self, pairs: Sequence[Pair], *, stream: Stream) -> None:
        """Queue copies in order: device to host, or within a device.

        Does not block, and keeps neither tensor alive.
        """
        ...

    def pack(self, pairs: Sequence[Pair], *, stream: Stream) -> None:
        """``copy`` for many tensors within a device, in few launches."""
        ...

    def keep(self, tensors: Sequence[Tensor], *, stream: Stream) -> None:
        """Even if their storage is freed, do not reuse it before ``stream`` gets to here.

        Holding a reference covers most sources; this one covers ``storage.resize_(0)`` too.
        """
        ...

    def free_bytes(self, device: torch.device) -> int:
        """Device memory that can still be allocated. Any thread."""
        ...

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""
        ...

    def is_in_use(self) -> bool:
        """Whether this process has used an accelerator at all; never initialises one."""
        ...

    def prepare_thread(self) -> None:
        """To be called first in a thread other than the training thread.

        Its calls then neither break a graph capture in the training thread, nor open another
        device than those in use.
        """
        ...

    def register_host(self, address: int, num_bytes: int) -> str | None:
        """Page-lock host memory for all devices; what went wrong, or None. Prepared threads."""
        ...

    def unregister_host(self, address: int) -> None:
        """Undo ``register_host``. Any thread."""
        ...


class CudaDevice:
    """CUDA through PyTorch (ROCm goes by the same names)."""

    def owner(self, tensor: Tensor) -> torch.device | None:
        """See Device."""
        return tensor.device if tensor.is_cuda else None

    def current_stream(self, device: torch.device) -> Stream:
        """See Device."""
        return torch.cuda.current_stream(device)

    def side_stream(self, device: torch.device) -> Stream:
        """See Device."""
        return _cuda.Stream(device)

    def record(self, stream: Stream) -> Event:
        """See Device."""
        event = _cuda.Event(enable_timing=True, blocking=True)
        event.record(stream)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        """See Device."""
        stream.wait_event(event)

    def is_done(self, event: Event) -> bool:
        """See Device."""
        return bool(event.query())

    def synchronize(self, event: Event) -> None:
        """See Device."""
        event.synchronize()

    def elapsed_s(self, start: Event, end: Event) -> float:
        """See Device."""
        return float(start.elapsed_time(end)) / 1e3

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        """See Device."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)

    def allocate_host(self, num_bytes: int) -> Tensor:
        """See Device."""
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError:
            return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")

    def copy(self, pairs: Sequence[Pair], *, stream: Stream) -> None:
        """See Device."""
        with torch.no_grad(), torch.cuda.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)

    def pack(self, pairs: Sequence[Pair], *, stream: Stream) -> None:
        """See Device."""
        groups, others = grouped(pairs)
        with torch.no_grad(), torch.cuda.stream(stream):
            for targets, sources in groups:
                torch._foreach_copy_(targets, sources, non_blocking=True)
            for target, source in others:
                target.copy_(source, non_blocking=True)

    def keep(self, tensors: Sequence[Tensor], *, stream: Stream) -> None:
        """See Device."""
        for tensor in tensors:
            tensor.record_stream(stream)

    def free_bytes(self, device: torch.device) -> int:
        """See Device. What PyTorch's allocator has cached counts as free."""
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + cached_bytes(device)

    def is_capturing(self) -> bool:
        """See Device."""
        return torch.cuda.is_current_stream_capturing()

    def is_in_use(self) -> bool:
        """See Device."""
        return bool(_cuda.is_initialized())

    def prepare_thread(self) -> None:
        """See Device."""
        _relax_capture()
        # A new thread starts on device 0, and some calls would open a context there.
        torch.cuda.set_device(_device_in_use())

    def register_host(self, address: int, num_bytes: int) -> str | None:
        """See Device."""
        runtime = _cuda.cudart()
        code = int(runtime.cudaHostRegister(address, num_bytes, _HOST_REGISTER_PORTABLE))
        if code == 0:
            return None
        return f"cudaHostRegister failed with CUDA error {code}"

    def unregister_host(self, address: int) -> None:
        """See Device."""
        _cuda.cudart().cudaHostUnregister(address)


def cached_bytes(device: torch.device) -> int:
    """Device memory that PyTorch's allocator holds and nothing uses. Any thread."""
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def devices_in_use() -> list[int]:
    """Indices of the devices in which this process has a context; opens none."""
    if not _cuda.is_initialized():
        return []
    has_context: Callable[[int], bool] | None = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    if has_context is None:
        return [torch.cuda.current_device()]
    return [index for index in range(torch.cuda.device_count()) if has_context(index)]


_HOST_REGISTER_PORTABLE = 1
_CAPTURE_RELAXED = 2


def _device_in_use() -> int:
    """A device that has a context already."""
    found = devices_in_use()
    return found[0] if found else torch.cuda.current_device()


def _relax_capture() -> None:
    """Let this thread query events and pin memory while another captures a graph.

    By default a capture forbids that to every thread of the process and breaks when one does
    it. The driver's function is used: PyTorch does not expose it.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        exchange = driver.cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):  # ROCm, or a driver older than graphs
        return
    exchange(ctypes.byref(ctypes.c_int(_CAPTURE_RELAXED)))
