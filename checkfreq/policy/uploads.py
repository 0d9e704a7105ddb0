"""What uploading to a mirror adds to the training time. Pure.

An iteration during an upload that no checkpoint touched is compared with T. The differences of one
upload are added up with their signs, so that noise cancels, and what has become of them is paid
from the budget as it grows: a long upload must not be free until it ends. Iterations that a
checkpoint touched as well are charged to that checkpoint, which has caused the upload's part too.
"""

from __future__ import annotations

import math

from checkfreq.policy.charges import Baseline
from checkfreq.policy.observations import Iteration

#: Reports of an upload's end may be lost with its worker: after so long none is assumed any more.
_LONGEST_S = 24 * 3600.0


class Uploads:
    """The uploads of a run: at most one at a time."""

    def __init__(self) -> None:
        self._began_s = math.inf
        self._ended_s = -math.inf
        self._excess_s = 0.0  # of the current upload
        self._paid_s = 0.0  # of that, what was paid

    def note(self, began_s: float, ended_s: float | None) -> None:
        """An upload began at ``began_s``, and ended then; None: it goes on."""
        if began_s != self._began_s:
            self._began_s, self._excess_s, self._paid_s = began_s, 0.0, 0.0
        self._ended_s = began_s + _LONGEST_S if ended_s is None else ended_s

    def meets(self, iteration: Iteration) -> bool:
        """Whether one was in progress during the iteration."""
        return iteration.start_s < self._ended_s and iteration.end_s > self._began_s

    def add(self, iteration: Iteration, baseline: Baseline) -> bool:
        """Take in an iteration; False if no upload was in progress during it."""
        if not self.meets(iteration):
            return False
        # Not stalls, which are paid for anyway.
        self._excess_s += min(iteration.moved_s, baseline.limit_s) - baseline.iteration_s
        return True

    def settle(self) -> float:
        """What the upload has cost beyond what was paid for it; less than 0 is given back."""
        owed_s = max(0.0, self._excess_s) - self._paid_s
        self._paid_s += owed_s
        return owed_s
