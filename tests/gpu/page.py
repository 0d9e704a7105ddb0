"""The page of a GPU proof, from its lines alone: what was run where, and what came out.

    python -m tests.gpu.page build/gpu-proof.jsonl

Markdown. Of each part the last run in the files counts.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.gpu.runner import as_line

Line = Mapping[str, Any]

#: Not columns of the tables.
_OF_EVERY_LINE = ("stage", "at_s")


def main() -> None:
    """Print the page of some files."""
    print(page(read(map(Path, sys.argv[1:]))))


def read(paths: Iterable[Path]) -> list[Line]:
    """Their lines; one that was cut short is left out."""
    texts = [text for path in paths for text in path.read_text().splitlines()]
    return [line for text in texts if (line := as_line(text)) is not None]


def page(lines: Sequence[Line]) -> str:
    """The whole page."""
    return "\n".join("\n".join(_of_run(run)) for run in _runs(lines))


def _runs(lines: Sequence[Line]) -> list[list[Line]]:
    """The lines of the last run of each part, by part; the first of each begins it."""
    runs: dict[int, list[Line]] = {}
    current: list[Line] = []
    for line in lines:
        if line.get("event") == "run":
            current = runs[line["part"]] = []
        current.append(line)
    return [runs[part] for part in sorted(runs)]


def _of_run(run: Sequence[Line]) -> Iterator[str]:
    about, stages = run[0], run[0]["stages"]
    own = {name: [line for line in run[1:] if line["stage"] == name] for name in stages}
    results = {name: _result(lines) for name, lines in own.items()}
    verdict = "PASSED" if all(result == "passed" for result in results.values()) else "FAILED"
    dry = ", a dry run without a device" if about["dry"] else ""
    yield f"# checkfreq on a GPU, part {about['part']}: {verdict}{dry}\n"
    yield from _table(
        {"stage": name, "result": results[name], "seconds": _ending(lines).get("seconds")}
        for name, lines in own.items()
    )
    for name, lines in own.items():
        if any("event" not in line for line in lines) or results[name] != "passed":
            yield f"## {name}\n"
            yield from _of_stage(lines)


def _ending(lines: Sequence[Line]) -> Line:
    return next((line for line in lines if line.get("event") in ("ends", "skipped")), {})


def _result(lines: Sequence[Line]) -> str:
    if not lines:
        return "not reached"
    end = _ending(lines)
    if not end:
        return "cut off"
    if end["event"] == "skipped":
        return f"skipped: {end['why']}"
    return "passed" if end["ok"] else f"failed: {end['problem']}"


def _of_stage(lines: Sequence[Line]) -> Iterator[str]:
    """The tests, tables of the other lines, and the last output of what went wrong."""
    yield from _of_tests([line for line in lines if "test" in line])
    for rows in _alike(line for line in lines if "test" not in line and "event" not in line):
        yield from _table(rows)
    if output := _ending(lines).get("output"):
        yield "\n".join(["```text", *output, "```", ""])


def _alike(lines: Iterable[Line]) -> list[list[Line]]:
    """Lines that say the same kind of thing, or have the same fields, are rows of one table."""
    tables: list[list[Line]] = []
    known: dict[object, list[Line]] = {}
    for line in lines:
        row = {name: value for name, value in line.items() if name not in _OF_EVERY_LINE}
        fields = tuple(row)
        kind = row.get("what", fields)
        if kind not in known and fields not in known:
            tables.append([])
        rows = known.get(kind) or known.get(fields) or tables[-1]
        known[kind] = known[fields] = rows
        rows.append(row)
    return tables


def _of_tests(lines: Sequence[Line]) -> Iterator[str]:
    ends = {line["test"]: line for line in lines}
    if not ends:
        return
    counts = Counter(line["outcome"] for line in ends.values())
    reasons = Counter(line["why"] for line in ends.values() if line["outcome"] == "skipped")
    yield "Tests: " + ", ".join(f"{num} {outcome}" for outcome, num in counts.items()) + "\n"
    listed = [f"- skipped, {num}: {why}" for why, num in reasons.items()]
    for name, line in ends.items():
        if line["outcome"] in ("failed", "started"):
            listed.append(f"- **{line['outcome']}** `{name}`: {line.get('why', 'it did not end')}")
    if listed:
        yield "\n".join([*listed, ""])


def _table(rows: Iterable[Line]) -> Iterator[str]:
    """A table with every column that a row has; ``-`` where another row lacks it."""
    rows = list(rows)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for row in rows:
        cells = [_claim(row) if name == "ok" else _cell(row.get(name)) for name in columns]
        yield f"| {' | '.join(cells)} |"
    yield ""


def _claim(row: Line) -> str:
    """Whether it holds, in bold if not."""
    return "**no**" if row.get("ok") is False else _cell(row.get("ok"))


def _cell(value: Any) -> str:
    match value:
        case None | "" | []:
            return "-"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.4g}"
        case list():
            return ", ".join(map(_cell, value))
    return str(value).replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    main()
