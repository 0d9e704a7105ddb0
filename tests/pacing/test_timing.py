"""Each iteration is timed once, correctly, and without waiting for a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checkfreq.pacing.timing import DeviceTimer, HostTimer, IterationTimer, Span
from tests.snapshot.fake_device import FakeDevice, Scripted, Seeded

CUDA = torch.device("cuda", 0)
START_S = 1000.0


class Clock:
    """A host clock that moves when the test says so."""

    def __init__(self, now_s: float = START_S) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


@dataclass(frozen=True)
class Instant:
    """An event of a Timeline: when it happens, truly."""

    at_s: float


class Timeline:
    """A device whose stream works off kernels of known length, in the clock's true time."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.capturing = False
        self.idle_from_s = 0.0
        self.num_recorded = 0
        self.drift = 0.0

    def launch(self, seconds: float) -> None:
        """Queue a kernel."""
        self.idle_from_s = self._end_s() + seconds

    def _end_s(self) -> float:
        return max(self.idle_from_s, self.clock())

    def current_stream(self, device: torch.device) -> str:
        assert device == CUDA
        return "the only one"

    def record(self, stream: str) -> Instant:
        assert not self.capturing
        self.num_recorded += 1
        return Instant(self._end_s())

    def is_done(self, event: Instant) -> bool:
        assert not self.capturing
        return event.at_s <= self.clock()

    def elapsed_s(self, start: Instant, end: Instant) -> float:
        assert self.is_done(start)
        assert self.is_done(end)
        return (end.at_s - start.at_s) * (1 + self.drift)

    def is_capturing(self) -> bool:
        return self.capturing


def device_timer(**options: Any) -> tuple[DeviceTimer, Timeline, Clock]:
    clock = Clock()
    timeline = Timeline(clock)
    device: Any = timeline
    return DeviceTimer(device, CUDA, clock=clock, **options), timeline, clock


def durations(spans: Sequence[Span]) -> list[float]:
    return [span.end_s - span.start_s for span in spans]


def approx(*values: float) -> Any:
    return pytest.approx(list(values))


@pytest.fixture(params=["host", "device"])
def case(request: pytest.FixtureRequest) -> tuple[IterationTimer, Clock]:
    """A timer and its clock; the device has nothing to do, so both must tell the same."""
    if request.param == "host":
        clock = Clock()
        return HostTimer(clock=clock), clock
    timer, _, clock = device_timer()
    return timer, clock


# ---- both


def test_an_iteration_lasts_from_boundary_to_boundary(case: tuple[IterationTimer, Clock]) -> None:
    timer, clock = case
    timer.mark_boundary()
    clock.now_s += 2
    timer.mark_update()
    clock.now_s += 1
    timer.mark_boundary()
    clock.now_s += 5
    timer.mark_boundary()

    assert timer.finished() == [Span(1000.0, 1002.0, 1003.0), Span(1003.0, None, 1008.0)]
    assert timer.finished() == []


def test_only_the_first_update_of_an_iteration_counts(case: tuple[IterationTimer, Clock]) -> None:
    timer, clock = case
    timer.mark_update()  # before any boundary
    for _ in range(2):
        timer.mark_boundary()
        for _ in range(3):
            clock.now_s += 1
            timer.mark_update()
    timer.mark_boundary()

    assert [span.update_s for span in timer.finished()] == [1001.0, 1004.0]


# ---- the device's


def test_a_device_clock_that_drifts_is_kept_to_the_hosts() -> None:
    drift = -0.01
    timer, timeline, clock = device_timer()
    timeline.drift = drift
    timer.mark_boundary()
    for _ in range(100):
        clock.now_s += 1.0
        timer.mark_boundary()
        (span,) = timer.finished()
        assert span.end_s == pytest.approx(clock(), abs=1e-9)
        assert durations([span]) == approx(1.0 + drift)


def test_nothing_is_recorded_or_asked_during_a_capture() -> None:
    timer, timeline, clock = device_timer()
    timer.mark_boundary()
    clock.now_s += 1.0
    timeline.capturing = True
    timer.mark_update()
    clock.now_s += 1.0
    timer.mark_boundary()
    assert timer.finished() == []
    timeline.capturing = False
    clock.now_s += 1.0
    timer.mark_boundary()

    assert timer.finished() == [Span(1000.0, 1001.0, 1002.0), Span(1002.0, None, 1003.0)]
    assert timeline.num_recorded == 2


