"""Windows of any saver, event by event; and the benchmark itself, at toy size."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.frequency import measure as benchmark
from benchmarks.frequency import table as frequency
from benchmarks.frequency.decided import Choice
from benchmarks.frequency.measure import Run
from benchmarks.frequency.saver_arm import Attached, SaverArm
from benchmarks.lab.paired import Round
from benchmarks.peers import OURS, Peer, Saved, Training
from benchmarks.peers.ours import CheckFreq
from checkfreq.types import SnapshotPlace
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


def test_every_update_of_a_window_is_entered_through_the_saver() -> None:
    events: list[str] = []
    loop = FakeLoop(events)
    peer = Peer("fake", lambda folder, training: FakeSaver(events, boundaries=0), (), synced=True)
    SaverArm(loop, Attached(loop, peer, Path(), queues=True), interval=2).window()
    update = ["enter", "leave", "iterate"]
    assert events == ["save", *update, "boundary", *update, "finish"]


def test_who_queues_trains_on_until_the_checkpoint_before_is_removed() -> None:
    class Pruning(FakeSaver):
        def updating(self) -> AbstractContextManager[None]:
            return contextlib.nullcontext()

        def is_quiet(self) -> bool:
            return self.is_durable() and events[-4:] == ["boundary", "iterate"] * 2

    events: list[str] = []
    loop = FakeLoop(events)
    peer = Peer("fake", lambda folder, training: Pruning(events, boundaries=0), (), synced=True)
    attached = Attached(loop, peer, Path(), queues=True)
    assert SaverArm(loop, attached, interval=1).window().iterations == 3
    assert events == ["save", "iterate", *["boundary", "iterate"] * 2, "finish"]


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


@pytest.mark.parametrize(
    ("until_s", "late_s", "count"),
    [(45.0, 50.0, 4), (5.0, 100.0, 3), (5.0, 25.0, 2), (5.0, 5.0, 1)],
)
def test_three_rounds_are_waited_for_up_to_a_limit(
    until_s: float, late_s: float, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()

    def rounds_of_10_s(*_: object) -> Iterator[Round]:
        while True:
            clock.now_s += 10.0
            yield Round({}, iteration_s=1.0, foreign=0.0)

    monkeypatch.setattr(benchmark, "time", SimpleNamespace(monotonic=clock))
    monkeypatch.setattr(benchmark, "rounds", rounds_of_10_s)
    assert len(new_run(tmp_path)._rounds({}, until_s=until_s, late_s=late_s)) == count


def new_run(folder: Path) -> Run:
    args = argparse.Namespace(seed=0, bound=0.1, window=1, seconds=0.0)
    return Run(FakeLoop([]), folder, args, {})


def test_autos_interval_is_tried_with_its_snapshots_where_it_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = []

    def fake(folder: Path, training: Training, *, place: SnapshotPlace) -> FakeSaver:
        places.append(place)
        return FakeSaver([], boundaries=0)

    monkeypatch.setattr(benchmark, "CheckFreq", fake)
    run = new_run(tmp_path)
    assert run._setting(Choice(None, 0)) is None
    assert run._setting(Choice(3, 6)) == (OURS, 3)
    device = Choice(3, 6, place=SnapshotPlace.DEVICE)
    name = f"{OURS}, snapshots on the device"
    assert run._setting(device) == run._setting(device) == (name, 3)
    assert places == [SnapshotPlace.DEVICE]
    assert run._savers[name].queues


def test_ours_takes_its_snapshots_in_the_given_place(tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    training = Training(model, torch.optim.SGD(model.parameters(), lr=0.1))
    saver = CheckFreq(tmp_path, training, place=SnapshotPlace.DEVICE)
    assert saver._manager._pipeline._config.snapshot_place is SnapshotPlace.DEVICE
    saver.close()


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


COMMON = {
    **{"model": "m", "batch": 2, "amp": False, "device": "cpu", "threads": 1, "bound": 0.035},
    "image_size": 32,
    **{"state_mib": 85.3, "iteration_ms": 40.0, "command": "python -m c", "commit": "abc1234"},
    **{"machine": {"cores": 2, "accelerator": None}, "versions": {"torch": "2.13.0"}},
}


def line(what: str, arm: str, **fields: object) -> dict[str, object]:
    return {"benchmark": "frequency", "what": what, "arm": arm, **COMMON, **fields}


def arm_line(name: str, **fields: object) -> dict[str, object]:
    limits = {"cost_low_ms": 5.0, "cost_high_ms": 9.0, "durable_low_ms": None}
    found = {"overhead": None, "low": None, "high": None, "rounds": 0, "k": None}
    return line("arm", name, synced=True, **limits, **{**found, **fields})


LINES = [
    arm_line("theirs", cost_ms=120.0, durable_ms=130.4, k_min=86, lost_s=1.85),
    arm_line(
        "ours",
        **{"cost_ms": 7.0, "durable_ms": 70.0, "k_min": 5, "k": 6, "lost_s": 0.19},
        **{"overhead": 0.03, "low": 0.01, "high": 0.05},
    ),
    line("equal", "ours", k=4, overhead=0.04, low=0.02, high=0.06),
    line("equal", "theirs", k=4, overhead=0.8, low=None, high=None, rounds=1),
    line(
        "policy",
        "paper, formula",
        **{"k": 4, "k_first": 2, "lost_s": 0.15, "windows": 0},
        **{"overhead": 0.04, "low": None, "high": None, "rounds": 2},
    ),
    line(
        "policy",
        "AUTO",
        **{"k": 5, "k_first": None, "lost_s": 0.15, "windows": 6},
        **{"overhead": 0.03, "low": 0.02, "high": 0.04, "rounds": 8},
    ),
    line(
        "target",
        "ours",
        **{"rival": "theirs", "k": 6, "k_rival": 86, "ratio": 0.0698, "allowed": 0.5, "met": True},
        equal=[{"k": 4, "rival": "theirs", "met": True, "apart": False}],
    ),
]


def test_the_table_has_a_row_per_arm_shortest_interval_first_and_the_targets() -> None:
    text = frequency.arms(json.loads(json.dumps(LINES)))
    ours, theirs = (row for row in text.splitlines() if row.startswith(("| ours", "| theirs")))
    assert ours == (
        "| ours | 7.0 ms (5.0 ms to 9.0 ms) | 70 ms | 4.00 % (2.00 % to 6.00 %) | 5 | 6 "
        "| 3.00 % (1.00 % to 5.00 %) | 0.19 s |"
    )
    assert theirs == (
        "| theirs | 120.0 ms (5.0 ms to 9.0 ms) | 130 ms "
        "| 80.00 % (interval unknown: 1 round) | 86 | - | - | 1.85 s |"
    )
    assert "(theirs): 6 / 86 = 0.07; target: at most 0.5, met." in text
    assert "at k = 4 yes (not significant)." in text
    assert "`python -m c`, commit abc1234" in text
    assert "m, batch 2, 32 x 32 pixels, on cpu: training on 1 of 2 cores, " in text
    assert ", 85.3 MiB of state, 40.0 ms" in text


def test_a_cost_of_few_saves_says_that_its_interval_is_unknown() -> None:
    unknown = {"cost_low_ms": None, "cost_high_ms": None, "saves": 3}
    text = frequency.arms([{**LINES[0], **unknown}])
    assert "| theirs | 120.0 ms (interval unknown: 3 saves) |" in text


def test_the_policies_have_a_table_of_their_own() -> None:
    text = frequency.policies(LINES)
    formula = "| paper, formula | 2 | 4 | untuned | 4.00 % (interval unknown: 2 rounds) | 0.15 s |"
    assert formula in text
    assert "| AUTO | - | 5 | 6 | 3.00 % (2.00 % to 4.00 %) | 0.15 s |" in text
    assert "ours" not in text


def test_only_the_last_run_of_a_setting_is_shown() -> None:
    old = {**line("equal", "ours", k=99, overhead=0.5, low=None), "commit": "0000000"}
    other = {**arm_line("else", cost_ms=1, durable_ms=1, k_min=1, lost_s=1), "model": "n"}
    text = frequency.arms([old, other, *LINES])
    assert "k = 99" not in text
    assert "| else |" in text


def test_of_two_runs_at_one_commit_the_last_is_shown() -> None:
    again = json.loads(json.dumps(LINES).replace("theirs", "others"))
    again[1]["k"] = 7
    text = frequency.arms([*LINES, *again])
    rows = [row for row in text.splitlines() if row.startswith(("| ours", "| theirs", "| others"))]
    assert [row.split(" | ")[0] for row in rows] == ["| ours", "| others"], text
    assert text.count("; target: at most") == 1
    assert frequency.arms([*LINES, *LINES]) == frequency.arms(LINES)
    assert frequency.policies([*LINES, *LINES]) == frequency.policies(LINES)


def test_the_workload_is_part_of_the_setting() -> None:
    larger = [{**x, "image_size": 224} for x in LINES]
    tokens = [{**{k: v for k, v in x.items() if k != "image_size"}, "tokens": 8} for x in LINES]
    text = frequency.arms([*LINES, *larger, *tokens])
    assert "32 x 32 pixels" in text
    assert "224 x 224 pixels" in text
    assert "batch 2, 8 tokens, on cpu" in text


def test_nothing_is_shown_of_nothing() -> None:
    assert frequency.arms([]) == frequency.policies([]) == ""
