"""NVIDIA's management library, which sees what every process takes of a device.

The package nvidia-ml-py is loaded at the first use. A device is found by its UUID or PCI address,
so that CUDA_VISIBLE_DEVICES and MIG are respected. Nothing here creates a CUDA context. An answer
takes milliseconds where the driver is busy: ask in helper threads only.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


class Nvml:
    """Initialised once per process, a forked one included; not asked again after a failure."""

    def __init__(self, load: Callable[[], Any] = lambda: importlib.import_module("pynvml")) -> None:
        self._load = load
        self._nvml: Any = None
        self._initialised_in: int | None = None
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
            if self._initialised_in != os.getpid():
                nvml.nvmlInit()
                self._initialised_in = os.getpid()
            return int(nvml.nvmlDeviceGetMemoryInfo(_handle(nvml, properties)).free)
        except nvml.NVMLError as error:
            raise LookupError(str(error)) from error


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
