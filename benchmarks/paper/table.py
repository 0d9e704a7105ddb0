"""Tables of `benchmarks.paper`."""

from __future__ import annotations

from statistics import median

from benchmarks.lab.tables import Line, Table, introduced, newest, percent, row, table

_TRAINED = (
    *("model", "preset", "device", "precision", "batch", "image_size", "tokens", "data"),
    "threads",
)
_SETTING = (*_TRAINED, "arm", "epoch")
_BASE, _OURS, _FAILED = "epoch boundary", "auto", "failed"

_ARMS = """\
The paper's models in its three arms: CheckFreq at the interval it chose to keep its bound, the same
interval with training stopped until each checkpoint is durable, and one such checkpoint per
epoch (`k` is its length). Recovery is the average cost of a failure: the restore, half an interval,
and the time to durable. The start of the process is not counted: it is the same in all arms, and
`benchmarks.interruptions` measures it.
"""

_STALLS = """\
The cost of one of these CheckFreq checkpoints: at the boundary, waiting at the weight update, and
the slowdown of the rest of training (a difference of noisy figures). The storage limit is a raw
write of the same bytes, in iterations.
"""


def arms(lines: list[Line]) -> str:
    """A row per model and arm; below them, how much faster recovery is."""
    columns = (
        "model | iteration | arm | k | overhead | 95 % interval | with disturbed rounds | restore "
        "| durable after | recovery"
    )
    lines = _current(lines)
    rows = [_failure(x) if x["arm"] == _FAILED else _arm(x) for x in lines]
    return introduced(_ARMS, table(columns, [*rows, *_gained(lines)], lines))


def _arm(line: Line) -> str:
    all_rounds = line.get("overhead_all")
    return row(
        _model(line),
        f"{line['iteration_ms']:.0f} ms",
        line["arm"] + (f", {line['epoch']}" if "epoch" in line else ""),
        f"{line['k']:,}" + (f", {line['reason']}" if "reason" in line else ""),
        percent(line["overhead"]),
        f"{percent(line['low'])} to {percent(line['high'])}",
        "-" if all_rounds is None else percent(all_rounds),
        f"{line['restore_s']:.2f} s",
        f"{line['durable_s']:.2f} s",
        f"{line['recovery_s']:,.1f} s",
    )


def _failure(line: Line) -> str:
    return row(_model(line), "-", f"failed: {line['failed']}", *("-" for _ in range(7)))


def _current(lines: list[Line]) -> list[Line]:
    """The newest line of each setting; a failure counts until that training has been measured."""
    last = {_trained(x): x["arm"] for x in lines}
    return [
        x for x in newest(lines, *_SETTING) if x["arm"] != _FAILED or last[_trained(x)] == _FAILED
    ]


def _trained(line: Line) -> tuple[object, ...]:
    return tuple(line.get(name) for name in _TRAINED)


def stalls(lines: list[Line]) -> str:
    """A row per model: what a checkpoint costs, and the target."""
    columns = (
        "model | parameters | state | cost | boundary | wait | rest | storage limit | target | met"
    )
    lines = ours(lines)
    rows = [
        row(
            _model(x),
            f"{x['parameters'] / 1e6:.1f} M",
            f"{x['state_mib']:,.0f} MiB",
            *(f"{x[name]:.1f} ms" for name in ("cost_ms", "boundary_ms", "wait_ms", "rest_ms")),
            f"{x['storage_limit']:.2f}",
            x["target"],
            "yes" if x["met"] else "no",
        )
        for x in lines
    ]
    return introduced(_STALLS, table(columns, rows, lines))


def ours(lines: list[Line]) -> list[Line]:
    """The newest line of every training at the interval that AUTO chose."""
    return [x for x in newest(lines, *_SETTING) if x["arm"] == _OURS]


def gains(lines: list[Line]) -> dict[str, list[float]]:
    """Recovery with a checkpoint per epoch / ours, for every training that has both, by epoch."""
    recovery_s = {_trained(x): x["recovery_s"] for x in lines if x["arm"] == _OURS}
    found: dict[str, list[float]] = {}
    for x in newest(lines, *_SETTING):
        if x["arm"] == _BASE and _trained(x) in recovery_s:
            found.setdefault(x["epoch"], []).append(x["recovery_s"] / recovery_s[_trained(x)])
    return found


def _gained(lines: list[Line]) -> list[str]:
    """A sentence after the rows for each kind of epoch; assumed epochs are named as such."""
    found = gains(lines)
    set_by_us = [epoch for epoch in found if epoch.endswith(" iterations")]
    real = [ratio for epoch in found if epoch not in set_by_us for ratio in found[epoch]]
    sentences = [_sentence("a checkpoint per epoch", real)] if real else []
    sentences += [
        _sentence(f"a checkpoint per epoch, assuming an epoch of {epoch}", found[epoch])
        for epoch in set_by_us
    ]
    return ["", *sentences] if sentences else []


def _sentence(base: str, ratios: list[float]) -> str:
    low, high, middle = (_times(x) for x in (min(ratios), max(ratios), median(ratios)))
    return f"Recovery is {low} to {high} times as fast as with {base} (median {middle})."


def _times(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.1f}"


def _model(line: Line) -> str:
    """The training in words; on a CPU, with the number of threads and cores."""
    side = line.get("image_size")
    size = f"{line['tokens']} tokens" if side is None else f"{side} px"
    threads, cores = line["threads"], line["machine"]["cores"]
    of = f", {threads} thread{'s' * (threads != 1)} of {cores} cores"
    data = ", images" if line["data"] == "images" else ""
    at = of if line["device"] == "cpu" else ""
    return f"{line['model']}, {line['device']}{at}, {line['batch']} × {size}{data}"


TABLES = {"paper": Table("paper", arms), "paper_stalls": Table("paper", stalls)}
