"""How long training has been held, and by what: each wait is reported here once, by its kind.

The reports are read in two ways. ``checkpoints_s`` is how long checkpoints have held training in
the whole run. ``lap`` is what held training in one iteration: it counts all of the manager's code
at a boundary, and keeps calls of the user that wait and meetings of the ranks apart. Belongs to
the training thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Held(NamedTuple):
    """What held training during one iteration, in seconds.

    ``stall_s``: weight updates behind a copy, and the manager's code at the boundary.
    ``waited_s``: calls of the user that wait. ``met_s``: meetings of the ranks, and what comes
    once in a run. None of them is part of another.
    """

    stall_s: float = 0.0
    waited_s: float = 0.0
    met_s: float = 0.0


class HeldTime:
    """Sums of all waits so far.

    ``device_wait_s`` tells how long devices have waited for copies. It is asked at each reading
    and not reported to, since a device's clock tells of a wait only once it is over.
    """

    def __init__(
        self,
        *,
        device_wait_s: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._device_wait_s = device_wait_s
        self._clock = clock
        self._fence_s = 0.0
        self._snapshot_s = 0.0
        self._boundary_s = 0.0
        self._waited_s = 0.0
        self._met_s = 0.0
        self._at_lap = Held()

    # ---- reports

    def fence(self, seconds: float) -> None:
        """The host held a weight update back until a copy was finished."""
        self._fence_s += seconds

    def snapshot(self, seconds: float) -> None:
        """Taking a snapshot took so long: part of a boundary, or of a call that waits."""
        self._snapshot_s += seconds

    def met(self, seconds: float) -> None:
        """The ranks met, or something was done that comes once in a run."""
        self._met_s += seconds

    def boundary(self) -> _Boundary:
        """The manager's code at a boundary; waits and meetings within it are not part of it."""
        return _Boundary(self)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A wait that the user asked for, or that a checkpoint which must be taken needs."""
        start_s = self._clock()
        try:
            yield
        finally:
            self._waited_s += self._clock() - start_s

    def outside_s(self) -> float:
        """The clock, but for waits and meetings: a difference leaves out those in between."""
        return self._clock() - self._waited_s - self._met_s

    def add_boundary(self, seconds: float) -> None:
        """The manager's code at a boundary took so long."""
        self._boundary_s += seconds

    # ---- readings

    @property
    def fence_s(self) -> float:
        """How long weight updates have waited for copies, on the host and on devices."""
        return self._fence_s + self._device_wait_s()

    @property
    def checkpoints_s(self) -> float:
        """How long checkpoints have held training."""
        return self._snapshot_s + self.fence_s

    def lap(self, *, on_device: bool) -> Held:
        """What held training since the last call.

        ``on_device``: updates wait on a device. The host then runs ahead of it, so that its own
        delays are hidden behind work that is queued already.
        """
        met_s = 0.0 if on_device else self._met_s
        boundary_s = 0.0 if on_device else self._boundary_s
        now = Held(self.fence_s + boundary_s, self._waited_s, met_s)
        before, self._at_lap = self._at_lap, now
        return Held(
            now.stall_s - before.stall_s, now.waited_s - before.waited_s, now.met_s - before.met_s
        )


class _Boundary:
    """One boundary as a context: cheaper than a generator, since every iteration passes one.

    A boundary that raises is not counted: it ends the training.
    """

    __slots__ = ("_held", "_start_s")

    def __init__(self, held: HeldTime) -> None:
        self._held = held
        self._start_s = held.outside_s()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self._held.add_boundary(self._held.outside_s() - self._start_s)
