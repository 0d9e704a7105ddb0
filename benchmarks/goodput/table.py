"""Table of `benchmarks.goodput`: the fraction of all time that becomes progress."""

from __future__ import annotations

from itertools import groupby
from typing import Any

from benchmarks.lab.tables import Line, Table, introduced, newest, percent, row, table

#: In words, in the order of the columns.
ARMS = {
    "bound": "always 3.5 %",
    "fixed": "every 30 min",
    "paper, formula": "the paper, as released",
    "paper, budget": "the paper, as written",
    "young": "Young",
    "daly": "Daly",
    "auto": "ours",
    "auto mtbf_s": "ours, mtbf_s",
    "auto goodput": "ours, goodput",
}
_FIGURES = {
    "iteration_s": "An iteration takes",
    "cost_s": "a checkpoint costs",
    "durable_s": "durable after",
    "restart_s": "a restart",
}
_SETTING = ("setting", "model", "rate")
_RUN = (*_FIGURES, "notice_s", "figures", "commit", "command")


def goodput(lines: list[Line]) -> str:
    """A table per setting: a row per number of GPUs, a column per arm."""
    return "".join(_one(run) for run in last_runs(lines))


def last_runs(lines: list[Line]) -> list[list[Line]]:
    """The lines of the last run per setting, model and failure rate, by number of GPUs.

    Lines simulated with different figures, or by a different command or commit, belong to other
    runs.
    """
    runs = []
    for last in newest(lines, *_SETTING):
        same = [x for x in lines if _values(x, *_SETTING, *_RUN) == _values(last, *_SETTING, *_RUN)]
        runs.append(sorted(newest(same, "gpus"), key=lambda x: x["gpus"]))
    return runs


def _values(line: Line, *names: str) -> list[Any]:
    return [line.get(name) for name in names]


def _one(lines: list[Line]) -> str:
    arms = [arm for arm in ARMS if arm in lines[-1]["goodput"]]
    columns = " | ".join(["GPUs", "fails every", *(ARMS[arm] for arm in arms)])
    rows = [
        row(f"{x['gpus']:,}", age(x["mtbf_s"]), *(percent(x["goodput"].get(arm)) for arm in arms))
        for x in lines
    ]
    return introduced(said(lines[-1]), table(columns, rows, lines))


def said(line: Line) -> str:
    """The input figures, each with its source."""
    by_origin = groupby(_FIGURES, key=lambda name: line["figures"][name])
    origins = [
        f"{', '.join(f'{_FIGURES[name]} {short(line[name])}' for name in names)} ({origin})"
        for origin, names in by_origin
    ]
    origins += [f"{short(line['notice_s'])} until it begins"] if line["notice_s"] else []
    return f"{'; '.join(origins)}; failures as published ({line['rate']}):\n"


def short(seconds: float) -> str:
    """``66 ms``, ``1.5 s``."""
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def age(seconds: float) -> str:
    """``18 min``, ``3.1 h``, ``12.0 d``."""
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 86_400 else f"{seconds / 86_400:.1f} d"


TABLES = {"goodput": Table("goodput", goodput)}
