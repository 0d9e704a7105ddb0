"""The table of `benchmarks.interruptions`."""

from __future__ import annotations

from statistics import median

from benchmarks.lab.tables import Line, Table, row, seconds, span, table

_SETTING = (
    *("model", "batch", "image_size", "epochs", "workers", "deterministic", "amp"),
    *("data", "needed", "every_of_base", "patience"),
)


def interruptions(lines: list[Line]) -> str:
    """A row per training and arm; medians over several seeds or repeats, and the ratio's range."""
    columns = (
        "training | arm | time | against the base | interruptions | iterations redone "
        "| back in training after | of it restoring | checkpoints | every | same bits as the base"
    )
    groups: dict[tuple[object, ...], list[Line]] = {}
    lines = last_calls(lines)
    for line in lines:
        groups.setdefault(_key(line), []).append(line)
    return table(columns, [_row(runs) for runs in groups.values()], lines)


def last_calls(lines: list[Line]) -> list[Line]:
    """For each training, arm and seed the lines of the last call: all of its repeats."""
    found: dict[tuple[object, ...], list[Line]] = {}
    for line in lines:
        key = (*_key(line), line["seed"])
        is_first = line.get("repeat", 1) == 1
        found[key] = [line] if is_first else [*found.get(key, []), line]
    return [line for runs in found.values() for line in runs]


def _key(line: Line) -> tuple[object, ...]:
    """The training and the arm. ``every_of_base`` gives different seconds in each call."""
    every_s = line["every_s"] if line["every_of_base"] is None else None
    setting = (line.get(name) for name in (*_SETTING, "arm"))
    return *setting, every_s, line["machine"]["accelerator"]


def _row(runs: list[Line]) -> str:
    first = runs[0]
    return row(
        _training(first),
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


def _training(line: Line) -> str:
    size = f"{line['batch']} × {line['image_size']} px"
    parts = [line["model"], size, f"{line['epochs']} epochs", f"{line['data']} images"]
    amp = "amp" if line.get("amp") else None
    return ", ".join(x for x in (*parts, amp, line["machine"]["accelerator"]) if x)


def _ratio(runs: list[Line]) -> str:
    """For an arm that was given up, the lower limit and how much of the training is durable."""
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


TABLES = {"interruptions": Table("interruptions", interruptions)}
