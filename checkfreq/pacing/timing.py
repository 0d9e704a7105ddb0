"""The times at which iterations begin and end, in seconds of ``time.perf_counter``.

An iteration lasts from one boundary to the next. ``HostTimer`` reads the host's clock. On an
accelerator the host runs ahead of the queued work, so ``DeviceTimer`` records events on the device
instead. Neither ever waits. Training thread only.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from checkfreq.snapshot.device import Device, Event

#: Far more than a device can be behind, since its driver queues about a thousand launches.
_MAX_MARKS = 4096


class Span(NamedTuple):
    """One iteration: its two boundaries, and its first weight update (None: it had none)."""

    start_s: float
    update_s: float | None
    end_s: float


class IterationTimer(Protocol):
    """Is told of boundaries and updates as they happen, and returns the spans between them."""

    def mark_boundary(self) -> None:
        """An iteration ends here, and the next begins."""
        ...

    def mark_update(self) -> None:
        """The weights are about to change; only the first call after a boundary counts."""
        ...

    def finished(self) -> list[Span]:
        """Iterations whose times became known since the last call, in order, each exactly once.

        Call it about once per iteration: spans are kept until then.
        """
        ...


class HostTimer:
    """Reads the host's clock at each mark. A clock that jumps back is passed on as it is."""

    def __init__(self, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._start_s: float | None = None
        self._update_s: float | None = None
        self._finished: list[Span] = []

    def mark_boundary(self) -> None:
        """See IterationTimer."""
        now_s = self._clock()
        if self._start_s is not None:
            self._finished.append(Span(self._start_s, self._update_s, now_s))
        self._start_s, self._update_s = now_s, None

    def mark_update(self) -> None:
        """See IterationTimer."""
        if self._update_s is None and self._start_s is not None:
            self._update_s = self._clock()

    def finished(self) -> list[Span]:
        """See IterationTimer."""
        spans, self._finished = self._finished, []
        return spans


@dataclass(slots=True)
class _Mark:
    """A mark in flight. It happens at ``earliest_s`` or later; exactly then without an event."""

    is_boundary: bool
    event: Event | None
    earliest_s: float


class DeviceTimer:
    """Records events on the current stream of one device; a span is known when its last is done.

    Durations are the device's own: positions on its time line, which starts at the first mark, are
    sums of the times between events. The offset of that line to the host's clock is known within
    bounds: a mark happens after it was recorded and after it was last seen pending, and before it
    is seen done. A mark outside these bounds shifts the line; a span is shifted as a whole, so
    that its duration stays right. A mark without an event (in a graph capture, where nothing may
    be recorded, or when ``max_marks`` are in flight) counts as happening when the host made it.
    """

    def __init__(
        self,
        device: Device,
        index: torch.device,
        *,
        clock: Callable[[], float] = time.perf_counter,
        max_marks: int = _MAX_MARKS,
    ) -> None:
        self._device = device
        self._index = index
        self._clock = clock
        self._max_marks = max_marks
        self._in_flight: deque[_Mark] = deque()
        self._update_expected = False
        self._finished: list[Span] = []
        # The time line: the host's time at its zero, the latest position, and the latest event
        # with its position.
        self._zero_s: float | None = None
        self._latest = 0.0
        self._event: Event | None = None
        self._event_at = 0.0
        # The iteration in progress, as positions on the time line.
        self._start: float | None = None
        self._update: float | None = None

    def mark_boundary(self) -> None:
        """See IterationTimer."""
        self._mark(is_boundary=True)
        self._update_expected = True

    def mark_update(self) -> None:
        """See IterationTimer."""
        if self._update_expected:
            self._mark(is_boundary=False)
            self._update_expected = False

    def finished(self) -> list[Span]:
        """See IterationTimer."""
        if not self._device.is_capturing():  # a query would break the capture
            self._take_done()
        spans, self._finished = self._finished, []
        return spans

    def _mark(self, *, is_boundary: bool) -> None:
        capturing = self._device.is_capturing()
        if len(self._in_flight) >= self._max_marks:
            self._make_room(may_query=not capturing)
        now_s = self._clock()
        event = None
        if not capturing:
            event = self._device.record(self._device.current_stream(self._index))
        self._in_flight.append(_Mark(is_boundary, event, now_s))

    def _make_room(self, *, may_query: bool) -> None:
        if may_query:
            self._take_done()
        if len(self._in_flight) >= self._max_marks:
            oldest = self._in_flight.popleft()
            oldest.event = None
            self._take(oldest)

    def _take_done(self) -> None:
        """Process the marks that have happened, up to the first that has not."""
        while self._in_flight:
            mark = self._in_flight[0]
            if mark.event is not None:
                asked_s = self._clock()  # before asking: pending then, so it happens later
                if not self._device.is_done(mark.event):
                    mark.earliest_s = asked_s
                    return
            self._in_flight.popleft()
            self._take(mark)

    def _take(self, mark: _Mark) -> None:
        # Marks on unordered streams may happen in any order, but time must not run backwards.
        at = self._latest = max(self._latest, self._position(mark))
        if mark.event is not None:
            assert self._zero_s is not None
            self._zero_s = max(self._zero_s, mark.earliest_s - at)
            self._zero_s = min(self._zero_s, self._clock() - at)
        if mark.is_boundary:
            self._end_iteration(at)
        else:
            self._update = at

    def _position(self, mark: _Mark) -> float:
        if self._zero_s is None:
            self._zero_s = mark.earliest_s
        if mark.event is None:
            return mark.earliest_s - self._zero_s
        if self._event is None:
            self._event_at = max(self._latest, mark.earliest_s - self._zero_s)
        else:
            elapsed_s = self._device.elapsed_s(self._event, mark.event)
            self._event_at += elapsed_s if math.isfinite(elapsed_s) else 0.0
        self._event = mark.event
        return self._event_at

    def _end_iteration(self, at: float) -> None:
        if self._start is not None:
            assert self._zero_s is not None
            update_s = None if self._update is None else self._zero_s + self._update
            self._finished.append(Span(self._zero_s + self._start, update_s, self._zero_s + at))
        self._start, self._update = at, None
