"""Runs of `benchmarks.compare` in its result lines, which do not mix.

A run begins with the raw disk's line.
"""

from __future__ import annotations

import itertools

from benchmarks.lab.tables import Line

STATE = ("device", "gib", "tensors")
RAW = "raw"


def of_last_runs(lines: list[Line], kind: str, *more: str) -> list[Line]:
    """The lines that have ``kind``: of each state, and each value of ``more``, the last run's."""
    runs = itertools.accumulate(x.get("arm") == RAW for x in lines)
    found = [
        (run, tuple(x[name] for name in (*STATE, *more)), x)
        for run, x in zip(runs, lines, strict=True)
        if kind in x
    ]
    last = {setting: run for run, setting, _ in found}
    return [x for run, setting, x in found if last[setting] == run]
