"""Writes the result tables of README.md from benchmarks/results/*.jsonl: never typed by hand.

    python -m benchmarks.tables

A table stands between ``<!-- table NAME -->`` and ``<!-- end -->``. Of several lines with the
same setting the last one counts. Without a line there is no table, nor the text that belongs to it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_TABLE = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

Line = dict[str, Any]


def main() -> None:
    """Rewrite README.md in place."""
    readme = ROOT / "README.md"
    readme.write_text(with_tables(readme.read_text()))


def with_tables(text: str, *, results: Path = RESULTS) -> str:
    """The text with every table made anew from the committed result lines."""
    return _TABLE.sub(lambda m: f"{m[1]}{_TABLES[m[2]](results)}{m[3]}", text)


def _all_lines(benchmark: str, results: Path) -> list[Line]:
    path = results / f"{benchmark}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _lines(benchmark: str, results: Path) -> list[Line]:
    lines = _all_lines(benchmark, results)
    latest = {tuple(x.get(k) for k in ("device", "gib", "mib", "arm")): x for x in lines}
    return list(latest.values())


def _overhead(results: Path) -> str:
    columns = (
        "model | bound | runs within | k | overhead, median | highest estimate | highest limit"
    )
    groups: dict[tuple[str, float], list[Line]] = {}
    newest = {
        tuple(x.get(k) for k in (*_SETTING, "run")): x for x in _all_lines("overhead", results)
    }
    lines = [x for x in newest.values() if x["arm"] in ("frozen", "live")]
    for line in lines:
        groups.setdefault((line["model"], line["bound"]), []).append(line)
    rows = []
    for (model, bound), runs in sorted(groups.items()):
        ks = [x["k"] for x in runs]
        highs = [x["high"] for x in runs if x["high"] is not None]
        rows.append(
            f"| {model} | {_percent(bound)} | {sum(x['met'] for x in runs)} of {len(runs)} "
            f"| {_range(ks)} | {_percent(median(x['estimate'] for x in runs))} "
            f"| {_percent(max(x['estimate'] for x in runs))} "
            f"| {_percent(max(highs)) if highs else 'unknown'} |"
        )
    return _table(columns, rows, lines)


_SETTING = ("arm", "model", "bound", "threads", "batch")


def _interference(results: Path) -> str:
    columns = "what | phase | iteration | interval | checkpoints | overhead | its second half"
    newest = {(x["arm"], x["phase"]): x for x in _all_lines("interference", results)}
    lines = list(newest.values())
    rows = [
        f"| {x['arm']} | {x['phase']} | {x['iteration_ms']:.0f} ms | {x['k_start']} → {x['k_end']} "
        f"| {x['checkpoints']} | {_percent(x['overhead'])} | {_percent(x['overhead_late'])} |"
        for x in lines
    ]
    return _table(columns, rows, lines)


def _decision(results: Path) -> str:
    columns = "per iteration | slowest | allowed | iterations | memory growth"
    lines = _lines("decision", results)
    rows = [
        f"| {x['added_us']:.1f} µs | {x['added_us_worst']:.1f} µs | {x['allowed_us']:.0f} µs "
        f"| {x['long']:,} | {x['python_grew_bytes'] / 1024:.1f} KiB in Python, "
        f"{x['process_grew_bytes'] / 1024:.0f} KiB in all |"
        for x in lines
    ]
    return _table(columns, rows, lines)


def _first(results: Path) -> str:
    columns = "device | state | slots ready | allowed | first durable after | allowed"
    lines = sorted(_lines("first", results), key=lambda x: (x["device"], x["mib"]))
    rows = [
        f"| {x['device']} | {x['mib']:g} MiB | {x['arena_s_per_gib']:.2f} s/GiB "
        f"| {x['arena_allowed_s_per_gib']:.0f} s/GiB | {x['first_durable_s']:.2f} s "
        f"| {x['allowed_s']:.2f} s |"
        for x in lines
    ]
    return _table(columns, rows, lines)


def _newest(what: str, results: Path) -> list[Line]:
    """The lines of one part of the iterators' benchmark."""
    lines = [x for x in _all_lines("iterators", results) if x["what"] == what]
    return list({tuple(x.get(k) for k in ("arm", "n", "place")): x for x in lines}.values())


