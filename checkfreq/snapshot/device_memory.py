"""How much device memory this process may still allocate: what CUDA and NVML leave of it.

NVML (the package nvidia-ml-py, loaded when first asked) finds the device by its UUID or PCI
address, so that CUDA_VISIBLE_DEVICES and MIG are respected; without it CUDA alone tells.
Nothing here opens a CUDA context.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch

from checkfreq.snapshot.device import CudaDevice, cached_bytes, devices_in_use

logger = logging.getLogger(__name__)


class DeviceMemory(Protocol):
    """What the device's own runtime knows."""

    def is_in_use(self, device: torch.device) -> bool:
        """Whether this process has a context there; the rest may be asked only then."""
        ...

    def properties(self, device: torch.device) -> Any:
        """Has ``uuid`` (no prefix) and ``pci_domain_id``, ``pci_bus_id``, ``pci_device_id``."""
        ...

    def cached_bytes(self, device: torch.device) -> int:
        """Held by PyTorch's allocator, unused."""
        ...

    def peak_bytes(self, device: torch.device) -> int:
        """By how much PyTorch's tensors exceeded what they take now, at most, so far."""
        ...

    def free_bytes(self, device: torch.device) -> int:
        """Can still be allocated, the cached bytes included. Raises RuntimeError."""
        ...


class CudaMemory:
    """CUDA through PyTorch."""

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


class Nvml:
    """NVIDIA's management library; once it fails it is not asked again."""

    def __init__(self, load: Callable[[], Any] = lambda: importlib.import_module("pynvml")) -> None:
        self._load = load
        self._nvml: Any = None
        self._has_failed = False

    def free_bytes(self, properties: Any) -> int | None:
        """Memory of that device that no process holds; None if NVML cannot tell."""
        if self._has_failed:
            return None
        try:
            if self._nvml is None:
                self._nvml = self._load()
            return self._ask(self._nvml, properties)
        except (ImportError, AttributeError, OSError, LookupError) as error:
            self._has_failed = True
            logger.debug("free device memory is not asked of NVML: %r", error)
            return None

    def _ask(self, nvml: Any, properties: Any) -> int:
        try:
            nvml.nvmlInit()  # counted by NVML; a second one costs microseconds
            return int(nvml.nvmlDeviceGetMemoryInfo(_handle(nvml, properties)).free)
        except nvml.NVMLError as error:
            raise LookupError(str(error)) from error


_NVML = Nvml()


def free_device_bytes(
    device: torch.device,
    *,
    memory: DeviceMemory | None = None,
    nvml: Nvml = _NVML,
) -> int | None:
    """Bytes of ``device`` (one with an index) that can still be allocated; None if unknown.

    The smaller of what the runtime and NVML say, and what PyTorch's allocator has cached.
    """
    memory = CudaMemory() if memory is None else memory
    if not memory.is_in_use(device):
        return None
    candidates = []
    try:
        candidates.append(memory.free_bytes(device))
    except RuntimeError as error:
        logger.debug("%s does not tell its free memory: %s", device, error)
    unheld = nvml.free_bytes(memory.properties(device))
    if unheld is not None:
        candidates.append(unheld + memory.cached_bytes(device))
    return min(candidates, default=None)


def room_for_snapshot(
    device: torch.device,
    *,
    memory: DeviceMemory | None = None,
    nvml: Nvml = _NVML,
) -> int | None:
    """Bytes of ``device`` that are free even while an iteration is at its peak; None if unknown.

    Asked at a boundary, when activations are freed: the next iteration wants them back.
    """
    memory = CudaMemory() if memory is None else memory
    free = free_device_bytes(device, memory=memory, nvml=nvml)
    return None if free is None else free - memory.peak_bytes(device)


def _handle(nvml: Any, properties: Any) -> Any:
    """NVML's handle; a MIG instance before the GPU that it is a part of."""
    uuid = getattr(properties, "uuid", None)
    for prefix in ("MIG-", "GPU-") if uuid else ():
        try:
            return nvml.nvmlDeviceGetHandleByUUID(f"{prefix}{uuid}")
        except nvml.NVMLError:
            continue
    address = (properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
    return nvml.nvmlDeviceGetHandleByPciBusId("{:08x}:{:02x}:{:02x}.0".format(*address))
