"""CUDA through PyTorch, and ROCm, which PyTorch gives the same names."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from checkfreq.snapshot.device import DriverError, Event, MemoryUse, Pair, Stream
from checkfreq.snapshot.nvml import Nvml
from checkfreq.snapshot.packing import is_plain

_cuda: Any = torch.cuda  # parts of it have no annotations


class CudaDevice:
    """See Device."""

    def __init__(self, *, nvml: Nvml | None = None) -> None:
        self._nvml = nvml or Nvml()
        self._streams = OwnStreams()

    # ---- streams and events

    def owner(self, tensor: Tensor) -> torch.device | None:
        """See Device."""
        return tensor.device if tensor.is_cuda else None

    def current_stream(self, device: torch.device) -> Stream:
        """See Device."""
        return torch.cuda.current_stream(device)

    def side_stream(self, device: torch.device) -> Stream:
        """See Device."""
        return self._streams.take(device)

    def return_stream(self, stream: Stream) -> None:
        """See Device."""
        self._streams.put_back(stream)

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

    # ---- memory and copies

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
                target.copy_(_transferable(target, source), non_blocking=True)

    def pack(self, targets: list[Tensor], sources: list[Tensor], *, stream: Stream) -> None:
        """See Device."""
        with torch.no_grad(), torch.cuda.stream(stream):
            torch._foreach_copy_(targets, sources, non_blocking=True)

    def keep(self, tensors: Sequence[Tensor], *, stream: Stream) -> None:
        """See Device."""
        for tensor in tensors:
            tensor.record_stream(stream)

    def free_bytes(self, device: torch.device) -> int | None:
        """See Device. The smaller of what the runtime and NVML report."""
        if device not in self.devices():
            return None
        free, _ = torch.cuda.mem_get_info(device)
        unheld = self._nvml.free_bytes(torch.cuda.get_device_properties(device))
        return int(free) if unheld is None else min(int(free), unheld)

    def memory_use(self, device: torch.device) -> MemoryUse:
        """See Device."""
        found = torch.cuda.memory_stats(device)
        return MemoryUse(
            reserved_bytes=found.get("reserved_bytes.all.current", 0),
            peak_bytes=found.get("reserved_bytes.all.peak", 0),
            limit_bytes=_limit_bytes(device),
            num_shortages=found.get("num_alloc_retries", 0) + found.get("num_ooms", 0),
        )

    def segment_bytes(self, num_bytes: int) -> int:
        """See Device."""
        if num_bytes <= _SMALL_BYTES:
            return _SMALL_SEGMENT_BYTES
        if num_bytes < _LARGE_BYTES:
            return _MIDDLE_SEGMENT_BYTES
        return -(-num_bytes // _SMALL_SEGMENT_BYTES) * _SMALL_SEGMENT_BYTES

    # ---- the process

    def is_capturing(self) -> bool:
        """See Device."""
        return torch.cuda.is_current_stream_capturing()

    def is_in_use(self) -> bool:
        """See Device."""
        return bool(_cuda.is_initialized())

    def devices(self) -> list[torch.device]:
        """See Device. Those on which it has a context."""
        if not _cuda.is_initialized():
            return []
        has_context: Callable[[int], bool] | None = getattr(
            torch._C, "_cuda_hasPrimaryContext", None
        )
        if has_context is None:
            return [torch.device("cuda", torch.cuda.current_device())]
        every = range(torch.cuda.device_count())
        return [torch.device("cuda", index) for index in every if has_context(index)]

    def names(self) -> list[str]:
        """See Device."""
        return [torch.cuda.get_device_name(device) for device in self.devices()]

    def runtime_version(self) -> str | None:
        """See Device."""
        return torch.version.cuda or torch.version.hip

    def prepare_thread(self) -> None:
        """See Device."""
        _relax_capture()
        # A new thread starts on device 0, and some calls would create a context there.
        used = self.devices()
        torch.cuda.set_device(used[0] if used else torch.cuda.current_device())

    def register_host(self, address: int, num_bytes: int) -> DriverError | None:
        """See Device."""
        code = _cuda.cudart().cudaHostRegister(address, num_bytes, _HOST_REGISTER_PORTABLE)
        return _driver_error("HostRegister", int(code))

    def unregister_host(self, address: int) -> DriverError | None:
        """See Device."""
        return _driver_error("HostUnregister", int(_cuda.cudart().cudaHostUnregister(address)))


class OwnStreams:
    """Streams that nobody else has, made by the runtime and not by PyTorch.

    PyTorch hands the 32 streams of its pool out in turn, so one of them may be the user's as well,
    and a copy and a kernel of training would wait for each other. A stream is never destroyed: the
    allocator remembers it for each tensor that was kept for it, and records an event there when the
    tensor is freed, which may be at the end of the process. Managers made later use it again.
    """

    def __init__(self, *, make: Callable[[torch.device], Stream] | None = None) -> None:
        self._make = make or _new_stream
        self._idle: list[Stream] = []

    def take(self, device: torch.device) -> Stream:
        """A stream of ``device``, independent of the default stream."""
        for number, stream in enumerate(self._idle):
            if stream.device == device:
                return self._idle.pop(number)
        return self._make(device)

    def put_back(self, stream: Stream) -> None:
        """The caller has no more work for ``stream``."""
        self._idle.append(stream)


def _new_stream(device: torch.device) -> Stream:
    with torch.cuda.device(device):
        handle = _new_handle()
    if handle is None:
        return _other_than_current(device)
    return _cuda.ExternalStream(handle, device=device)


def _new_handle() -> int | None:
    """The handle of a new non-blocking stream of the current device; None if that fails."""
    create = _runtime_call("StreamCreateWithFlags")
    handle = ctypes.c_void_p()
    if create is None:
        return None
    if create(ctypes.byref(handle), ctypes.c_uint(_NON_BLOCKING)) != 0:
        _runtime_call("GetLastError")()  # or the next kernel launch would raise it
        return None
    return handle.value


def _runtime_call(name: str) -> Any:
    """A function of the runtime that PyTorch has loaded; None if it is not found."""
    for library, prefix in _RUNTIMES:
        try:
            # NOLOAD: a second runtime in the process would know nothing of PyTorch's.
            loaded = ctypes.CDLL(library, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
            return getattr(loaded, f"{prefix}{name}")
        except (OSError, AttributeError):
            continue
    return None


def _other_than_current(device: torch.device) -> Stream:
    """A stream of PyTorch's pool that is not the current one."""
    current = torch.cuda.current_stream(device)
    streams = (_cuda.Stream(device) for _ in range(_POOL_SIZE + 1))
    return next(stream for stream in streams if stream != current)


