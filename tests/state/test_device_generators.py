"""The generators of accelerators, of which this machine need not have one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from checkfreq.state.checkpoint import CFCheckpoint
from checkfreq.state.tensors import keep_tensors_on
from tests.state.support import restore, take


class Accelerators:
    """What torch says of accelerators; their generators are those of the CPU by another name."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.in_use = [0]
        self.generators = [torch.Generator().manual_seed(index) for index in range(count)]

    def draw(self, index: int) -> float:
        return torch.rand(1, generator=self.generators[index]).item()

    def devices(self) -> list[torch.device]:
        return [torch.device("cuda", index) for index in self.in_use]

    # ---- torch.cuda

    def is_available(self) -> bool:
        return True

    def get_rng_state(self, device: torch.device) -> Tensor:
        return self.generators[device.index].get_state()

    def set_rng_state(self, state: Tensor, device: torch.device) -> None:
        self.generators[device.index].set_state(state)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerators]:
    """Four accelerators, of which this process uses the first."""
    found, generator = Accelerators(4), torch.Generator
    monkeypatch.setattr(torch, "get_device_module", lambda device: found)
    monkeypatch.setattr(torch, "Generator", lambda device="cpu": generator())
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: found.count)
    keep_tensors_on("cuda", found.devices)
    yield found
    keep_tensors_on("cuda", list)


def on_host() -> CFCheckpoint:
    """A state of which nothing is on an accelerator, as with all of it offloaded."""
    return CFCheckpoint(model=torch.nn.Linear(2, 2))


def test_an_accelerator_without_tracked_tensors_goes_on_with_its_numbers(
    machine: Accelerators, caplog: pytest.LogCaptureFixture
) -> None:
    """One that is not used is left alone; where none was, nothing is said."""
    machine.in_use = []
    without = take(on_host())
    machine.in_use = [0]
    shot = take(on_host())
    names = {ref.key for ref in shot.captured.tensors}
    assert {name for name in names if name.startswith("cuda")} == {"cuda:0"}
    drawn = [machine.draw(0) for _ in range(3)]
    machine.generators[0].manual_seed(9)
    restore(on_host(), shot)
    assert [machine.draw(0) for _ in range(3)] == drawn
    restore(on_host(), without)
    assert not caplog.records


def test_a_rank_that_comes_back_on_another_accelerator_goes_on_there(
    machine: Accelerators, caplog: pytest.LogCaptureFixture
) -> None:
    machine.in_use = [0, 3]  # the first one by accident, as many scripts do
    shot = take(on_host())
    drawn = [machine.draw(3) for _ in range(3)]
    machine.in_use = [0, 1]
    before = machine.generators[3].get_state()
    restore(on_host(), shot)
    assert [machine.draw(1) for _ in range(3)] == drawn
    assert torch.equal(machine.generators[3].get_state(), before)
    assert not caplog.records


def test_accelerators_of_which_nothing_was_saved_or_that_torch_does_not_know_are_named(
    machine: Accelerators, caplog: pytest.LogCaptureFixture
) -> None:
    shot = take(on_host())
    machine.in_use = [0, 2]
    restore(on_host(), shot)
    assert "rng.cuda:2: not restored, the checkpoint has the states of cuda:0" in caplog.text
    shot = take(on_host())
    state = shot.found.manifest.objects["rng"]["state"]
    state["npu:0"] = state.pop("cuda:0")
    restore(on_host(), shot)
    assert "rng.npu:0: not restored, this process has no such device" in caplog.text
    assert "rng.cuda:0: not restored, the checkpoint has the states of" in caplog.text
