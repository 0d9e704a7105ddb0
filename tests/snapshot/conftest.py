"""A slot in host memory, and the fake device with a state on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.optim import Optimizer

from checkfreq import faults
from checkfreq.config import CFConfig
from checkfreq.snapshot.arena import Arena, Slot
from checkfreq.snapshot.gate import IsUpdate
from tests.snapshot.fake_device import FakeDevice, Scripted
from tests.snapshot.recorder import Recorder, small_state


def steps_of(*optimizers: Optimizer) -> IsUpdate:
    """Counts the steps of these optimizers as updates."""

    def is_update(optimizer: Optimizer, *, is_first: bool) -> bool | None:
        return any(optimizer is one for one in optimizers) or None

    return is_update


@pytest.fixture
def slot() -> Iterator[Slot]:
    arena = Arena(config=CFConfig(num_slots=1))
    arena.allocate(1 << 16)
    taken = arena.acquire()
    assert taken is not None
    yield taken
    arena.close()


@pytest.fixture
def held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Path]:
    """The copy of host tensors waits for this path, before settled ones or where a test says."""
    gate, point = tmp_path / "gate", getattr(request, "param", "snapshot.copy_settled")
    monkeypatch.setenv("CHECKFREQ_FAULT", f"{point}:pause-{gate}:*")
    faults.reload()
    yield gate
    gate.touch()
    monkeypatch.delenv("CHECKFREQ_FAULT")
    faults.reload()


@pytest.fixture
def fake() -> FakeDevice:
    """A device that runs nothing before it has to."""
    return FakeDevice(Scripted())


@pytest.fixture
def recorder(fake: FakeDevice) -> Iterator[Recorder]:
    recorder = Recorder(fake, small_state(fake))
    yield recorder
    fake.run_all()
    recorder.engine.close()
    recorder.arena.close()
