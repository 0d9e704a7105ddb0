"""Tables of `benchmarks.frequency`: all arms at equal intervals, and policies in our engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from benchmarks.lab.tables import Line, Table, milliseconds, percent, row, seconds, table

_SETTING = ("device", "model", "batch", "image_size", "tokens", "amp", "threads", "bound")
#: In the order in which a run prints them.
_KINDS = ("arm", "equal", "policy", "target")


def arms(lines: list[Line]) -> str:
    """A table per setting, followed by whether the targets are met."""
    return "\n".join(_of_each_setting(lines, _arms))


def policies(lines: list[Line]) -> str:
    """A table per setting of what AUTO and the paper's policies choose."""
    return "\n".join(_of_each_setting(lines, _policies))


def _of_each_setting(lines: list[Line], made: Callable[[list[Line]], str]) -> Iterator[str]:
    """Only the last run of each setting counts: earlier runs may have used other intervals."""
    groups: dict[tuple[object, ...], list[Line]] = {}
    for line in lines:
        groups.setdefault(tuple(line.get(name) for name in _SETTING), []).append(line)
    for group in groups.values():
        if text := made(_last_run(group)):
            yield f"\n{_heading(group[-1])}\n\n{text}"


def _last_run(lines: Sequence[Line]) -> list[Line]:
    """The last run: it prints its lines kind by kind, so an earlier kind begins a new run."""
    run: list[Line] = []
    for line in lines:
        if run and (_how(line) != _how(run[-1]) or _kind(line) < _kind(run[-1])):
            run = []
        run.append(line)
    return run


def _kind(line: Line) -> int:
    return _KINDS.index(line["what"])


def _how(line: Line) -> tuple[str, str]:
    return line["command"], line["commit"]


def _heading(line: Line) -> str:
    size = line.get("image_size")
    each = f"{line['tokens']} tokens" if size is None else f"{size} x {size} pixels"
    where = f"{', AMP' if line['amp'] else ''}, on {line['device']}"
    cores = f"training on {line['threads']} of {line['machine']['cores']} cores"
    state = f"{line['state_mib']:g} MiB of state, {line['iteration_ms']:.1f} ms per iteration"
    bound = f"bound {percent(line['bound'])}"
    return f"{line['model']}, batch {line['batch']}, {each}{where}: {cores}, {state}, {bound}:"


def _arms(lines: list[Line]) -> str:
    equal = {(x["arm"], x["k"]): x for x in lines if x["what"] == "equal"}
    intervals = sorted({k for _, k in equal})
    at_each = "".join(f" | overhead at k = {k}" for k in intervals)
    columns = (
        f"library | one checkpoint costs | durable after{at_each} | smallest k by cost | tried "
        "| overhead there | lost by a kill"
    )
    rows = []
    for x in sorted(_of("arm", lines), key=lambda x: x["k"] or x["k_min"]):
        cells = [_overhead(equal.get((x["arm"], k))) for k in intervals]
        rows.append(
            row(
                x["arm"] if x["synced"] else f"{x['arm']} (not synced)",
                _cost(x),
                f"{x['durable_ms']:.0f} ms",
                *cells,
                x["k_min"],
                x["k"] or "-",
                _overhead(x),
                seconds(x["lost_s"]),
            )
        )
    return table(columns, [*rows, "", *map(_target, _of("target", lines))], lines)


def _target(line: Line) -> str:
    lower = ", ".join(
        f"at k = {each['k']} {'yes' if each['met'] else 'no'}"
        f"{'' if each['apart'] else ' (not significant)'}"
        for each in line["equal"]
    )
    return (
        f"Smallest k, ours / the best of equal durability ({line['rival']}): {line['k']} / "
        f"{line['k_rival']} = {line['ratio']:.2f}; target: at most {line['allowed']:g}, "
        f"{'met' if line['met'] else 'missed'}. Overhead below every such library's: {lower}.  "
    )


def _policies(lines: list[Line]) -> str:
    found = _of("policy", lines)
    rows = [
        row(
            x["arm"],
            x["k_first"] or "-",
            x["k"] or "none",
            x["windows"] or "untuned",
            _overhead(x),
            seconds(x["lost_s"]),
        )
        for x in found
    ]
    columns = "policy | first k | final k | windows for tuning | overhead | lost by a kill"
    return table(columns, rows, found)


def _of(what: str, lines: Sequence[Line]) -> list[Line]:
    return [line for line in lines if line["what"] == what]


def _overhead(line: Line | None) -> str:
    if line is None or line["overhead"] is None:
        return "-"
    found = percent(line["overhead"])
    if line["low"] is None:
        return f"{found} (interval unknown: {_counted(line['rounds'], 'round')})"
    return f"{found} ({percent(line['low'])} to {percent(line['high'])})"


def _cost(line: Line) -> str:
    found, low = milliseconds(line["cost_ms"]), line["cost_low_ms"]
    if low is None:
        return f"{found} (interval unknown: {_counted(line['saves'], 'save')})"
    return f"{found} ({milliseconds(low)} to {milliseconds(line['cost_high_ms'])})"


def _counted(count: int, name: str) -> str:
    return f"{count} {name}{'' if count == 1 else 's'}"


TABLES = {"frequency": Table("frequency", arms), "policies": Table("frequency", policies)}
