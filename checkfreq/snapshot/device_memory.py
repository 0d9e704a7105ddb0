"""How much device memory this process may still allocate, according to CUDA and NVML.

NVML (the package nvidia-ml-py, loaded at the first use) finds the device by its UUID or PCI
address, so that CUDA_VISIBLE_DEVICES and MIG are respected; without it CUDA alone is asked. Nothing
here creates a CUDA context.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch

from checkfreq.snapshot.cuda import CudaMemory

logger = logging.getLogger(__name__)


class DeviceMemory(Protocol):
    """Device memory as the device's own runtime sees it."""

    def is_in_use(self, device: torch.device) -> bool:
        """Whether this process has a context there; only then may the other methods be called."""
        ...

    def properties(self, device: torch.device) -> Any:
        """Has ``uuid`` (no prefix) and ``pci_domain_id``, ``pci_bus_id``, ``pci_device_id``."""
        ...

    def cached_bytes(self, device: torch.device) -> int:
        """Cached by PyTorch's allocator and not in use."""
        ...

    def peak_bytes(self, device: torch.device) -> int:
        """How much more memory PyTorch's tensors took at their peak than they take now."""
        ...

    def free_bytes(self, device: torch.device) -> int:
        """What can still be allocated, cached bytes included. Raises RuntimeError."""
        ...


class Nvml:
    """NVIDIA's management library; after a failure it is not asked again."""

    def __init__(self, load: Callable[[], Any] = lambda: importlib.import_module("pynvml")) -> None:
        self._load = load
        self._nvml: Any = None
        self._has_failed = False

    def free_bytes(self, properties: Any) -> int | None:
        """Memory of the device that no process uses; None if NVML cannot tell."""
        if self._has_failed:
            return None
        try:
            if self._nvml is None:
                self._nvml = self._load()
            return self._ask(self._nvml, properties)
        except (ImportError, AttributeError, OSError, LookupError) as error:
            self._has_failed = True
            logger.debug("free device memory is read without NVML: %r", error)
            return None

    def _ask(self, nvml: Any, properties: Any) -> int:
        try:
            nvml.nvmlInit()  # NVML counts its users; another call takes microseconds
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
    """Bytes of ``device`` (with an index) that can still be allocated; None if unknown.

    The smaller of what the runtime and NVML report; what PyTorch's allocator has cached is added.
    """
    memory = CudaMemory() if memory is None else memory
    if not memory.is_in_use(device):
        return None
    candidates = []
    try:
        candidates.append(memory.free_bytes(device))
    except RuntimeError as error:
        logger.debug("cannot read the free memory of %s: %s", device, error)
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
    """Bytes of ``device`` that stay free at the peak of an iteration; None if unknown.

    Asked at a boundary, when activations are freed: the next iteration needs that memory again.
    """
    memory = CudaMemory() if memory is None else memory
    free = free_device_bytes(device, memory=memory, nvml=nvml)
    return None if free is None else free - memory.peak_bytes(device)


def _handle(nvml: Any, properties: Any) -> Any:
    """NVML's handle of the MIG instance or, without MIG, of the GPU."""
    uuid = getattr(properties, "uuid", None)
    for prefix in ("MIG-", "GPU-") if uuid else ():
        try:
            return nvml.nvmlDeviceGetHandleByUUID(f"{prefix}{uuid}")
        except nvml.NVMLError:
            continue
    address = (properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
    return nvml.nvmlDeviceGetHandleByPciBusId("{:08x}:{:02x}:{:02x}.0".format(*address))
