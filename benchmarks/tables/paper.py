"""Tables of `benchmarks.paper`."""

from __future__ import annotations

from statistics import median

from benchmarks.tables.common import Line, introduced, newest, percent, row, table

_SETTING = ("model", "arm", "preset", "device", "precision", "batch", "image_size", "tokens")
_BASE, _OURS = "epoch boundary", "auto"

_ARMS = """\
The paper's models in its three arms: CheckFreq at the interval it chose to keep its bound, the same
interval with training standing still until each checkpoint is durable, and one such checkpoint per
epoch (`k` is its length). Recovery is what a failure costs on average: the restore, half an
interval, and the time to durable.
"""

_STALLS = """\
One checkpoint of CheckFreq there, and what it costs: at the boundary, waiting at the weight update,
and by which the rest of training is slower (a difference of noisy figures). The storage limit is a
raw write of the same bytes, in iterations.
"""


def arms(lines: list[Line]) -> str:
    """A row per model and arm; below them, how much faster recovery is."""
    columns = "model | T | what | k | overhead | 95 % interval | restore | durable after | recovery"
    lines = newest(lines, *_SETTING)
    rows = [
        row(
            _model(x),
            f"{x['iteration_ms']:.0f} ms",
            x["arm"],
            f"{x['k']:,}" + (f", {x['reason']}" if "reason" in x else ""),
            percent(x["overhead"]),
            f"{percent(x['low'])} to {percent(x['high'])}",
            f"{x['restore_s']:.2f} s",
            f"{x['durable_s']:.2f} s",
            f"{x['recovery_s']:,.1f} s",
        )
        for x in lines
    ]
    return introduced(_ARMS, table(columns, [*rows, *_gained(lines)], lines))


def stalls(lines: list[Line]) -> str:
    """A row per model: what a checkpoint costs, and the target."""
    columns = (
        "model | parameters | state | cost | boundary | wait | rest | storage limit | target | met"
    )
    lines = [x for x in newest(lines, *_SETTING) if x["arm"] == _OURS]
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


def gains(lines: list[Line]) -> dict[tuple[object, ...], float]:
    """Recovery per epoch / ours, by what was trained, where both were measured."""
    found: dict[tuple[object, ...], dict[str, float]] = {}
    for x in newest(lines, *_SETTING):
        setting = tuple(x.get(name) for name in _SETTING if name != "arm")
        found.setdefault(setting, {})[x["arm"]] = x["recovery_s"]
    both = {setting: arms for setting, arms in found.items() if arms.keys() >= {_BASE, _OURS}}
    return {setting: arms[_BASE] / arms[_OURS] for setting, arms in both.items()}


def _gained(lines: list[Line]) -> list[str]:
    """Empty without a pair, else a sentence behind the rows."""
    ratios = list(gains(lines).values())
    if not ratios:
        return []
    return [
        "",
        f"Recovery is {_times(min(ratios))} to {_times(max(ratios))} times as fast as with a "
        f"checkpoint per epoch (median {_times(median(ratios))}).",
    ]


def _times(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 10 else f"{ratio:.1f}"


def _model(line: Line) -> str:
    side = line.get("image_size")
    size = f"{line['tokens']} tokens" if side is None else f"{side} px"
    return f"{line['model']}, {line['device']}, {line['batch']} × {size}"