@pytest.mark.parametrize("capturing", [False, True])
def test_however_far_behind_a_device_is_each_iteration_is_told_and_memory_is_bounded(
    capturing: bool,
) -> None:
    timer, timeline, clock = device_timer(max_marks=8)
    timeline.launch(1000.0)
    timer.mark_boundary()
    timeline.capturing = capturing
    for _ in range(100):
        clock.now_s += 1.0
        timer.mark_boundary()
        assert len(timer._in_flight) <= 8
    timeline.capturing = False
    timeline.launch(50.0)
    timer.mark_boundary()
    clock.now_s += 2000.0

    spans = timer.finished()
    assert len(spans) == 101
    assert capturing or durations(spans)[-1] == pytest.approx(50.0)
    assert all(seconds >= 0 for seconds in durations(spans))
    assert sum(durations(spans)) == pytest.approx(spans[-1].end_s - spans[0].start_s)


SECONDS = st.floats(0.0, 5.0)
#: (work before the update, work after it, host time spent, whether somebody asks)
ITERATION = st.tuples(SECONDS, SECONDS, SECONDS, st.booleans())


@given(iterations=st.lists(ITERATION, max_size=30), first=SECONDS)
def test_whatever_is_queued_durations_are_the_devices_and_instants_are_within_bounds(
    iterations: list[tuple[float, float, float, bool]], first: float
) -> None:
    timer, timeline, clock = device_timer()
    told: list[Span] = []
    true: list[tuple[float, float, float]] = []
    seen: list[float] = []

    def ask() -> None:
        told.extend(timer.finished())
        seen.extend([clock()] * (len(told) - len(seen)))

    timeline.launch(first)
    start_s, recorded = timeline._end_s(), [clock()]
    timer.mark_boundary()
    for before, after, host_s, asks in iterations:
        timeline.launch(before)
        update_s = timeline._end_s()
        timer.mark_update()
        timeline.launch(after)
        clock.now_s += host_s
        true.append((start_s, update_s, start_s := timeline._end_s()))
        recorded.append(clock())
        timer.mark_boundary()
        if asks:
            ask()
    clock.now_s = timeline._end_s()
    ask()

    assert len(told) == len(iterations)
    for span, (start_s, update_s, end_s) in zip(told, true, strict=True):
        assert span.update_s is not None
        assert span.end_s - span.start_s == pytest.approx(end_s - start_s, abs=1e-9)
        assert span.update_s - span.start_s == pytest.approx(update_s - start_s, abs=1e-9)
        assert span.start_s <= span.update_s <= span.end_s
        assert span.end_s <= end_s + 1e-9, "the line starts early and is moved only up to a bound"
    for span, recorded_s, seen_s in zip(told, recorded[1:], seen, strict=True):
        assert recorded_s - 1e-9 <= span.end_s <= seen_s + 1e-9


@given(seed=st.integers(0, 2**32), rounds=st.integers(0, 12))
def test_under_any_schedule_each_iteration_is_told_once(seed: int, rounds: int) -> None:
    device = FakeDevice(Seeded(seed))
    clock = Clock()
    timer = DeviceTimer(device, CUDA, clock=clock, max_marks=6)
    weight = device.tensor(torch.zeros(2))
    spans: list[Span] = []
    timer.mark_boundary()
    for round_ in range(rounds):
        device.training_writes(weight, float(round_))
        timer.mark_update()
        if seed % 3 == round_ % 3:
            device.use_new_stream(after_the_old_one=bool(seed % 2))
        clock.now_s += 1.0
        timer.mark_boundary()
        spans += timer.finished()
    device.run_all()
    spans += timer.finished()
    while len(spans) < rounds:  # is_done() of this device may let something else run
        spans += timer.finished()

    assert len(spans) == rounds
    for span in spans:
        assert span.update_s is not None
        assert span.start_s <= span.update_s <= span.end_s


def test_a_device_that_never_gets_anything_done_is_never_waited_for() -> None:
    device = FakeDevice(Scripted())  # runs nothing unless told to
    timer = DeviceTimer(device, CUDA, clock=Clock())
    for _ in range(5):
        timer.mark_boundary()
        assert timer.finished() == []
