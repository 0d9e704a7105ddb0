"""Free device memory: the smaller of two answers, or None if neither is known."""

from __future__ import annotations

import logging
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from checkfreq.snapshot.cuda import CudaMemory
from checkfreq.snapshot.device_memory import Nvml, free_device_bytes, room_for_snapshot

CUDA = torch.device("cuda", 1)
UUID = "8932f937-d72c-4106-c12f-20bd9faed9f6"
GPU, MIG, PCI = f"GPU-{UUID}", f"MIG-{UUID}", "00000000:3b:00.0"


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
        if name not in self.free:
            raise FakeNvmlError(f"not found: {name}")
        return name


class FakeMemory:
    """A runtime with 100 bytes free, 30 of them cached by the allocator."""

    in_use = True
    problem: str | None = None
    identity = SimpleNamespace(uuid=UUID, pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)

    def is_in_use(self, device: torch.device) -> bool:
        return self.in_use

    def properties(self, device: torch.device) -> Any:
        assert self.in_use, "would initialise CUDA"
        return self.identity

    def cached_bytes(self, device: torch.device) -> int:
        assert self.in_use, "would initialise CUDA"
        return 30

    def peak_bytes(self, device: torch.device) -> int:
        assert self.in_use, "would initialise CUDA"
        return 45

    def free_bytes(self, device: torch.device) -> int:
        assert self.in_use, "would initialise CUDA"
        if self.problem is not None:
            raise RuntimeError(self.problem)
        return 100


def free_bytes(nvml: FakeNvml, memory: FakeMemory | None = None) -> int | None:
    return free_device_bytes(CUDA, memory=memory or FakeMemory(), nvml=Nvml(lambda: nvml))


@pytest.mark.parametrize(("unheld", "expected"), [(20, 50), (70, 100), (500, 100), (0, 30)])
def test_the_smaller_answer_counts_with_what_the_allocator_has_cached(
    unheld: int, expected: int
) -> None:
    assert free_bytes(FakeNvml({GPU: unheld})) == expected


def test_a_mig_instance_is_asked_rather_than_its_gpu() -> None:
    assert free_bytes(FakeNvml({GPU: 60, MIG: 10})) == 40


def test_a_device_is_found_by_its_pci_address_where_its_uuid_is_unknown() -> None:
    assert free_bytes(FakeNvml({PCI: 10})) == 40


def test_a_device_without_a_uuid_is_found_by_its_pci_address() -> None:
    memory = FakeMemory()
    memory.identity = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=0)
    assert free_bytes(FakeNvml({GPU: 0, PCI: 10}), memory) == 40


def test_a_different_device_of_the_machine_is_not_confused_with_it() -> None:
    assert free_bytes(FakeNvml({"GPU-another": 1, "00000000:af:00.0": 1})) == 100


def test_each_answer_is_read_anew() -> None:
    module = FakeNvml({GPU: 10})
    nvml = Nvml(lambda: module)
    assert free_device_bytes(CUDA, memory=FakeMemory(), nvml=nvml) == 40
    module.free[GPU] = 20
    assert free_device_bytes(CUDA, memory=FakeMemory(), nvml=nvml) == 50


def test_a_runtime_that_cannot_tell_leaves_nvml() -> None:
    memory = FakeMemory()
    memory.problem = "unknown error"
    assert free_bytes(FakeNvml({GPU: 10}), memory) == 40


def test_the_answer_is_none_if_neither_source_knows() -> None:
    memory = FakeMemory()
    memory.problem = "unknown error"
    assert free_bytes(FakeNvml({}), memory) is None


def test_a_device_not_in_use_is_not_touched() -> None:
    memory = FakeMemory()
    memory.in_use = False
    nvml = FakeNvml({GPU: 10})
    assert free_bytes(nvml, memory) is None
    assert nvml.num_inits == 0


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
        assert free_device_bytes(CUDA, memory=FakeMemory(), nvml=nvml) == 100

    assert num_loads == 1
    assert [record.levelname for record in caplog.records] == ["DEBUG"]


def test_a_process_that_never_used_cuda_stays_without_a_context() -> None:
    assert not torch.cuda.is_initialized()
    assert not CudaMemory().is_in_use(torch.device("cuda", 0))
    assert free_device_bytes(torch.device("cuda", 0)) is None
    assert not torch.cuda.is_initialized()


def test_a_missing_nvml_module_is_tolerated() -> None:
    program = "\n".join(
        [
            "import sys, torch",
            "sys.modules['pynvml'] = None",  # an import of it fails from now on
            "from checkfreq.snapshot.device_memory import Nvml",
            "print(Nvml().free_bytes(None))",
        ]
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "None\n", "")


def test_memory_that_the_next_iteration_needs_is_no_room_for_a_snapshot() -> None:
    device = torch.device("cuda", 0)
    absent = Nvml(load=_absent)
    assert room_for_snapshot(device, memory=FakeMemory(), nvml=absent) == 100 - 45
    unused = FakeMemory()
    unused.in_use = False
    assert room_for_snapshot(device, memory=unused, nvml=absent) is None


def _absent() -> Any:
    raise ImportError("no pynvml")
