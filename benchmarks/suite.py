"""The suite: its benchmarks, their options, and how they are run.

A run appends the lines of each benchmark to its result file if that benchmark succeeded, and then
rewrites the tables and plots of the pages. The most informative benchmarks come first; under a time
budget, those that would not finish are skipped.
"""

from __future__ import annotations

import ast
import math
import os
import shlex
import signal
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
    """One benchmark with its options; ``seconds`` is roughly how long it takes."""

    name: str
    options: str
    seconds: float

    @property
    def command(self) -> str:
        """The command as a reader would type it."""
        return f"python -m benchmarks.{self.name} {self.options}".rstrip()


#: ``make bench``: on 2 cores without a GPU, about 20 minutes in all; the most telling come first.
ON_CPU = (
    Call("compare", "--gib 0.5 --rounds 2 --restores 2", 220),
    Call("frequency", "--seconds 170 --k 8", 215),
    Call("paper", "--seconds 13", 170),
    Call("interruptions", "--images 72 --every 13", 150),
    Call("goodput", "--seeds 1", 35),
    Call("interference", "--settle 15 --phase 20", 155),
    Call("scale", "--gib 0.1 1 2 --rounds 2", 110),
    Call("limits", "--rounds 3", 60),
    Call("memory", "--mib 16", 20),
    Call("first", "--mib 1024", 25),
    Call("startup", "", 5),
    Call("frozen", "--rounds 1", 30),
)

#: Not in ``make bench``: longer runs of some of those, ranks, data, and the policy.
LONGER = (
    Call("compare", "--rounds 5", 600),
    Call("frequency", "--seconds 600", 700),
    Call("paper", "--seconds 40", 420),
    Call("interruptions", "--images 200 --epochs 2 --every 30", 260),
    Call("interference", "--settle 20 --phase 25", 190),
    Call("scale", "--gib 4 8 --tensors --rounds 2", 200),
    Call("restore", "--gib 0.5 1 --rounds 5", 500),
    Call("restore", "--gib 4 --rounds 3", 700),
    Call("restarts", "--mib 85", 240),
    Call("restarts", "--mib 1024", 420),
    Call("overhead", "--model resnet18 --live --max-seconds 300", 420),
    Call("sharded", "--rounds 4", 300),
    Call("ranks", "", 420),
    Call("node", "", 90),
    Call("ranks", "--records 16 256 4096", 400),
    Call("iterators", "", 300),
    Call("endurance", "", 900),
    Call("mirror", "", 60),
    Call("decision", "", 45),
    Call("lightning_loop", "", 60),
    Call("callback", "", 60),
    Call("simulate", "", 40),
    Call("traces", "", 30),
    Call("interval", "", 120),
    Call("report", "", 45),
    Call("watch", "", 300),
    Call("crashtest", "", 260),
)


def summary(name: str) -> str:
    """The first line of a benchmark's docstring, without importing it."""
    tree = ast.parse((ROOT / "benchmarks" / name / "measure.py").read_text())
    return (ast.get_docstring(tree) or "").partition("\n")[0]


def chosen(calls: Sequence[Call], names: Iterable[str]) -> list[Call]:
    """The calls of the named benchmarks, or all of them. ValueError: an unknown name."""
    wanted = list(names)
    known = sorted({call.name for call in calls})
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(f"no benchmark {', '.join(unknown)} here; there are {', '.join(known)}")
    return [call for call in calls if not wanted or call.name in wanted]


#: The exit status of timeout(1).
OVERRAN = 124
_CLEAN_UP_S = 90.0
#: Runs a call within a time limit in seconds; returns its status and its output.
Run = Callable[[Call, float], tuple[int, str]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a call; ``seconds`` is None if it was skipped."""

    call: Call
    seconds: float | None
    status: int = 0


def run_all(
    calls: Sequence[Call],
    *,
    results: Path = RESULTS,
    budget_s: float | None = None,
    run: Run | None = None,
) -> list[Outcome]:
    """Run the calls one after the other; failures and timeouts are reported at the end.

    Only a successful call appends its lines.
    """
    until_s = math.inf if budget_s is None else time.monotonic() + budget_s
    outcomes = []
    for call in calls:
        left_s = until_s - time.monotonic()
        if call.seconds > left_s:
            print(f"{call.command}: no time left (about {call.seconds:.0f} s)", file=sys.stderr)
            outcomes.append(Outcome(call, None))
        else:
            outcomes.append(_run_one(call, results, left_s, run or in_a_process))
    return outcomes


def _run_one(call: Call, results: Path, left_s: float, run: Run) -> Outcome:
    print(call.command, file=sys.stderr)
    began_s = time.monotonic()
    status, lines = run(call, left_s)
    if status == 0:
        _append(results / f"{call.name}.jsonl", lines)
    return Outcome(call, time.monotonic() - began_s, status)


def in_a_process(call: Call, limit_s: float) -> tuple[int, str]:
    """The exit status and standard output; OVERRAN if the time limit was reached."""
    command = [sys.executable, "-W", "ignore", "-m", f"benchmarks.{call.name}"]
    process = subprocess.Popen(
        [*command, *shlex.split(call.options)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,  # an interrupt is passed on once, below
    )
    try:
        lines, _ = process.communicate(timeout=None if math.isinf(limit_s) else limit_s)
    except subprocess.TimeoutExpired:
        _stop(process)
        return OVERRAN, ""
    except BaseException:
        _stop(process)
        raise
    return process.returncode, lines


def _stop(process: subprocess.Popen[str]) -> None:
    """Interrupt it, and give it some time to clean up."""
    process.send_signal(signal.SIGINT)
    try:
        process.communicate(timeout=_CLEAN_UP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _append(path: Path, lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(lines)
