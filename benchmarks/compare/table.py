"""Tables of `benchmarks.compare`: every library, and the targets."""

from __future__ import annotations

import math

from benchmarks.compare.alternatives import alternatives
from benchmarks.compare.runs import of_last_runs
from benchmarks.lab.tables import Line, Table, introduced, row, table

_INTRODUCTION = """\
One checkpoint with each library, saved while training continues and restored into the live
training. `stops training for`: the time the training thread spends in the library's calls.
`synced`: a durable checkpoint survives a power cut; a library that does not sync is measured as it
is and with its files synced after its write, in the background if it writes there. DCP's `aside`
arms stage in a thread, which is not the default: buffers that the next forward pass changes (batch
norm's) are inconsistent in such a checkpoint. `ours` is our figure divided by the row's, in the
same round; only ours verifies what it restores. `raw` writes and reads the same number of bytes
directly:
"""


def arms(lines: list[Line]) -> str:
    """A row per state and arm, the one that is durable first at the top."""
    columns = (
        "state | library | synced | stops training for | added in all | durable after | "
        "restored from disk | right after the save | ours: stop | durable | restored"
    )
    found = of_last_runs(lines, "arm")
    found = sorted(found, key=lambda x: (*_setting(x), not x["synced"], _durable_s(x)))
    rows = [
        row(
            _state(x),
            _what(x),
            "yes" if x["synced"] else "no",
            _value(x, "held_ms", "{:.1f} ms"),
            _value(x, "added_ms", "{:.0f} ms"),
            _value(x, "durable_s", "{:.2f} s"),
            _value(x, "restore_s", "{:.2f} s"),
            _value(x, "warm_restore_s", "{:.2f} s"),
            *(_value(x, f"ours_{what}", "{:.2f}") for what in ("held", "durable", "restore")),
        )
        for x in found
    ]
    return introduced(_INTRODUCTION, table(columns, [*rows, "", *_versions(found)], found))


def _durable_s(line: Line) -> float:
    return float(line.get("durable_s", math.inf))


def _what(line: Line) -> str:
    """The arm; one that failed has no figures."""
    why = str(line.get("failed", "")).replace("|", "/")
    return f"{line['arm']} (failed: {why})" if why else str(line["arm"])


def _versions(lines: list[Line]) -> list[str]:
    versions = {name: x["versions"][name] for x in lines for name in sorted(x["versions"])}
    said = (f"{name} {version}" for name, version in versions.items() if name not in _TOLD)
    return [f"With {', '.join(said)}.  "] if versions.keys() - _TOLD else []


_TOLD = {"python", "torch"}


def targets(lines: list[Line]) -> str:
    """A row per state, target and group of peers."""
    lines = of_last_runs(lines, "target", "among")
    columns = "state | target | best synced alternative | ours / its | quartiles | allowed | met"
    rows = [
        row(
            _state(x),
            f"{x['target']}, {x['among']}",
            f"{x['best']}, best of {len(x['peers'])}",
            f"{x['ratio']:.3f}",
            "{:.3f} to {:.3f}".format(*x["ratio_quartiles"]),
            f"{x['allowed']:g}",
            _MET[x["met"]],
        )
        for x in sorted(lines, key=_setting)
    ]
    return table(columns, rows, lines)


#: None: the median is within what is allowed, the upper quartile is not.
_MET = {True: "yes", False: "no", None: "unsure"}


def _setting(line: Line) -> tuple[str, float, int]:
    return line["device"], line["gib"], line["tensors"]


def _state(line: Line) -> str:
    return f"{line['gib']:g} GiB, {line['tensors']} parameters, {line['device']}"


def _value(line: Line, figure: str, form: str) -> str:
    return form.format(line[figure]) if figure in line else "-"


TABLES = {
    "compare": Table("compare", arms),
    "targets": Table("compare", targets),
    "alternatives": Table("compare", alternatives),
}
