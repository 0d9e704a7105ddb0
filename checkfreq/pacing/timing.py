"""When iterations began and ended, in seconds of ``time.perf_counter``.

An iteration lasts from one boundary to the next. Where the host clock tells the truth,
``HostTimer`` reads it; on an accelerator the host runs ahead of the queued work, and
``DeviceTimer`` has the device note the instants. Neither ever waits. Training thread only.
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

#: A device cannot be so far behind: its driver holds about a thousand launches.
_MAX_MARKS = 4096


class Span(NamedTuple):
    """One iteration: its boundaries, and its first weight update (None: it had none)."""

    start_s: float
    update_s: float | None
    end_s: float


class IterationTimer(Protocol):
    """Told about boundaries and updates as they are passed, it tells what lay between."""

    def mark_boundary(self) -> None:
        """An iteration ends here, and the next begins."""
        ...

    def mark_update(self) -> None:
        """The weights are about to change; only the first since the boundary counts."""
        ...

    def finished(self) -> list[Span]:
        """Iterations that became known since the last call, in order, each exactly once.

        To be called about once an iteration: until then they are kept.
        """
        ...


class HostTimer:
    """The host's clock at the instant of each mark. A clock that jumps back is passed on."""

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
    """A mark in flight. It happens not before ``earliest_s``; ``event`` None: then."""

    is_boundary: bool
    event: Event | None
    earliest_s: float


class DeviceTimer:
    """Events on the current stream of one device; an iteration is known when its last is done.

    Durations are the device's: positions on its time line, from the first mark on, are sums of
    the times between events. Where that line lies on the host's clock is known within bounds:
    a mark happens after it was recorded and after it was seen pending, and before it was seen
    done. Each mark that leaves these bounds moves the line; one span is placed as a whole.
    A mark without an event (in a graph capture, where nothing may be recorded, or when
    ``max_marks`` are in flight) is taken to happen when the host came by.
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
        # The time line: where the host clock has its zero, the latest position, and the latest
        # event on it with its position.
        self._zero_s: float | None = None
        self._latest = 0.0
        self._event: Event | None = None
        self._event_at = 0.0
        # The iteration that is being put together, in positions.
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
        """Take in the marks that have happened, up to the first that has not."""
        while self._in_flight:
            mark = self._in_flight[0]
            if mark.event is not None:
                asked_s = self._clock()
                if not self._device.is_done(mark.event):
                    mark.earliest_s = asked_s
                    return
            self._in_flight.popleft()
            self._take(mark)

    def _take(self, mark: _Mark) -> None:
        # Marks on streams that are not ordered may happen in any order: the line does not go back.
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
