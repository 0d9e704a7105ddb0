"""Whether starting the script again leads anywhere: what its runs added to their directories."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from checkfreq.persist.lock import holder_of
from checkfreq.store.store import CheckpointStore
from checkfreq.supervisor.board import Record

#: Of a run that told nothing: long enough to have been training.
LONG_ENOUGH_S = 300.0
#: Runs in a row that made no progress; one may be bad luck, and so may two.
MOST_IN_VAIN = 3

_LOCKS = (".lock", ".mirror.lock")


@dataclass(frozen=True, slots=True)
class Reached:
    """How far a directory is: its newest step, and whether the run in it is finished."""

    newest_step: int = 0
    is_finished: bool = False


@dataclass(slots=True)
class Progress:
    """How far each directory was when a run of the script ended."""

    num_in_vain: int = 0
    _before: dict[str, Reached] = field(default_factory=dict)

    def run_ended(self, records: Iterable[Record], *, lived_s: float) -> bool:
        """Whether this run got further than those before it.

        Progress is a newer step in a directory in which it trained, or its finished mark; while a
        run waits for a directory that another one holds, the other one's steps are not its own. A
        step counts that is newer than what the run restored and than what the run before left.
        Where nothing was told, a run makes progress that lives for `LONG_ENOUGH_S`.
        """
        records = list(records)
        now = {record.chk_dir: reached_in(record.chk_dir) for record in records}
        trained = (record for record in records if record.has_begun)
        got_on = any(self._got_on(record, now[record.chk_dir]) for record in trained)
        got_on = got_on or (not records and lived_s >= LONG_ENOUGH_S)
        self._before.update(now)
        self.num_in_vain = 0 if got_on else self.num_in_vain + 1
        return got_on

    def _got_on(self, record: Record, now: Reached) -> bool:
        before = self._before.get(record.chk_dir, Reached())
        if now.is_finished and not before.is_finished:
            return True
        return now.newest_step > max(before.newest_step, record.restored_step or 0)

    @property
    def is_hopeless(self) -> bool:
        """Whether to give up."""
        return self.num_in_vain >= MOST_IN_VAIN


def reached_in(chk_dir: str) -> Reached:
    """How far a directory is now; as if it were empty where it cannot be read."""
    store = CheckpointStore(Path(chk_dir))
    with contextlib.suppress(OSError):
        if steps := store.steps():
            mark = store.marks().get(steps[-1])
            return Reached(steps[-1], mark is not None and mark.finished)
    return Reached()


@dataclass(slots=True)
class Workers:
    """Where the workers of all runs so far may still write; one may outlive several trainers."""

    _trainers: dict[str, set[int]] = field(default_factory=dict)

    def add(self, records: Iterable[Record]) -> None:
        """These trainers had workers."""
        for record in records:
            self._trainers.setdefault(record.chk_dir, set()).add(record.pid)

    def busy_in(self) -> list[str]:
        """The directories to which one of them is writing, or from which it uploads."""
        found = self._trainers.items()
        return [chk_dir for chk_dir, trainers in found if _is_held_for(chk_dir, trainers)]


def _is_held_for(chk_dir: str, trainers: set[int]) -> bool:
    return any(holder_of(Path(chk_dir), name=name) in trainers for name in _LOCKS)


def by_directory(records: Iterable[Record]) -> Mapping[str, Record]:
    """Of the records of each directory, the one of the rank that got furthest."""
    furthest: dict[str, Record] = {}
    for record in records:
        known = furthest.get(record.chk_dir)
        if known is None or (record.has_begun, record.step) > (known.has_begun, known.step):
            furthest[record.chk_dir] = record
    return furthest
