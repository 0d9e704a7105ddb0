"""Charges without their noise: what chance explains of a cost is paid in instalments. Pure.

The budget is a token bucket: a cost that is too high by chance holds checkpoints back at once,
while one that is too low by chance is worth little, since the balance is capped. So noise alone
makes checkpoints rarer. Of each difference to the usual cost, the part that noise explains is
therefore set aside and paid over the next checkpoints. In the end everything is paid.

The part is that of the empirical Bayes estimate of each cost (B. Efron and C. Morris, Stein's
Estimation Rule and Its Competitors, JASA 68, 1973): where costs vary by no more than noise would
make them, all of it; where there is no noise, none.
"""

from __future__ import annotations

from collections import deque
from statistics import fmean

#: Checkpoints from which the part of noise is told.
_WINDOW = 32
#: Of what is set aside, the part that is paid at each checkpoint.
_INSTALMENT = 1 / 16
#: Standard deviations beyond which no difference is due to chance.
_CERTAIN = 3.0


class Instalments:
    """What is set aside, in seconds; less than 0 if more was paid than checkpoints cost."""

    def __init__(self) -> None:
        self.set_aside_s = 0.0
        self._squares: deque[tuple[float, float]] = deque(maxlen=_WINDOW)

    def due_s(self, cost_s: float, *, usual_s: float, noise_s: float) -> float:
        """What to charge now for a checkpoint that cost ``cost_s``, and an instalment.

        ``usual_s`` is the mean cost, ``noise_s`` the standard deviation that chance gives one.
        """
        difference_s = cost_s - usual_s
        self._squares.append((difference_s**2, noise_s**2))
        found, by_chance = (fmean(column) for column in zip(*self._squares, strict=True))
        kept = max(0.0, 1.0 - by_chance / found) if found else 1.0
        if abs(difference_s) > _CERTAIN * noise_s:
            kept = max(kept, 1.0 - _CERTAIN * noise_s / abs(difference_s))
        self.set_aside_s += (1.0 - kept) * difference_s
        instalment_s = _INSTALMENT * self.set_aside_s
        self.set_aside_s -= instalment_s
        return usual_s + kept * difference_s + instalment_s
