"""When the last checkpoint of a run must start, so that it is durable before the run ends. Pure.

::

    end - now <= L' + Q + U + m + G

    L'  the time from a boundary to a durable checkpoint: its mean and four deviations
    Q   what checkpoints in flight still take, since the worker writes one after the other
    U   the upload, where a mirror is on, after the one in progress
    m   for what nobody measures: the news travels, the process ends
    G   the time to the next boundary, likewise its mean and four deviations: at this boundary it
        is too early to stop only if the next one will not be too late

Mean and deviation are the moving ones of TCP's retransmission timer (RFC 6298), which is about the
same question. A value that is ten times as long as those before raises the sum above itself at
once, and many equal ones bring it down to their mean. So a disk that becomes slower moves the last
checkpoint forward.
"""

from __future__ import annotations

from dataclasses import dataclass

from checkfreq.policy.estimates import OUTLIER
from checkfreq.policy.profile import LONGEST_S, SHORTEST_S

#: Weights of a new value in the mean and in the deviation, and deviations above the mean: RFC 6298.
_MEAN_PART = 1 / 8
_DEVIATION_PART = 1 / 4
_DEVIATIONS = 4.0
#: m. Also the least that anything is left: a process takes part of a second to end.
_MARGIN_S = 2.0
#: Before the first checkpoint: a worker that starts, and a slow network disk.
_UNMEASURED_S = 5.0
_UNMEASURED_BYTES_PER_S = 100e6
#: G before the first iteration was measured.
_UNMEASURED_GAP_S = 1.0


class Expected:
    """The most that a time is expected to take, from the ones before."""

    def __init__(self) -> None:
        self._mean_s: float | None = None
        self._deviation_s = 0.0

    def add(self, seconds: float) -> None:
        """Take in one measured time; impossible ones are ignored."""
        if not 0.0 <= seconds <= LONGEST_S:
            return
        if self._mean_s is None:
            self._mean_s, self._deviation_s = seconds, seconds / 2
            return
        off_s = seconds - self._mean_s
        self._deviation_s += _DEVIATION_PART * (abs(off_s) - self._deviation_s)
        self._mean_s += _MEAN_PART * off_s

    def upper_s(self) -> float | None:
        """None before the first."""
        if self._mean_s is None:
            return None
        return self._mean_s + _DEVIATIONS * self._deviation_s


@dataclass(frozen=True, slots=True)
class Needs:
    """What a rank needs before the end: ``durable_s`` is L' + Q + U + m, ``gap_s`` is G."""

    durable_s: float
    gap_s: float

    def with_(self, other: Needs) -> Needs:
        """What two ranks need: both wait for the slower one."""
        return Needs(max(self.durable_s, other.durable_s), max(self.gap_s, other.gap_s))

    def must_start(self, left_s: float) -> bool:
        """Whether the last checkpoint must start now, ``left_s`` before the end."""
        return self.spare_s(left_s) <= 0.0

    def spare_s(self, left_s: float) -> float:
        """How long training may still go on, ``left_s`` before the end."""
        return left_s - self.durable_s - self.gap_s

    def boundaries_to_look(self, left_s: float) -> int:
        """After how many boundaries to ask again; at least one.

        Half of those that there is time for: iterations may become slower meanwhile.
        """
        return max(1, int(self.spare_s(left_s) / (2 * max(self.gap_s, SHORTEST_S))))


NO_NEEDS = Needs(0.0, 0.0)


class LastCheckpoint:
    """Learns from each checkpoint and iteration what the last checkpoint will need."""

    def __init__(self) -> None:
        self._durable = Expected()
        self._gap = Expected()
        self._gap_of_epoch = Expected()  # a validation may lie between this boundary and the next

    def add_durable(self, seconds: float) -> None:
        """A checkpoint became durable so long after its boundary."""
        self._durable.add(seconds)

    def add_gap(self, seconds: float, *, after_epoch: bool) -> None:
        """Two boundaries were so far apart; ``after_epoch``: the first one ended an epoch.

        A single long one (a validation within an epoch) says little about the next, so it counts
        as an outlier; several in a row are soon believed.
        """
        if after_epoch:
            self._gap_of_epoch.add(seconds)
            return
        known_s = self._gap.upper_s()
        self._gap.add(min(seconds, OUTLIER * known_s) if known_s else seconds)

    @property
    def is_measured(self) -> bool:
        """Whether any checkpoint of this run was measured."""
        return self._durable.upper_s() is not None

    def needs(
        self,
        *,
        at_epoch_end: bool,
        state_bytes: int,
        ages_s: tuple[float, ...] = (),
        cached_s: float | None = None,
        upload_s: float = 0.0,
    ) -> Needs:
        """What the last checkpoint needs if it is not this boundary's but the next one's.

        ``ages_s``: of the checkpoints in flight. ``cached_s``: what an earlier run measured, for
        the time before the first checkpoint of this one.
        """
        durable_s = self._durable_s(state_bytes, cached_s)
        queued_s = sum(max(0.0, durable_s - age_s) for age_s in ages_s)
        # One that is overdue shows that the next will take at least as long.
        durable_s = max(durable_s, *ages_s) if ages_s else durable_s
        return Needs(durable_s + queued_s + upload_s + _MARGIN_S, self._gap_s(at_epoch_end))

    def _durable_s(self, state_bytes: int, cached_s: float | None) -> float:
        if (own_s := self._durable.upper_s()) is not None:
            return own_s
        unmeasured_s = _UNMEASURED_S + state_bytes / _UNMEASURED_BYTES_PER_S
        if cached_s is None:
            return unmeasured_s
        cached = Expected()
        cached.add(cached_s)
        return cached.upper_s() or unmeasured_s

    def _gap_s(self, at_epoch_end: bool) -> float:
        usual_s = self._gap.upper_s() or _UNMEASURED_GAP_S
        of_epoch_s = self._gap_of_epoch.upper_s() if at_epoch_end else None
        return usual_s if of_epoch_s is None else max(usual_s, of_epoch_s)
