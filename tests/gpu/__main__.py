"""Run what needs a GPU, and end with one page to send.

    python -m tests.gpu --out build/test-gpu.txt
    python -m tests.gpu --alone      each test in a process of its own

The tests, then a measurement of this device, then the comparison with other libraries; each is run
even if one before it failed. Exits with 1 unless all was run and passed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tests.gpu.outcomes import VARIABLE
from tests.gpu.page import NO_DEVICE, ROOT, Results, Step, about_this_machine, is_good, page

PYTEST = ("-m", "pytest", "-m", "gpu", "-p", "tests.gpu.outcomes")
PATHS = ("tests/gpu", "tests/contract/test_state.py")
_KEPT_LINES = 25
_CLEAN_UP_S = 20.0


@dataclass(frozen=True, slots=True)
class Task:
    """Arguments of Python, and the seconds that it may take."""

    name: str
    arguments: tuple[str, ...]
    limit_s: float


#: Meant to fit 9 minutes on an H100 with 16 cores.
MEASUREMENTS = (
    Task("benchmarks.device", ("-m", "benchmarks.device", "--gib", "1", "--saves", "5"), 60.0),
    Task("benchmarks.compare", ("-m", "benchmarks.compare", "--rounds", "2"), 150.0),
)
TESTS = Task("tests", (*PYTEST, *PATHS), 330.0)


def main(argv: Sequence[str] | None = None) -> int:
    """Run everything, print the page, and write it."""
    args = _arguments(argv)
    about = about_this_machine()
    has_device = about["device"] != NO_DEVICE
    if args.alone:
        tests, steps = run_all(_alone(), [])
    else:
        tests, steps = run_all([TESTS], MEASUREMENTS if has_device else [])
    text = page(about, tests, steps)
    print(f"\n{text}", flush=True)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(text)
    print(f"This page is in {args.out}.")
    return int(not is_good(tests, steps, device=has_device))


def run_all(tasks: Sequence[Task], measurements: Sequence[Task]) -> tuple[Results, list[Step]]:
    """Run pytest once for each task, then the measurements, whatever fails."""
    with tempfile.TemporaryDirectory(prefix="test-gpu-") as scratch:
        outcomes = Path(scratch) / "outcomes.jsonl"
        outcomes.touch()
        steps = [run(task, environment={VARIABLE: str(outcomes)}) for task in tasks]
        lines = [json.loads(line) for line in outcomes.read_text().splitlines()]
    return Results.of(lines), [*steps, *(run(task) for task in measurements)]


def run(task: Task, *, environment: dict[str, str] | None = None) -> Step:
    """Run a task in a process group of its own, show what it prints, and keep the last of it."""
    began_s = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *task.arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        start_new_session=True,
    )
    lines: list[dict[str, Any]] = []
    last = deque[str](maxlen=_KEPT_LINES)
    assert process.stdout is not None
    reader = threading.Thread(target=_read, args=(process.stdout, lines, last), daemon=True)
    reader.start()
    problem = _end_of(process, task.limit_s)
    reader.join(_CLEAN_UP_S)
    return Step(task.name, problem, time.monotonic() - began_s, lines, list(last))


def _read(output: IO[str], lines: list[dict[str, Any]], last: deque[str]) -> None:
    with output:
        for line in output:
            try:
                lines.append(dict(json.loads(line)))
            except (ValueError, TypeError):
                print(line, end="", flush=True)
                last.append(line.rstrip())


def _end_of(process: subprocess.Popen[str], limit_s: float) -> str:
    """Why it has no good end; "" if it has. One that is late is interrupted, then killed."""
    try:
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_CLEAN_UP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return f"it did not end within {limit_s:.0f} s"
    return "" if status == 0 else f"it ended with status {status}"


def _alone() -> list[Task]:
    """A task for each test that needs a GPU."""
    command = [sys.executable, *PYTEST, "--collect-only", "-q", "--no-header", *PATHS]
    with tempfile.NamedTemporaryFile(prefix="test-gpu-") as unused:
        listed = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, VARIABLE: unused.name},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    names = [line for line in listed.splitlines() if "::" in line]
    return [Task(name, (*PYTEST, "-q", name), 120.0) for name in names]


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("build/test-gpu.txt"), help="the page")
    parser.add_argument("--alone", action="store_true", help="each test by itself, no measurement")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
