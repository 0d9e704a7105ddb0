"""Windows of any saver, event by event; and the benchmark itself, at toy size."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from benchmarks.frequency.saver_arm import Attached, SaverArm
from benchmarks.peers import OURS, Peer, Saved, Training
from tests.benchmarks.test_benchmarks_run import TINY_WINDOWS, lines_of

#: Runs what users have beside us: large frameworks (`make test-more`).

PEER = "torch.save, synced"


class FakeSaver:
    """Durable so many boundaries after a save; notes what happens to it."""

    def __init__(self, events: list[str], *, boundaries: int) -> None:
        self._events, self._boundaries, self._left = events, boundaries, 0

    def boundary(self, *, save: bool) -> None:
        self._left = self._boundaries if save else max(0, self._left - 1)
        self._events.append("save" if save else "boundary")

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        self._events.append("enter")
        yield
        self._events.append("leave")

    def is_durable(self) -> bool:
        return self._left == 0

    def is_quiet(self) -> bool:
        return self.is_durable()

    def close(self) -> None:
        self._events.append("close")

    def finish(self) -> Saved:
        self._left = 0
        self._events.append("finish")
        return Saved(0.1)


class FakeClock:
    """Stands still, but where it is moved."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class FakeLoop:
    """An update is all that there is to an iteration."""

    def __init__(self, events: list[str]) -> None:
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self._events = events

    def iterate(self) -> None:
        self.optimizer.step()
        self._events.append("iterate")

    def synchronize(self) -> None:
        pass


def window(
    *, queues: bool, boundaries: int, interval: int, length: int
) -> tuple[list[str], object]:
    events: list[str] = []
    loop = FakeLoop(events)

    def make(folder: Path, training: Training) -> FakeSaver:
        return FakeSaver(events, boundaries=boundaries)

    attached = Attached(loop, Peer("fake", make, (), synced=True), Path(), queues=queues)
    found = SaverArm(loop, attached, interval=interval, length=length).window()
    loop.iterate()
    assert events.pop() == "iterate"  # and nothing is attached to the update any more
    return [event for event in events if event not in ("enter", "leave")], found


def test_a_peers_save_is_waited_for_before_its_next_and_at_the_end_of_a_window() -> None:
    events, found = window(queues=False, boundaries=3, interval=2, length=3)
    passed = ["save", "iterate", "boundary", "iterate"]
    assert events == [*passed, "finish", *passed, *["boundary", "iterate"] * 2, "finish"]
    assert (found.covered, found.iterations) == (4, 6)


def test_who_queues_saves_while_the_last_is_on_its_way() -> None:
    events, found = window(queues=True, boundaries=2, interval=1, length=2)
    tail = ["boundary", "iterate"] * 2
    assert events == ["save", "iterate", "save", "iterate", *tail, "finish"]
    assert (found.covered, found.iterations) == (2, 4)


class Slow(FakeSaver):
    """On a clock: a call of 3 s, an update that waits for 2 s, 100 s to finish, 30 for removal."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__([], boundaries=0)
        self._clock = clock

    def boundary(self, *, save: bool) -> None:
        super().boundary(save=save)
        self._clock.now_s += 3.0 if save else 0.0

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        self._clock.now_s += 2.0
        yield

    def finish(self) -> Saved:
        self._clock.now_s += 100.0
        return Saved(71.0, removal_s=30.0)


@pytest.mark.parametrize(("synced", "seconds"), [(True, 2 * 75.0), (False, 2 * 5.0)])
def test_a_peer_waits_for_its_save_but_its_removal_and_our_sync_are_not_its_cost(
    synced: bool, seconds: float
) -> None:
    clock, loop = FakeClock(), FakeLoop([])
    peer = Peer("fake", lambda folder, training: Slow(clock), (), synced=synced)
    attached = Attached(loop, peer, Path(), queues=False, clock=clock)
    assert SaverArm(loop, attached, interval=1, length=2).window().seconds == seconds
    assert attached.saved == [(Saved(71.0, removal_s=30.0), 5.0)] * 2


def test_it_prints_costs_equal_intervals_policies_and_the_target(tmp_path: Path) -> None:
    lines = lines_of(
        "frequency",
        *(*TINY_WINDOWS, "--seconds", "0", "--k", "2", "--window", "1", "--bound", "0.9"),
        *("--profile-iterations", "2", "--verify", "1", "--arms", OURS, PEER),
        *("--policies", "AUTO", "paper, formula"),
        folder=tmp_path,
    )
    arms = [(line["what"], line["arm"]) for line in lines]
    assert arms[:4] == [("arm", OURS), ("arm", PEER), ("equal", OURS), ("equal", PEER)]
    assert arms[4:] == [("policy", "AUTO"), ("policy", "paper, formula"), ("target", OURS)]
    assert all(line["k"] >= 1 and line["lost_s"] > 0 for line in lines if line["what"] == "policy")
    assert all(line["k_min"] >= 1 and line["cost_low_ms"] is None for line in lines[:2])
    assert all(line["overhead"] is not None and line["rounds"] == 1 for line in lines[2:4])
    assert all(line["tokens"] == 32 and "image_size" not in line for line in lines)
    assert [line["place"] for line in lines if line["what"] == "policy"] == ["host"] * 2
    assert (lines[-1]["rival"], [each["k"] for each in lines[-1]["equal"]]) == (PEER, [2])
