"""Fixtures of the tests on the fake device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.snapshot.fake_device import FakeDevice, Scripted
from tests.snapshot.recorder import Recorder, small_state


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