def _resume(results: Path) -> str:
    lines = _newest("resume", results)
    places = sorted({x["place"] for x in lines})
    rows: dict[tuple[str, int], dict[float, Line]] = {}
    for x in lines:
        rows.setdefault((x["arm"], x["n"]), {})[x["place"]] = x
    columns = " | ".join(["loader", "samples", *(f"at {100 * place:g} %" for place in places)])
    cells = [
        f"| {arm} | {n:,} | {' | '.join(_milliseconds(row[place]) for place in places)} |"
        for (arm, n), row in sorted(rows.items(), key=lambda item: item[0][1])
    ]
    reasons = sorted({f"Not possible: {x['why_not']}.  " for x in lines if "why_not" in x})
    return _table(columns, [*cells, "", *reasons] if reasons else cells, lines)


def _milliseconds(line: Line) -> str:
    return "not possible" if line["milliseconds"] is None else f"{line['milliseconds']:.1f} ms"


def _loading(results: Path) -> str:
    columns = "loader | images/s with us | added time | 95 % interval | allowed"
    lines = _newest("throughput", results)
    rows = [
        f"| {x['arm']} | {x['images_per_s']:,.0f} | {_percent(x['added'])} "
        f"| {_percent(x['low'])} to {_percent(x['high'])} | {_percent(x['allowed'])} |"
        for x in lines
    ]
    return _table(columns, rows, lines)


def _data_costs(results: Path) -> str:
    columns = "what | cost"
    orders, costs, samples = (_newest(what, results) for what in ("order", "cost", "sample"))
    rows = [
        *(
            f"| ids of {x['n']:,} in batches of {x['batch']} | {x['million_ids_per_s']:.1f} M/s |"
            for x in orders
        ),
        *(
            f"| {x['arm']} | {x['microseconds']:.1f} µs"
            f"{', {} bytes'.format(x['bytes']) if x['bytes'] else ''} |"
            for x in costs
        ),
        *(f"| a sample, {x['arm']} | {x['microseconds']:.1f} µs |" for x in samples),
    ]
    return _table(columns, rows, [*orders, *costs, *samples])


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2f} %"


def _range(values: list[int]) -> str:
    return str(min(values)) if min(values) == max(values) else f"{min(values)} to {max(values)}"


def _throughput(benchmark: str, results: Path) -> str:
    columns = "state | what | GB/s | against the raw disk"
    lines = sorted(
        _lines(benchmark, results), key=lambda x: (x["gib"], -x["throughput_against_raw"])
    )
    rows = [
        f"| {x['gib']:g} GiB | {x['arm']} | {x['gb_per_s']:.2f} "
        f"| {x['throughput_against_raw']:.2f} |"
        for x in lines
    ]
    return _table(columns, rows, lines)


def _stall(results: Path) -> str:
    columns = "device | state | what | held per checkpoint | of an iteration"
    lines = sorted(_lines("stall", results), key=lambda x: (x["device"], x["gib"], x["held_ms"]))
    rows = [
        f"| {x['device']} | {x['gib']:g} GiB | {x['arm']} | {x['held_ms']:.1f} ms "
        f"| {100 * x['held_against_iteration']:.2f} % |"
        for x in lines
    ]
    return _table(columns, rows, lines)


_SHARDED = """\
Several ranks: one save of a state that is sharded as FSDP2 does it, or replicated as DDP does
(`split`: each rank writes a part), beside `torch.distributed.checkpoint` with as many writer
threads, synced files and cached plans (`aside`: staging in a thread) and a raw direct write of the
same bytes by the same processes. Training goes on meanwhile; of several ranks the slowest counts,
from its call until all is committed. `held` is what the library's calls take, `added` what all
iterations until then took longer; the first save is told apart:
"""


def _sharded(results: Path) -> str:
    columns = (
        "state | ranks | what | held per save | the first | added in all | durable after "
        "| the first | against the raw disk"
    )
    newest = {
        tuple(x[k] for k in ("what", "mib", "world", "arm")): x
        for x in _all_lines("sharded", results)
        if x["what"] != "meeting"
    }
    lines = sorted(
        newest.values(), key=lambda x: (x["what"] != "sharded", x["world"], x["durable_s"])
    )
    rows = [
        f"| {x['what']}, {x['mib']:g} MiB | {x['world']} | {x['arm']} | {_held(x, 'held_ms')} "
        f"| {_held(x, 'first_held_ms')} | {_held(x, 'added_ms')} | {x['durable_s']:.2f} s "
        f"| {x['first_durable_s']:.2f} s | {x['durable_against_raw']:.2f}{_persist_alone(x)} |"
        for x in lines
    ]
    return _introduced(_SHARDED, _table(columns, rows, lines))


