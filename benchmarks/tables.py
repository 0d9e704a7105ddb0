"""Writes the result tables of README.md from benchmarks/results/*.jsonl: never typed by hand.

    python -m benchmarks.tables

A table stands between ``<!-- table NAME -->`` and ``<!-- end -->``. Of several lines with the
same setting the last one counts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
_TABLE = re.compile(r"(<!-- table (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

Line = dict[str, Any]


def main() -> None:
    """Rewrite README.md in place."""
    readme = ROOT / "README.md"
    readme.write_text(with_tables(readme.read_text()))


def with_tables(text: str) -> str:
    """The text with every table made anew from the committed result lines."""
    return _TABLE.sub(lambda m: f"{m[1]}{_TABLES[m[2]]()}{m[3]}", text)


def _lines(benchmark: str) -> list[Line]:
    path = RESULTS / f"{benchmark}.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    latest = {tuple(x.get(k) for k in ("device", "gib", "mib", "arm")): x for x in lines}
    return list(latest.values())


def _throughput(benchmark: str) -> str:
    rows = ["| state | what | GB/s | against the raw disk |", "|---|---|---|---|"]
    lines = sorted(_lines(benchmark), key=lambda x: (x["gib"], -x["throughput_against_raw"]))
    rows += [
        f"| {x['gib']:g} GiB | {x['arm']} | {x['gb_per_s']:.2f} "
        f"| {x['throughput_against_raw']:.2f} |"
        for x in lines
    ]
    return "\n".join([*rows, "", *_how(lines)])


def _stall() -> str:
    rows = [
        "| device | state | what | held per checkpoint | of an iteration |",
        "|---|---|---|---|---|",
    ]
    lines = sorted(_lines("stall"), key=lambda x: (x["device"], x["gib"], x["held_ms"]))
    rows += [
        f"| {x['device']} | {x['gib']:g} GiB | {x['arm']} | {x['held_ms']:.1f} ms "
        f"| {100 * x['held_against_iteration']:.2f} % |"
        for x in lines
    ]
    return "\n".join([*rows, "", *_how(lines)])


def _memory() -> str:
    head = "| state | checkpoints | used | allowed | worker alone | growth |"
    rows = [head, "|---|---|---|---|---|---|"]
    lines = _lines("memory")
    rows += [
        f"| {x['mib']:g} MiB × {x['num_slots']} slots | {x['saves']} | {x['total_mib']:.0f} MiB "
        f"| {x['allowed_mib']:.0f} MiB | {x['worker_private_mib']:.0f} MiB "
        f"| {x['trainer_grew_mib'] + x['worker_grew_mib']:.1f} MiB |"
        for x in lines
    ]
    return "\n".join([*rows, "", *_how(lines)])


def _startup() -> str:
    rows = ["| what | median | slowest |", "|---|---|---|"]
    lines = _lines("startup")
    rows += [f"| {x['arm']} | {x['median_s']:.3f} s | {x['max_s']:.3f} s |" for x in lines]
    return "\n".join([*rows, "", *_how(lines)])


def _simulate() -> str:
    lines = [line for line in _lines("simulate") if "phases" in line]
    head = "| on paper | overhead / bound | above it, in checkpoints | interval / the oracle's |"
    rows = [head, "|---|---|---|---|"]
    for x in lines:
        settled = ", ".join(
            f"{phase['planned_steps']:g} / {phase['oracle_steps']}" for phase in x["phases"]
        )
        rows.append(
            f"| {x['arm']} | {100 * x['largest_overhead']:.2f} % / {100 * x['max_overhead']:g} % "
            f"| {max(0.0, x['worst_excess_in_checkpoints']):.2f} | {settled} |"
        )
    return "\n".join([*rows, "", *_how(lines)])


def _goodput() -> str:
    lines = [line for line in _lines("simulate") if "mtbf_s" in line]
    arms = list(lines[0]["goodput"]) if lines else []
    rows = [f"| goodput | {' | '.join(arms)} |", "|---" * (len(arms) + 1) + "|"]
    rows += [f"| {x['arm']} | {' | '.join(_percent(x, arm) for arm in arms)} |" for x in lines]
    return "\n".join([*rows, "", *_how(lines)])


def _percent(line: Line, arm: str) -> str:
    return f"{100 * line['goodput'][arm]:.1f} %"


def _how(lines: list[Line]) -> list[str]:
    said = sorted({f"`{x['command']}`, commit {x['commit']}, {_machine(x)}" for x in lines})
    return [f"{how}  " for how in said] + [""]


def _machine(line: Line) -> str:
    machine, versions = line["machine"], line["versions"]
    device = f", {machine['accelerator']}" if machine["accelerator"] else ""
    return f"{machine['cores']} cores{device}, torch {versions['torch']}"


_TABLES: dict[str, Callable[[], str]] = {
    "persist": lambda: _throughput("persist"),
    "restore": lambda: _throughput("restore"),
    "stall": _stall,
    "memory": _memory,
    "startup": _startup,
    "simulate": _simulate,
    "goodput": _goodput,
}

if __name__ == "__main__":
    main()
