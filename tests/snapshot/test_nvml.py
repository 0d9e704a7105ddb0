"""What NVML tells of a device's free memory: asked once per process, left out where it fails."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from checkfreq.snapshot.nvml import Nvml

UUID = "8932f937-d72c-4106-c12f-20bd9faed9f6"
GPU, MIG, PCI = f"GPU-{UUID}", f"MIG-{UUID}", "00000000:3b:00.0"
DEVICE = SimpleNamespace(uuid=UUID, pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)


class FakeNvmlError(Exception):
    pass


class FakeNvml:
    """The module pynvml of a machine where ``free`` bytes are left on each device."""

    NVMLError = FakeNvmlError

    def __init__(self, free: dict[str, int], *, broken: bool = False) -> None:
        self.free, self.broken, self.num_inits = free, broken, 0

    def nvmlInit(self) -> None:
        self.num_inits += 1
        if self.broken:
            raise FakeNvmlError("driver not loaded")

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:
        assert self.num_inits, "not initialised"
        if name not in self.free:
            raise FakeNvmlError(f"not found: {name}")
        return name

    nvmlDeviceGetHandleByPciBusId = nvmlDeviceGetHandleByUUID

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(free=self.free[handle])


NAMELESS = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)


@pytest.mark.parametrize(
    ("free", "device", "expected"),
    [
        ({GPU: 60, MIG: 10}, DEVICE, 10),
        ({GPU: 0, PCI: 10}, NAMELESS, 10),
        ({"GPU-another": 1, "00000000:af:00.0": 1}, DEVICE, None),
    ],
    ids=["a MIG instance first", "without a UUID", "another device"],
)
def test_a_device_is_found_by_its_uuid_or_pci_address(
    free: dict[str, int], device: Any, expected: int | None
) -> None:
    assert Nvml(lambda: FakeNvml(free)).free_bytes(device) == expected


def test_each_answer_is_read_anew_and_nvml_initialised_once_in_each_process() -> None:
    module = FakeNvml({GPU: 10})
    nvml = Nvml(lambda: module)
    assert nvml.free_bytes(DEVICE) == 10
    module.free[GPU] = 20
    assert nvml.free_bytes(DEVICE) == 20
    child = os.fork()
    if child == 0:
        os._exit(module.num_inits if nvml.free_bytes(DEVICE) == 20 else 0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 2, "the parent's, of which it has a copy, and its"
    assert module.num_inits == 1


def missing() -> Any:
    raise ModuleNotFoundError("No module named 'pynvml'")


def without_memory_info() -> Any:
    return SimpleNamespace(nvmlInit=lambda: None, NVMLError=FakeNvmlError)


@pytest.mark.parametrize(
    "load", [missing, without_memory_info, lambda: FakeNvml({}), lambda: FakeNvml({}, broken=True)]
)
def test_an_nvml_that_fails_is_left_out_and_not_asked_again(load: Any) -> None:
    loads: list[Any] = []
    nvml = Nvml(lambda: (loads.append(1), load())[1])
    assert [nvml.free_bytes(DEVICE) for _ in range(3)] == [None] * 3
    assert len(loads) == 1
