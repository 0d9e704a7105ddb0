"""The suite: which benchmarks there are, with which options, and one run of them.

A run appends the lines of each benchmark to its result file once it has ended well, and then
writes the tables and plots of the pages anew. Benchmarks come in order of what they tell; with a
time budget those are left out that would not end within it.
"""

from __future__ import annotations

import ast
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True, slots=True)
class Call:
    """One benchmark with its options; ``seconds`` is about how long it takes."""

    name: str
    options: str
    seconds: float

    @property
    def command(self) -> str:
        """As a reader would type it."""
        return f"python -m benchmarks.{self.name} {self.options}".rstrip()


#: ``make bench``: on 2 cores without a GPU, under 20 minutes in all.
ON_CPU = (
    Call("compare", "", 180),
    Call("simulate", "", 20),
    Call("startup", "", 10),
    Call("iterators", "", 200),
    Call("memory", "--mib 16", 20),
    Call("sharded", "--rounds 4", 150),
    Call("decision", "", 30),
    Call("first", "--mib 1024", 30),
    Call("interference", "--settle 20 --phase 25", 190),
)

#: ``make bench-gpu``: what a GPU is needed for.
ON_GPU = (Call("compare", "", 120),)


def summary(name: str) -> str:
    """The first line of a benchmark's docstring, without importing it."""
    tree = ast.parse((ROOT / "benchmarks" / f"{name}.py").read_text())
    return (ast.get_docstring(tree) or "").partition("\n")[0]


def chosen(calls: Sequence[Call], names: Iterable[str]) -> list[Call]:
    """Those of the named benchmarks, all without a name. ValueError: a name that is not there."""
    wanted = list(names)
    known = sorted({call.name for call in calls})
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(f"no benchmark {', '.join(unknown)} here; there are {', '.join(known)}")
    return [call for call in calls if not wanted or call.name in wanted]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a call: ``seconds`` None if there was no time for it."""

    call: Call
    seconds: float | None
    status: int = 0


def run_all(
    calls: Sequence[Call],
    *,
    results: Path = RESULTS,
    budget_s: float | None = None,
    run: Callable[[Call], subprocess.CompletedProcess[str]] | None = None,
) -> list[Outcome]:
    """Run one after the other; what fails is told at the end and leaves no line."""
    until_s = None if budget_s is None else time.monotonic() + budget_s
    outcomes = []
    for call in calls:
        if until_s is not None and time.monotonic() + call.seconds > until_s:
            print(f"{call.command}: no time left (about {call.seconds:.0f} s)", file=sys.stderr)
            outcomes.append(Outcome(call, None))
            continue
        print(f"{call.command}", file=sys.stderr)
        began_s = time.monotonic()
        done = (run or _in_a_process)(call)
        outcomes.append(Outcome(call, time.monotonic() - began_s, done.returncode))
        if done.returncode == 0:
            _append(results / f"{call.name}.jsonl", done.stdout)
    return outcomes


def _in_a_process(call: Call) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.{call.name}"]
    return subprocess.run(
        [*command, *shlex.split(call.options)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )


def _append(path: Path, lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(lines)
