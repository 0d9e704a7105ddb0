"""``Timer``: how long the phases of a loop take.

Two readings of the clock per phase, about a microsecond in all. No device is waited for: work that
was queued on one is counted where the host waits for it, unless ``sync`` is given.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from checkfreq.errors import StateError


@dataclass(frozen=True, slots=True)
class PhaseTime:
    """What a phase took: how often it ran, in total, at most, and the last time (seconds)."""

    num: int
    total_s: float
    max_s: float
    last_s: float

    @property
    def mean_s(self) -> float:
        """Per run."""
        return self.total_s / self.num


class Timer:
    """Adds up the time of named phases.

    ::

        timer = Timer()
        for x, y in loader:
            timer.lap("data")  # since the last lap, or since the timer was made
            with timer("forward"):
                loss = criterion(model(x), y)
            with timer("backward"):
                loss.backward()
            timer.restart()
        print(timer.report())

    Phases may nest, also in themselves; the time of an outer one includes that of the inner. Not to
    be shared by threads. ``sync`` is called before each reading of the clock, such as
    ``torch.accelerator.synchronize``: exact phases, for a slower loop. ``clock`` returns seconds.

    Track it in a CFCheckpoint and a resumed run goes on adding up; with many ranks, name it in
    ``per_rank``, since each has its own times.
    """

    def __init__(
        self,
        *,
        sync: Callable[[], object] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._sync = sync
        self._clock = clock
        self._now = clock if sync is None else self._synced
        self._phases: dict[str, _Phase] = {}
        self._since_s = self._began_s = self._now()
        self._earlier_s = 0.0

    def __call__(self, name: str) -> _Phase:
        """A context manager that takes the time of its block."""
        phase = self._phases.get(name)
        if phase is None:
            phase = self._phases[name] = _Phase(self._now)
        return phase

    def lap(self, name: str) -> float:
        """Count the time since the last `lap` or `restart` as phase ``name``; returns seconds."""
        now_s = self._now()
        taken_s = now_s - self._since_s
        self(name).add(taken_s)
        self._since_s = now_s
        return taken_s

    def restart(self) -> None:
        """Begin the next `lap` now."""
        self._since_s = self._now()

    def totals(self) -> dict[str, PhaseTime]:
        """Every phase that ran, in the order in which they first began."""
        return {name: phase.time for name, phase in self._phases.items() if phase.time.num}

    @property
    def elapsed_s(self) -> float:
        """Since the timer was made or reset; with a restored state, in all processes together."""
        return self._earlier_s + self._now() - self._began_s

    def report(self) -> str:
        """A table: phase, runs, total, mean, longest, and share of the time since the start."""
        elapsed_s = self.elapsed_s
        rows = [("phase", "runs", "total", "mean", "longest", "share")]
        for name, took in self.totals().items():
            share = took.total_s / elapsed_s if elapsed_s > 0.0 else 0.0
            rows.append((name, str(took.num), *_texts(took), f"{share:.1%}"))
        rows.append(("all", "", f"{elapsed_s:.3f} s", "", "", ""))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(_line(row, widths) for row in rows)

    def reset(self) -> None:
        """Forget everything; the time since the start begins again."""
        self._phases = {name: phase for name, phase in self._phases.items() if phase.is_running}
        for phase in self._phases.values():
            phase.time = PhaseTime(0, 0.0, 0.0, 0.0)
        self._earlier_s = 0.0
        self._since_s = self._began_s = self._now()

    def state_dict(self) -> dict[str, Any]:
        """The totals; a phase that is running counts once it has ended."""
        totals = self.totals().items()
        rows = {name: [one.num, one.total_s, one.max_s, one.last_s] for name, one in totals}
        return {"phases": rows, "elapsed_s": self.elapsed_s}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Go on adding up. Raises StateError if it is not a state of a Timer; nothing changes."""
        try:
            rows = {str(name): _read(row) for name, row in state["phases"].items()}
            earlier_s = float(state["elapsed_s"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StateError(
                f"Timer.load_state_dict: expected a state_dict() of a Timer: {error!r:.200}"
            ) from error
        self.reset()
        self._earlier_s = earlier_s
        for name, took in rows.items():
            self(name).time = took

    def _synced(self) -> float:
        if self._sync is not None:
            self._sync()
        return self._clock()


class _Phase:
    """A context manager that may be entered again, also within itself."""

    __slots__ = ("_began", "_last_s", "_max_s", "_now", "_num", "_total_s")

    def __init__(self, now: Callable[[], float]) -> None:
        self.time = PhaseTime(0, 0.0, 0.0, 0.0)
        self._now = now
        self._began: list[float] = []

    @property
    def time(self) -> PhaseTime:
        """The runs so far."""
        return PhaseTime(self._num, self._total_s, self._max_s, self._last_s)

    @time.setter
    def time(self, time: PhaseTime) -> None:
        # Plain numbers, since making a frozen object takes longer than all the rest of a run.
        self._num, self._total_s = time.num, time.total_s
        self._max_s, self._last_s = time.max_s, time.last_s

    @property
    def is_running(self) -> bool:
        """Whether a block has been entered and not left."""
        return bool(self._began)

    def add(self, taken_s: float) -> None:
        """Count one run."""
        self._num += 1
        self._total_s += taken_s
        self._last_s = taken_s
        if taken_s > self._max_s:
            self._max_s = taken_s

    def __enter__(self) -> _Phase:
        self._began.append(self._now())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.add(self._now() - self._began.pop())


def _read(row: Any) -> PhaseTime:
    num, *seconds = row
    if type(num) is not int or len(seconds) != 3:
        raise ValueError(f"expected a count and three times, got {row!r:.80}")
    return PhaseTime(num, *map(float, seconds))


def _texts(took: PhaseTime) -> tuple[str, str, str]:
    return f"{took.total_s:.3f} s", f"{took.mean_s * 1e3:.3f} ms", f"{took.max_s * 1e3:.3f} ms"


def _line(row: Sequence[str], widths: Sequence[int]) -> str:
    _, *cells = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
    return "  ".join([row[0].ljust(widths[0]), *cells]).rstrip()
