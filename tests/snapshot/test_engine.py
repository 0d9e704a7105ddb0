"""Phase one on the host: what is copied when, and who waits."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from checkfreq.snapshot.arena import Slot
from checkfreq.snapshot.engine import (
    Copy,
    HostEngine,
    copy_to_slot,
    fingerprint,
    slot_fingerprint,
    view_in_slot,
)
from checkfreq.snapshot.watch import UnannouncedWrite
from tests.snapshot.recorder import row_major_bytes
from tests.waiting import opened_while_waited_for


@pytest.fixture
def engine(slot: Slot) -> Iterator[HostEngine]:
    """Closed before its slot: its thread may still be copying."""
    made = HostEngine()
    yield made
    made.close()
    made.close()


class Outcome:
    """What ``on_copied`` was called with."""

    def __init__(self) -> None:
        self.errors: list[BaseException | None] = []
        self._called = threading.Event()

    def __call__(self, error: BaseException | None) -> None:
        self.errors.append(error)
        self._called.set()

    def wait(self) -> list[BaseException | None]:
        assert self._called.wait(120.0)
        return self.errors


def copy_of(tensor: torch.Tensor, offset: int = 0, *, settled: bool) -> Copy:
    return Copy("t", tensor, offset, tensor.numel() * tensor.element_size(), settled)


def beyond(slot: Slot, *, settled: bool) -> Copy:
    """A copy that cannot be made: it would leave the slot."""
    return copy_of(torch.ones(2, 8).t(), slot.num_bytes, settled=settled)


def test_volatile_tensors_are_complete_when_start_returns(
    engine: HostEngine, slot: Slot, held: Path
) -> None:
    volatile, settled, outcome = torch.ones(4), torch.ones(4), Outcome()
    copies = [copy_of(volatile, settled=False), copy_of(settled, 64, settled=True)]
    engine.start(copies, slot, on_copied=outcome)
    volatile.zero_()
    assert torch.equal(view_in_slot(copies[0], slot), torch.ones(4))
    assert not engine.wait_copied(timeout_s=0.0)
    with opened_while_waited_for(held.touch):
        assert engine.fence(timeout_s=120.0) > 0.0
    assert torch.equal(view_in_slot(copies[1], slot), torch.ones(4))
    assert outcome.wait() == [None]


@pytest.mark.parametrize("held", ["snapshot.copy_settled", "snapshot.copy_end"], indirect=True)
def test_a_write_that_asks_no_fence_voids_the_snapshot(
    engine: HostEngine, slot: Slot, held: Path
) -> None:
    weight, outcome = torch.ones(4), Outcome()
    engine.start([copy_of(weight, settled=True)._replace(watched=True)], slot, on_copied=outcome)
    weight.data.zero_()
    held.touch()
    (error,) = outcome.wait()
    assert isinstance(error, UnannouncedWrite)
    assert re.search(r": t\. .*updating\(\)", str(error))


def test_a_volatile_copy_that_fails_is_reported_too(engine: HostEngine, slot: Slot) -> None:
    outcome = Outcome()
    bad = beyond(slot, settled=False)
    engine.start([bad, copy_of(torch.ones(4), settled=True)], slot, on_copied=outcome)
    (error,) = outcome.errors
    assert isinstance(error, ValueError)
    assert engine.fence(timeout_s=0.0) == 0.0


LAYOUTS = {
    "transposed": torch.arange(12.0).reshape(3, 4).t(),
    "channels_last": torch.arange(48.0).reshape(1, 3, 4, 4).to(memory_format=torch.channels_last),
    "conjugate": torch.randn(4, dtype=torch.complex64).conj(),
    "negative": torch.randn(4, dtype=torch.complex64).conj().imag,
    "scalar": torch.tensor(3),
    "nan": torch.tensor([float("nan"), -0.0]),
    "empty": torch.empty(0, 3),
}


@pytest.mark.parametrize("tensor", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_any_layout_lies_row_major_in_the_slot(tensor: torch.Tensor, slot: Slot) -> None:
    copy = copy_of(tensor, 64, settled=True)
    copy_to_slot(copy, slot)
    assert bytes(slot.memory[64 : 64 + copy.num_bytes]) == row_major_bytes(tensor)
    assert fingerprint(copy) == slot_fingerprint(copy, slot)


def test_a_copy_in_progress_is_not_reported_as_done(
    engine: HostEngine, slot: Slot, held: Path
) -> None:
    outcome = Outcome()
    engine.start([copy_of(torch.ones(8), settled=True)], slot, on_copied=outcome)
    until_s = time.monotonic() + 120.0
    while not Path(f"{held}.reached").exists():
        assert time.monotonic() < until_s
        time.sleep(0.001)
    assert not engine.wait_copied(timeout_s=0.0)
    held.touch()
    assert outcome.wait() == [None]
    assert engine.wait_copied(timeout_s=120.0)