def _held(line: Line, figure: str) -> str:
    return f"{line[figure]:.1f} ms" if figure in line else "-"


def _persist_alone(line: Line) -> str:
    alone = line.get("persist_against_raw")
    return f" (persist alone {alone:.2f})" if alone is not None else ""


_MEETING = """\
A meeting of the ranks, when a checkpoint may be due or `meet_every_s` has passed, with nothing to
be done (median):
"""


def _meeting(results: Path) -> str:
    newest = {x["world"]: x for x in _all_lines("sharded", results) if x["what"] == "meeting"}
    lines = [line for _, line in sorted(newest.items())]
    rows = [f"| {x['world']} | {x['median_ms']:.2f} ms | {x['meetings']} |" for x in lines]
    return _introduced(_MEETING, _table("ranks | a meeting | measured", rows, lines))


def _introduced(text: str, table: str) -> str:
    return f"\n{text}\n{table}" if table else ""


def _memory(results: Path) -> str:
    columns = "state | checkpoints | used | allowed | worker alone | growth"
    lines = _lines("memory", results)
    rows = [
        f"| {x['mib']:g} MiB × {x['num_slots']} slots | {x['saves']} | {x['total_mib']:.0f} MiB "
        f"| {x['allowed_mib']:.0f} MiB | {x['worker_private_mib']:.0f} MiB "
        f"| {x['trainer_grew_mib'] + x['worker_grew_mib']:.1f} MiB |"
        for x in lines
    ]
    return _table(columns, rows, lines)


def _startup(results: Path) -> str:
    columns = "what | median | slowest"
    lines = _lines("startup", results)
    rows = [f"| {x['arm']} | {x['median_s']:.3f} s | {x['max_s']:.3f} s |" for x in lines]
    return _table(columns, rows, lines)


def _simulate(results: Path) -> str:
    lines = [line for line in _lines("simulate", results) if "phases" in line]
    columns = "on paper | overhead / bound | above it, in checkpoints | interval / the oracle's"
    rows = []
    for x in lines:
        settled = ", ".join(
            f"{phase['planned_steps']:g} / {phase['oracle_steps']}" for phase in x["phases"]
        )
        rows.append(
            f"| {x['arm']} | {100 * x['largest_overhead']:.2f} % / {100 * x['max_overhead']:g} % "
            f"| {max(0.0, x['worst_excess_in_checkpoints']):.2f} | {settled} |"
        )
    return _table(columns, rows, lines)


def _goodput(results: Path) -> str:
    lines = [line for line in _lines("simulate", results) if "mtbf_s" in line]
    arms = list(lines[0]["goodput"]) if lines else []
    columns = f"goodput | {' | '.join(arms)}"
    rows = [
        f"| {x['arm']} | {' | '.join(_percent(x['goodput'][arm]) for arm in arms)} |" for x in lines
    ]
    return _table(columns, rows, lines)


def _table(columns: str, rows: list[str], lines: list[Line]) -> str:
    """``columns`` are names between bars; under the rows stands how ``lines`` were measured."""
    if not lines:
        return ""
    rule = "|---" * (columns.count(" | ") + 1) + "|"
    return "\n".join([f"| {columns} |", rule, *rows, "", *_how(lines)])


def _how(lines: list[Line]) -> list[str]:
    said = sorted({f"`{x['command']}`, commit {x['commit']}, {_machine(x)}" for x in lines})
    return [f"{how}  " for how in said] + [""]


def _machine(line: Line) -> str:
    machine, versions = line["machine"], line["versions"]
    device = f", {machine['accelerator']}" if machine["accelerator"] else ""
    return f"{machine['cores']} cores{device}, torch {versions['torch']}"


_TABLES: dict[str, Callable[[Path], str]] = {
    "persist": lambda results: _throughput("persist", results),
    "restore": lambda results: _throughput("restore", results),
    "stall": _stall,
    "memory": _memory,
    "sharded": _sharded,
    "meeting": _meeting,
    "startup": _startup,
    "simulate": _simulate,
    "goodput": _goodput,
    "overhead": _overhead,
    "interference": _interference,
    "decision": _decision,
    "first": _first,
    "resume": _resume,
    "loading": _loading,
    "data_costs": _data_costs,
}

if __name__ == "__main__":
    main()
