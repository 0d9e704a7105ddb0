"""What NVML tells of a device's free memory: asked once per process, left out where it fails."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
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
        self.free = free
        self.broken = broken
        self.num_inits = 0

    def nvmlInit(self) -> None:
        self.num_inits += 1
        if self.broken:
            raise FakeNvmlError("driver not loaded")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return self._handle(uuid)

    def nvmlDeviceGetHandleByPciBusId(self, address: str) -> str:
        return self._handle(address)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(free=self.free[handle])

    def _handle(self, name: str) -> str:
        assert self.num_inits, "not initialised"
        if name not in self.free:
            raise FakeNvmlError(f"not found: {name}")
        return name


def free_bytes(module: FakeNvml, device: Any = DEVICE) -> int | None:
    return Nvml(lambda: module).free_bytes(device)


def test_a_mig_instance_is_asked_rather_than_its_gpu() -> None:
    assert free_bytes(FakeNvml({GPU: 60, MIG: 10})) == 10


def test_a_device_is_found_by_its_pci_address_where_its_uuid_is_unknown() -> None:
    assert free_bytes(FakeNvml({PCI: 10})) == 10


def test_a_device_without_a_uuid_is_found_by_its_pci_address() -> None:
    device = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    assert free_bytes(FakeNvml({GPU: 0, PCI: 10}), device) == 10


def test_a_different_device_of_the_machine_is_not_confused_with_it() -> None:
    assert free_bytes(FakeNvml({"GPU-another": 1, "00000000:af:00.0": 1})) is None


def test_each_answer_is_read_anew_and_nvml_initialised_once() -> None:
    module = FakeNvml({GPU: 10})
    nvml = Nvml(lambda: module)
    assert nvml.free_bytes(DEVICE) == 10
    module.free[GPU] = 20
    assert nvml.free_bytes(DEVICE) == 20
    assert module.num_inits == 1


def test_a_forked_process_initialises_it_again() -> None:
    module = FakeNvml({GPU: 10})
    nvml = Nvml(lambda: module)
    nvml.free_bytes(DEVICE)
    child = os.fork()
    if child == 0:
        os._exit(module.num_inits if nvml.free_bytes(DEVICE) == 10 else 0)
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
def test_an_nvml_that_fails_is_left_out_and_reported_once(
    load: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    num_loads = 0

    def counted() -> Any:
        nonlocal num_loads
        num_loads += 1
        return load()

    nvml = Nvml(counted)
    for _ in range(3):
        assert nvml.free_bytes(DEVICE) is None

    assert num_loads == 1
    assert [record.levelname for record in caplog.records] == ["DEBUG"]


def test_a_missing_nvml_module_is_tolerated() -> None:
    program = "\n".join(
        [
            "import sys",
            "sys.modules['pynvml'] = None",  # an import of it fails from now on
            "from checkfreq.snapshot.nvml import Nvml",
            "print(Nvml().free_bytes(None))",
        ]
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "None\n", "")
