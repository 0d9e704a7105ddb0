"""CUDA through PyTorch, and ROCm, which PyTorch gives the same names."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from checkfreq.snapshot.device import DriverError, Event, Pair, Stream
from checkfreq.snapshot.packing import grouped

_cuda: Any = torch.cuda  # parts of it have no annotations


class CudaDevice:
    """Streams, events, copies and pinning; see Device."""

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

    def register_host(self, address: int, num_bytes: int) -> DriverError | None:
        """See Device."""
        code = _cuda.cudart().cudaHostRegister(address, num_bytes, _HOST_REGISTER_PORTABLE)
        return _driver_error("HostRegister", int(code))

    def unregister_host(self, address: int) -> DriverError | None:
        """See Device."""
        return _driver_error("HostUnregister", int(_cuda.cudart().cudaHostUnregister(address)))


class CudaMemory:
    """See DeviceMemory."""

    def is_in_use(self, device: torch.device) -> bool:
        """See DeviceMemory."""
        return device.index in devices_in_use()

    def properties(self, device: torch.device) -> Any:
        """See DeviceMemory."""
        return torch.cuda.get_device_properties(device)

    def cached_bytes(self, device: torch.device) -> int:
        """See DeviceMemory."""
        return cached_bytes(device)

    def peak_bytes(self, device: torch.device) -> int:
        """See DeviceMemory."""
        return torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)

    def free_bytes(self, device: torch.device) -> int:
        """See DeviceMemory."""
        return CudaDevice().free_bytes(device)


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
#: The codes that calls about host memory return; HIP has the same, but for the second name.
#: https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html
_ERROR_NAMES = {
    1: "InvalidValue",
    2: "OutOfMemory" if torch.version.hip else "MemoryAllocation",
    3: "NotInitialized" if torch.version.hip else "InitializationError",
    304: "OperatingSystem",
    700: "IllegalAddress",
    712: "HostMemoryAlreadyRegistered",
    713: "HostMemoryNotRegistered",
    719: "LaunchFailure",
    800: "NotPermitted",
    801: "NotSupported",
    900: "StreamCaptureUnsupported",
    999: "Unknown",
}


def _driver_error(call: str, code: int) -> DriverError | None:
    if code == 0:
        return None
    prefix = "hip" if torch.version.hip else "cuda"
    name = f"{prefix}Error{_ERROR_NAMES[code]}" if code in _ERROR_NAMES else "unknown code"
    return DriverError(f"{prefix}{call}", code, name)


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
