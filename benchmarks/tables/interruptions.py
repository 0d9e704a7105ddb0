"""The table of `benchmarks.interruptions`."""

from __future__ import annotations

from statistics import median

from benchmarks.tables.common import Line, newest, row, seconds, span, table

#: The arm that the others are compared with.
BASE = "uninterrupted, no checkpoints"

_SETTING = (
    *("model", "batch", "image_size", "epochs", "workers", "data", "deterministic"),
    *("every_of_base", "patience"),
)


def interruptions(lines: list[Line]) -> str:
    """A row per training and arm; of several seeds medians, and the range of the ratio."""
    columns = (
        "training | what | time | against the base | interruptions | iterations redone "
        "| back in training after | of it restoring | checkpoints | every | same bits as the base"
    )
    lines = newest(lines, *_SETTING, "arm", "seed")
    groups: dict[tuple[object, ...], list[Line]] = {}
    for line in lines:
        key = (*(line[name] for name in (*_SETTING, "arm")), _accelerator(line))
        groups.setdefault(key, []).append(line)
    return table(columns, [_row(runs) for runs in groups.values()], lines)


def _accelerator(line: Line) -> object:
    return line["machine"]["accelerator"]


def _row(runs: list[Line]) -> str:
    first = runs[0]
    return row(
        f"{first['model']}, batch {first['batch']}, {first['epochs']} epochs",
        first["arm"],
        f"{median(x['seconds'] for x in runs):.0f} s",
        _ratio(runs),
        _interruptions(runs),
        f"{span([x['redone'] for x in runs])} of {first['needed']}",
        seconds(_median(runs, "resume_s")),
        seconds(_median(runs, "restore_s")),
        span([x["checkpoints"] for x in runs]),
        _interval(runs),
        _equal(runs),
    )


def _ratio(runs: list[Line]) -> str:
    """With one that was given up, a lower limit, and how far it had come for good."""
    ratios = [x["ratio"] for x in runs]
    given_up = [x["reached"] for x in runs if not x["finished"]]
    if given_up:
        return f"given up at {max(ratios):.1f}, {100 * max(given_up):.0f} % done"
    spread = "" if len(runs) == 1 else f" ({min(ratios):.2f} to {max(ratios):.2f})"
    return f"{median(ratios):.2f}{spread}"


def _interruptions(runs: list[Line]) -> str:
    if runs[0]["arm"].startswith("uninterrupted"):
        return "-"
    every_s = median(x["every_s"] for x in runs)
    return f"{span([x['kills'] for x in runs])}, every {every_s:.0f} s"


def _median(runs: list[Line], figure: str) -> float | None:
    known = [x[figure] for x in runs if x[figure] is not None]
    return median(known) if known else None


def _interval(runs: list[Line]) -> str:
    if runs[0]["arm"] == "epoch boundary":
        return "epoch"
    known = [x["k"] for x in runs if x["k"] is not None]
    return span(known) if known else "-"


def _equal(runs: list[Line]) -> str:
    known = [x["equal"] for x in runs if x["equal"] is not None]
    return "-" if not known else "yes" if all(known) else "no"
