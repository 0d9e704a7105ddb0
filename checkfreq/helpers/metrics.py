"""``Metrics``: numbers that add up over batches, epochs and ranks, and live in the checkpoint.

A value is first counted on its rank; `reduce` adds up what all ranks counted since the last one,
with one collective; `end_epoch` makes a row of the history. All three stages are state. Values that
were counted and not reduced are this rank's own: see Metrics.
"""

from __future__ import annotations

import csv
import io
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, SupportsFloat, TypeAlias

from checkfreq.config import ScalarWriter
from checkfreq.errors import ConfigError, StateError, storage_errors
from checkfreq.helpers.group import Group, current_group
from checkfreq.helpers.sums import Summary, Tally
from checkfreq.store.fileops import FileOps, LocalFileOps, user_path

logger = logging.getLogger(__name__)

_Tallies: TypeAlias = dict[str, Tally]
#: The columns of a metric in a CSV file.
_COLUMNS = ("mean", "sum", "weight", "num", "min", "max", "last")


@dataclass(frozen=True, slots=True)
class Best:
    """The best value of a metric, and the epoch (from 0) that had it first."""

    epoch: int
    value: float


class Metrics:
    """Sums, means, extremes and a history by epoch, of all ranks, that a restore continues.

    ::

        metrics = Metrics()
        chk = CFCheckpoint(model=model, optimizer=optimizer, metrics=metrics)
        ...
            metrics.update({"loss": loss.item(), "images": len(x)}, weight=len(x))
        ...
        metrics.end_epoch()
        metrics.to_csv("metrics.csv")

    The same values give the same history, bit for bit, however they are split among ranks and
    batches of `reduce`, and however often the run was killed: sums are exact and rounded once.

    Several ranks call `reduce` and `end_epoch` together. State that is saved between two of them
    holds values that only this rank counted. Either call `reduce` before each boundary, or name the
    object in ``CFCheckpoint(per_rank=["metrics"])`` and restart with the same number of ranks.
    """

    def __init__(self, *, group: Group | None = None) -> None:
        self._fixed_group = group
        self._own: _Tallies = {}
        self._epoch: _Tallies = {}
        self._history: list[dict[str, Tally]] = []

    @property
    def _group(self) -> Group:
        return current_group() if self._fixed_group is None else self._fixed_group

    def update(self, values: Mapping[str, SupportsFloat], *, weight: float = 1.0) -> None:
        """Count one value of each metric on this rank.

        A mean is weighted: pass the number of samples behind the values. Values are made floats,
        so one on a device is waited for. Raises ConfigError for a weight that is negative or not
        finite.
        """
        if not 0.0 <= weight < math.inf:
            raise ConfigError(f"Metrics.update(weight=...): expected a number from 0, got {weight}")
        for name, value in values.items():
            self._own.setdefault(name, Tally()).add(float(value), float(weight))

    def reduce(self) -> dict[str, Summary]:
        """Add up what all ranks counted since the last call; the same on every rank.

        Also adds it to the present epoch. One collective call, however many metrics there are.
        """
        gathered = self._group.gather({name: tally.state() for name, tally in self._own.items()})
        reduced: _Tallies = {}
        for states in gathered:
            for name, state in states.items():
                reduced.setdefault(name, Tally()).merge(Tally.of(state))
        for name in sorted(reduced):
            self._epoch.setdefault(name, Tally()).merge(reduced[name])
        self._own = {}
        return {name: reduced[name].summary() for name in sorted(reduced)}

    def end_epoch(self) -> dict[str, Summary]:
        """Reduce, make a row of the epoch, and begin the next; returns the row."""
        self.reduce()
        self._history.append(self._epoch)
        self._epoch = {}
        return self.history[-1]

    @property
    def epoch(self) -> Mapping[str, Summary]:
        """The present epoch so far, as reduced."""
        return MappingProxyType({name: tally.summary() for name, tally in self._epoch.items()})

    @property
    def history(self) -> list[dict[str, Summary]]:
        """A row of every epoch that has ended, from epoch 0."""
        return [{name: tally.summary() for name, tally in row.items()} for row in self._history]

    def series(self, name: str, *, of: str = "mean") -> list[float]:
        """One number of a metric for each epoch that has ended; NaN where it had no value.

        ``of``: a field of Summary, or "mean". Raises ConfigError for anything else.
        """
        if of not in _COLUMNS:
            raise ConfigError(f"of: expected one of {', '.join(_COLUMNS)}, got {of!r}")
        rows = (row.get(name) for row in self.history)
        return [math.nan if row is None else float(getattr(row, of)) for row in rows]

    def best(self, name: str, *, highest: bool = False, of: str = "mean") -> Best | None:
        """The epoch with the lowest, or highest, value; NaN never wins. None if there is none."""
        numbers = [n for n in enumerate(self.series(name, of=of)) if not math.isnan(n[1])]
        if not numbers:
            return None
        chosen = (max if highest else min)(numbers, key=lambda number: number[1])
        return Best(*chosen)

    # Writing them down.

    def to_csv(self, path: str | os.PathLike[str], *, ops: FileOps | None = None) -> None:
        """Write the history: a line per epoch, columns such as ``loss.mean``.

        The file is replaced as a whole and synced. Only rank 0 writes; other ranks return at once.
        Numbers have all their digits. Raises StorageError.
        """
        if self._group.rank != 0:
            return
        target = user_path(path)
        own = LocalFileOps(target.parent) if ops is None else ops
        with storage_errors(f"Metrics.to_csv to {target}"):
            own.replace_file(target, self._csv().encode())
            own.sync_dir(target.parent)

    def _csv(self) -> str:
        text = io.StringIO()
        history = self.history
        names = sorted({name for row in history for name in row})
        lines = csv.writer(text, lineterminator="\n")
        lines.writerow(["epoch", *(f"{name}.{field}" for name in names for field in _COLUMNS)])
        for epoch, row in enumerate(history):
            lines.writerow([epoch, *(cell for name in names for cell in _cells(row.get(name)))])
        return text.getvalue()

    def to_tensorboard(
        self, writer: ScalarWriter, *, prefix: str = "", epochs: Sequence[int] = (-1,)
    ) -> None:
        """Add the means of epochs to a ``SummaryWriter``, or anything with its ``add_scalar``.

        ``epochs``: which rows of the history; default: the last. Only rank 0 writes.
        """
        history = self.history
        if self._group.rank != 0 or not history:
            return
        for epoch in epochs:
            number = range(len(history))[epoch]
            for name, summary in history[number].items():
                writer.add_scalar(f"{prefix}{name}", summary.mean, number)

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Everything, exactly; plain numbers and containers."""
        return {
            "history": [_states(row) for row in self._history],
            "epoch": _states(self._epoch),
            "own": _states(self._own),
            # The only part that may differ between ranks, which checkfreq compares.
            "rank": self._group.rank if self._own else None,
        }

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Continue from a saved state.

        Values that another rank counted and nobody reduced are dropped, with a warning: each rank
        would count them again. Raises StateError if it is not a state of Metrics; nothing changes.
        """
        try:
            history = [_tallies(row) for row in state["history"]]
            epoch, own = _tallies(state["epoch"]), _tallies(state["own"])
            saved_rank = state["rank"]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StateError(
                f"Metrics.load_state_dict: expected a state_dict() of Metrics: {error!r:.200}"
            ) from error
        if own and saved_rank != self._group.rank:
            logger.warning(
                "Metrics: rank %d restores values that rank %s counted and nobody reduced; they "
                "are dropped. Call reduce() before each boundary, or name the object in per_rank=",
                self._group.rank,
                saved_rank,
            )
            own = {}
        self._history, self._epoch, self._own = history, epoch, own


def _cells(summary: Summary | None) -> list[object]:
    if summary is None:
        return [""] * len(_COLUMNS)
    numbers = {**asdict(summary), "mean": summary.mean}
    return [numbers[field] for field in _COLUMNS]


def _states(tallies: _Tallies) -> dict[str, Any]:
    return {name: tally.state() for name, tally in tallies.items()}


def _tallies(states: Mapping[str, Any]) -> _Tallies:
    return {str(name): Tally.of(state) for name, state in states.items()}
