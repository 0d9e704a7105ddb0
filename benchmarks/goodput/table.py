"""Table of `benchmarks.goodput`: the fraction of all time that becomes progress."""

from __future__ import annotations

from collections.abc import Callable
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
_STORAGES = {"shared": "shared storage", "own": "nodes' disks"}
_COSTS = {"meeting": "meetings", "commit": "commits", "restore": "planning of restores"}
_SETTING = ("setting", "model", "rate")
_RUN = (*_FIGURES, "notice_s", "figures", "commit", "command")


def goodput(lines: list[Line]) -> str:
    """A table per setting: a row per number of GPUs, a column per arm."""
    return "".join(_one(run) for run in last_runs(lines))


def recovery(lines: list[Line]) -> str:
    """A table per setting: a row per number of GPUs and kind of storage."""
    found = [x for x in lines if x.get("what") == "recovery"]
    runs = [run for storage in _STORAGES for run in _last(_of(found, storage))]
    by_setting: dict[tuple[Any, ...], list[Line]] = {}
    for run in runs:
        by_setting.setdefault(tuple(_values(run[0], *_SETTING)), []).extend(run)
    return "".join(_recovery(run) for run in by_setting.values())


def last_runs(lines: list[Line]) -> list[list[Line]]:
    """The lines of the last run per setting, model and failure rate, by number of GPUs.

    Lines simulated with different figures, or by a different command or commit, belong to other
    runs.
    """
    return _last([x for x in lines if x.get("what", "arms") == "arms"])


def _of(lines: list[Line], storage: str) -> list[Line]:
    return [x for x in lines if x["checkpoints_on"] == storage]


def _last(lines: list[Line]) -> list[list[Line]]:
    runs = []
    for last in newest(lines, *_SETTING):
        same = [x for x in lines if _values(x, *_SETTING, *_RUN) == _values(last, *_SETTING, *_RUN)]
        runs.append(sorted(newest(same, "gpus"), key=lambda x: x["gpus"]))
    return runs


def _values(line: Line, *names: str) -> list[Any]:
    return [line.get(name) for name in names]


def _one(lines: list[Line]) -> str:
    arms = [arm for arm in ARMS if arm in lines[-1]["goodput"]]
    columns = " | ".join(["GPUs", "fails every", "a meeting", *(ARMS[arm] for arm in arms)])
    rows = [
        row(
            f"{x['gpus']:,}",
            age(x["mtbf_s"]),
            _meeting(x),
            *(percent(x["goodput"].get(arm)) for arm in arms),
        )
        for x in lines
    ]
    return introduced(said(lines[-1]) + _ranks(lines[-1]), table(columns, rows, lines))


def _meeting(line: Line) -> str:
    """How long a meeting of the ranks takes; marked where that is extrapolated."""
    ranks = line.get("ranks") or {}
    measured = ranks.get("measured", {}).get("meeting")
    if measured is None:
        return "-"
    return f"{short(ranks['meeting_s'])}{' *' if line['gpus'] > measured else ''}"


def _ranks(line: Line) -> str:
    """What the costs of ranks come from."""
    ranks = line.get("ranks") or {}
    measured, deviation = ranks.get("measured", {}), ranks.get("deviation", {})
    if not measured:
        return "Ranks cost one another nothing.\n"
    fits = [
        f"{_COSTS[what]} measured up to {most:,} (fitted within {100 * deviation[what]:.0f} %)"
        for what, most in measured.items()
    ]
    missing = [_COSTS[what] for what in _COSTS if what not in measured]
    nothing = f"; {', '.join(missing)} count as nothing" if missing else ""
    return f"Of many ranks: {', '.join(fits)}, beyond that extrapolated (*){nothing}.\n"


def _recovery(lines: list[Line]) -> str:
    last = lines[-1]
    columns = (
        "GPUs | checkpoints on | fails every | a meeting | restarts a day from memory, disks, "
        "shared storage | one takes | and loses | Daly | ours, mtbf_s | Daly, if ranks cost nothing"
    )
    rows = [
        row(
            f"{x['gpus']:,}",
            _STORAGES[x["checkpoints_on"]],
            age(x["mtbf_s"]),
            _meeting(x),
            _of_sources(x, lambda found: f"{found['per_day']:.3g}"),
            _of_sources(x, lambda found: _span(found["takes_s"]) if found["per_day"] else "-"),
            _of_sources(x, lambda found: _span(found["lost_s"]) if found["per_day"] else "-"),
            percent(x["goodput"]["daly"]),
            percent(x["goodput"]["auto mtbf_s"]),
            percent(x["free"]["daly"]),
        )
        for x in lines
    ]
    text = said(last) + _ranks(last) + _clusters(last)
    return introduced(text, table(columns, rows, lines))


def _of_sources(line: Line, say: Callable[[Line], str]) -> str:
    return ", ".join(say(line["restarts"][source]) for source in ("memory", "local", "shared"))


def _span(seconds: float) -> str:
    """``1.5 s``, ``43 min``."""
    return short(seconds) if seconds < 600 else age(seconds)


def _clusters(line: Line) -> str:
    speeds = line["bytes_per_s"]
    return (
        f"{line['gpus_per_node']} GPUs in a node, {line['nodes_per_rack']} nodes in a rack; a "
        f"checkpoint has {line['state_bytes'] / 1e12:.3g} TB; a GPU reads "
        f"{speeds['memory'] / 1e9:g} GB/s from memory, a node {speeds['local'] / 1e9:g} GB/s "
        "from its disks, all together "
        f"{speeds['shared'] / 1e9:g} GB/s from shared storage. Restarts are those of Daly's "
        "interval:\n"
    )


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


TABLES = {
    "goodput": Table("goodput", goodput),
    "goodput_recovery": Table("goodput", recovery),
}
