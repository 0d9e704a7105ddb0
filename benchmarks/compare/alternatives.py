"""README's table: ours beside what a user may use today, for one checkpoint of the largest state.

The interval and the loss by a crash follow from the measured cost of a checkpoint, by the same
arithmetic for every row: the interval is the one at which checkpoints cost `BOUND` of the training
time.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from benchmarks.compare.runs import of_last_runs
from benchmarks.lab.derived import affordable_interval_s, expected_loss_s
from benchmarks.lab.tables import Line, row, table

#: The default of ``CFManager(max_overhead=)``.
BOUND = 0.035

_STAGED_ASIDE = "dcp.async_save, thread, aside"


@dataclass(frozen=True, slots=True)
class Alternative:
    """A row: of several arms, the one with which a crash loses least.

    DCP reads the checkpoints of both of its savers alike, so only one of them was restored.
    """

    label: str
    arms: tuple[str, ...]
    restores_as: str

    def best(self, found: dict[str, Line]) -> Line | None:
        """The line of the best arm; None if none was measured."""
        return min((found[arm] for arm in self.arms if arm in found), key=_lost_s, default=None)


ALTERNATIVES = (
    Alternative("**checkfreq**", ("checkfreq",), "checkfreq"),
    Alternative(
        "`torch.distributed.checkpoint`, `async_save`",
        ("dcp.async_save, thread", "dcp.async_save, process"),
        "dcp.save",
    ),
    Alternative("`torch.save`", ("torch.save, synced",), "torch.save, synced"),
    Alternative(
        "transformers `Trainer`", ("transformers Trainer, synced",), "transformers Trainer, synced"
    ),
    Alternative("Lightning, async", ("lightning, async, synced",), "lightning, async, synced"),
)


def alternatives(lines: list[Line]) -> str:
    """A row per alternative that was measured."""
    found = _largest_on_cpu(lines)
    measured = [(each, best) for each in ALTERNATIVES if (best := each.best(found))]
    if not measured:
        return ""
    gib = f"{measured[0][1]['gib']:g} GiB"
    columns = (
        f"saving {gib} | stops training for | delays it by, in all | safe on disk after "
        f"| interval at {100 * BOUND:g} % overhead | a crash then loses | restored in"
    )
    rows = [_row(each, best, found) for each, best in measured]
    return table(columns, [*rows, "", *_notes(found)], [best for _, best in measured])


def _largest_on_cpu(lines: list[Line]) -> dict[str, Line]:
    """By arm, without those that failed."""
    last = of_last_runs([x for x in lines if x["device"] == "cpu"], "arm")
    gib = max((x["gib"] for x in last), default=0)
    return {x["arm"]: x for x in last if x["gib"] == gib and "durable_s" in x}


def _row(each: Alternative, line: Line, found: dict[str, Line]) -> str:
    restore_s = found.get(each.restores_as, {}).get("restore_s")
    return row(
        each.label,
        _time(line["held_ms"] / 1e3),
        _time(line["added_ms"] / 1e3),
        _time(line["durable_s"]),
        _time(_interval_s(line)),
        _time(_lost_s(line)),
        "-" if restore_s is None else _time(restore_s),
    )


def _interval_s(line: Line) -> float:
    return affordable_interval_s(BOUND, cost_s=line["added_ms"] / 1e3, durable_s=line["durable_s"])


def _lost_s(line: Line) -> float:
    return expected_loss_s(_interval_s(line), durable_s=line["durable_s"])


def _time(seconds: float) -> str:
    if seconds < 1:
        return f"{1e3 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def _notes(found: dict[str, Line]) -> list[str]:
    notes = [
        "Every file is synced before a checkpoint counts as safe. On average a crash loses half an "
        "interval, and what is not on disk yet. Only checkfreq verifies what it restores.",
    ]
    if aside := found.get(_STAGED_ASIDE):
        notes.append(
            "With staging in a thread, not its default, `async_save` stops training for "
            f"{_time(aside['held_ms'] / 1e3)} and delays it by {_time(aside['added_ms'] / 1e3)}; "
            "buffers that change in the forward pass (batch norm's) may be saved while they change."
        )
    return [*chain.from_iterable((note, "") for note in notes)][:-1]
