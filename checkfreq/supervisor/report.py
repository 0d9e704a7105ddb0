"""What the supervisor says: one line per restart, and a last one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from checkfreq.supervisor.board import Record, State
from checkfreq.supervisor.processes import Ended
from checkfreq.supervisor.progress import by_directory

#: A run that was told to stop, and whose last checkpoint is durable (docs/stopping.md).
STOPPED = 75


@dataclass(frozen=True, slots=True)
class PastRun:
    """A run of the script that ended; times by ``time.monotonic``."""

    number: int
    ended: Ended
    began_s: float
    ended_s: float
    records: Sequence[Record]

    @property
    def lived_s(self) -> float:
        """How long it lived."""
        return self.ended_s - self.began_s

    @property
    def step(self) -> int | None:
        """The latest step that it reached; None if that is not known."""
        return max((record.step for record in self.records if record.has_begun), default=None)

    @property
    def has_stopped(self) -> bool:
        """Whether it was told to stop, and its last checkpoint is durable on every rank.

        Its managers say so too: launchers have exit statuses of their own.
        """
        records = self.records
        return self.ended.code == STOPPED or (
            bool(records) and all(one.state is State.STOPPED for one in records)
        )

    @property
    def status(self) -> int:
        """What a shell would say of it, but `STOPPED` where a launcher made a failure of that."""
        return STOPPED if self.has_stopped and self.ended.code else self.ended.status

    @property
    def is_outage(self) -> bool:
        """Whether it ended since its checkpoints could not be read, which is no crash."""
        return any(record.state is State.CUT_OFF for record in self.records)

    def __str__(self) -> str:
        """``exit by SIGKILL at step 4711``."""
        why = " (its checkpoints cannot be reached)" if self.is_outage else ""
        return f"{self.ended}{why}" + ("" if self.step is None else f" at step {self.step}")


def went_on(records: Sequence[Record]) -> float | None:
    """When the first step of a run was reached; None if that has not been yet."""
    firsts = (_first_boundary_s(record) for record in records)
    return min((first_s for first_s in firsts if first_s is not None), default=None)


def _first_boundary_s(record: Record) -> float | None:
    times = sorted(record.boundaries.values())
    return times[1] if len(times) > 1 else None


def restart_line(before: PastRun, records: Sequence[Record]) -> str:
    """What the restart after ``before`` cost, by what the run that followed has told."""
    first_s = went_on(records)
    down = "" if first_s is None else f", {first_s - before.ended_s:.1f} s down"
    lost = _all_lost(by_directory(before.records), by_directory(records))
    colon = ": " if lost or down else ""
    return f"restart {before.number} after {before}{colon}{(lost + down).removeprefix(', ')}"


def _all_lost(before: Mapping[str, Record], now: Mapping[str, Record]) -> str:
    several = len({*before, *now}) > 1
    texts = []
    for chk_dir, record in now.items():
        if record.has_begun:
            where = f" in {chk_dir}" if several else ""
            texts.append(_goes_on_from(record) + where + _lost(before.get(chk_dir), record))
    return "; ".join(texts)


def _goes_on_from(record: Record) -> str:
    if record.restored_step is None:
        return "training began anew"
    return f"restored step {record.restored_step}"


def _lost(before: Record | None, now: Record) -> str:
    if before is None or not before.has_begun:
        return ""
    restored = now.restored_step or 0
    steps = before.step - restored
    if steps <= 0:
        return ", nothing lost"
    seconds = before.seconds_since(restored)
    lasted = "" if seconds is None else f" ({seconds:.1f} s of training)"
    return f", {steps} {'step' if steps == 1 else 'steps'} lost{lasted}"
