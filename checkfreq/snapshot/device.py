"""The interface to an accelerator: streams, events, copies and pinning, nothing else.

The engine decides on every order and a ``Device`` only carries it out, so the order can be tested
without an accelerator, against a fake that delays and reorders whatever streams and events allow.
Streams and events are opaque and are passed only to the Device that made them. All methods belong
to the training thread unless they say otherwise.
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
        """The stream that the calling thread queues its work for ``device`` on now."""
        ...

    def side_stream(self, device: torch.device) -> Stream:
        """A new stream that waits for no other, not even for the default stream."""
        ...

    def record(self, stream: Stream) -> Event:
        """An event that happens when all work queued on ``stream`` so far is done."""
        ...

    def wait(self, stream: Stream, event: Event) -> None:
        """Have work queued on ``stream`` from now on start after ``event``; does not block."""
        ...

    def is_done(self, event: Event) -> bool:
        """Whether the event has happened; does not block. Any thread."""
        ...

    def synchronize(self, event: Event) -> None:
        """Block the calling thread, without spinning, until the event has happened. Any thread."""
        ...

    def elapsed_s(self, start: Event, end: Event) -> float:
        """Device time between two events that have happened. Any thread."""
        ...

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        """Memory `[num_bytes] uint8` of the current stream; raises torch.OutOfMemoryError."""
        ...

    def allocate_host(self, num_bytes: int) -> Tensor:
        """Page-locked host memory `[num_bytes] uint8`; pageable where locking fails."""
        ...

    def copy(self, pairs: Sequence[Pair], *, stream: Stream) -> None:
        """Queue copies, in order, from the device to the host or within a device.

        Does not block and keeps no tensor alive.
        """
        ...

    def pack(self, pairs: Sequence[Pair], *, stream: Stream) -> None:
        """``copy`` for many tensors within a device, in few kernel launches."""
        ...

    def keep(self, tensors: Sequence[Tensor], *, stream: Stream) -> None:
        """Keep freed storage of ``tensors`` from being reused before ``stream`` gets here.

        A reference protects most sources; this also covers ``storage.resize_(0)``.
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
        """Must be the first call in any thread but the training thread.

        Calls from the thread then neither break a graph capture in the training thread nor
        initialise a device that is not in use.
        """
        ...

    def register_host(self, address: int, num_bytes: int) -> str | None:
        """Page-lock host memory for all devices; returns what went wrong, or None.

        Only in threads that called ``prepare_thread``.
        """
        ...

    def unregister_host(self, address: int) -> None:
        """Undo ``register_host``. Any thread."""
        ...


class CudaDevice:
    """CUDA through PyTorch (ROCm uses the same names)."""

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
        # blocking: synchronize() would otherwise spin and take a core from training.
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
        # A new thread starts on device 0, and some calls would create a context there.
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
    """Device memory that PyTorch's allocator has cached and no tensor uses. Any thread."""
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def devices_in_use() -> list[int]:
    """Indices of the devices on which this process has a context; creates none."""
    if not _cuda.is_initialized():
        return []
    has_context: Callable[[int], bool] | None = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    if has_context is None:
        return [torch.cuda.current_device()]
    return [index for index in range(torch.cuda.device_count()) if has_context(index)]


_HOST_REGISTER_PORTABLE = 1
_CAPTURE_RELAXED = 2


def _device_in_use() -> int:
    """A device that already has a context."""
    found = devices_in_use()
    return found[0] if found else torch.cuda.current_device()


def _relax_capture() -> None:
    """Let this thread query events and pin memory while another thread captures a graph.

    By default a capture forbids both in every thread of the process, and fails when one of them
    does it anyway. PyTorch does not expose the setting, hence the call into the driver.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        exchange = driver.cuThreadExchangeStreamCaptureMode
    except (OSError, AttributeError):  # ROCm, or a driver older than graphs
        return
    exchange(ctypes.byref(ctypes.c_int(_CAPTURE_RELAXED)))