def _transferable(target: Tensor, source: Tensor) -> Tensor:
    """``source``, row-major on its device if it goes to the host.

    PyTorch conjugates and negates on the host at once, before an asynchronous copy is there.
    """
    if not target.is_cpu or is_plain(source):
        return source
    return source.resolve_conj().resolve_neg().contiguous()


def _limit_bytes(device: torch.device) -> int:
    """What ``set_per_process_memory_fraction`` leaves of the device."""
    total = int(torch.cuda.get_device_properties(device).total_memory)
    fraction = getattr(torch.cuda, "get_per_process_memory_fraction", None)
    return total if fraction is None else int(total * fraction(device))


_HOST_REGISTER_PORTABLE = 1
_CAPTURE_RELAXED = 2
_NON_BLOCKING = 1
_POOL_SIZE = 32

#: The runtimes that PyTorch's builds link, and what the names of their functions begin with.
_RUNTIMES = (
    *((f"libcudart.so.{version}", "cuda") for version in ("13", "12", "11.0")),
    *((f"libamdhip64.so{version}", "hip") for version in ("", ".7", ".6", ".5")),
)

#: PyTorch's allocator serves small tensors from segments of 2 MiB and middling ones from segments
#: of 20 MiB; a larger one gets a segment of its own, in steps of 2 MiB.
_SMALL_BYTES = 1 << 20
_SMALL_SEGMENT_BYTES = 2 << 20
_LARGE_BYTES = 10 << 20
_MIDDLE_SEGMENT_BYTES = 20 << 20
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
