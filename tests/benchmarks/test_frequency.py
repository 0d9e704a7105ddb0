"""Windows of any saver, event by event; and the benchmark itself, at toy size."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.frequency.saver_arm import Attached, SaverArm
from benchmarks.peers import OURS, Peer, Saved, Training
from tests.benchmarks.test_benchmarks_run import TINY_WINDOWS, lines_of

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
