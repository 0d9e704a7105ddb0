"""How long ``checkfreq report`` takes, from the start of the command to the written page.

    python -m benchmarks.report

Of 100,000 events: of one run, and of 5000 runs that were killed; and of 100 events, which is what
starting and drawing alone take. The whole process.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.lab.record import emit

Event = dict[str, Any]
_START_S = 1.79e9
_INTERVAL = 40


def main() -> None:
    """Print a line per arm."""
    args = _arguments()
    arms = {
        "one run": (args.events, 1),
        "many runs": (args.events, max(1, args.events // 20)),
        "a short run": (min(100, args.events), 1),
    }
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="report-") as name:
        folder = Path(name)
        for arm, (num_events, num_runs) in arms.items():
            _write(folder / arm, num_events, num_runs)
        found: dict[str, list[float]] = {arm: [] for arm in arms}
        order = random.Random(0)
        for _ in range(args.rounds):
            for arm in order.sample(list(arms), len(arms)):
                found[arm].append(_report(folder / arm, folder / f"{arm}.html"))
        for arm, (num_events, num_runs) in arms.items():
            emit(
                "report",
                arm=arm,
                folder=folder,
                packages=("matplotlib",),
                events=num_events,
                runs=num_runs,
                rounds=args.rounds,
                median_s=round(statistics.median(found[arm]), 3),
                max_s=round(max(found[arm]), 3),
                page_kib=round((folder / f"{arm}.html").stat().st_size / 1024),
            )


def _report(chk_dir: Path, page: Path) -> float:
    """Seconds."""
    command = [sys.executable, "-m", "checkfreq.cli", "report", str(chk_dir), "--out", str(page)]
    page.unlink(missing_ok=True)
    start_s = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - start_s
    if not page.exists():
        raise RuntimeError("checkfreq report wrote no page")
    return seconds


def _write(chk_dir: Path, num_events: int, num_runs: int) -> None:
    chk_dir.mkdir()
    with (chk_dir / "events.jsonl").open("w") as file:
        for event in _events(num_events, num_runs):
            file.write(json.dumps(event) + "\n")


def _events(num_events: int, num_runs: int) -> Iterator[Event]:
    """Runs as a manager tells of them, with costs that vary."""
    values, at_s, step = random.Random(18), _START_S, 0
    for number in range(num_runs):
        if number:
            at_s += 30.0
            yield _event("restored", step, at_s, steps_lost=0, source="memory")
        yield _event("began", step, at_s, world=1, mode="auto", max_overhead=0.035)
        for index in range(max(1, num_events // num_runs - 2)):
            at_s += 10.0
            if index % 25 == 0:
                yield _plan(step, at_s, values)
                continue
            step += _INTERVAL
            yield _committed(step, at_s, values)


def _event(kind: str, step: int, at_s: float, **data: object) -> Event:
    return {"time_unix_s": at_s, "kind": kind, "step": step, **data}


def _plan(step: int, at_s: float, values: random.Random) -> Event:
    costs = _costs(values)
    explanation = "bound by the overhead budget, 3.1 % of 3.5 % used"
    return _event("plan", step, at_s, explanation=explanation, reason="budget", **costs)


def _costs(values: random.Random) -> Event:
    return {
        "interval_steps": _INTERVAL + values.randrange(9),
        "iteration_s": 0.25 * values.uniform(0.95, 1.05),
        "overlap_s": 0.2,
        "host_copy_s": 0.5,
        "cost_s": 0.3,
        "cost_error_s": 0.01,
        "measured_overhead": 0.03 * values.uniform(0.9, 1.1),
        "expected_loss_s": 8.0,
    }


def _committed(step: int, at_s: float, values: random.Random) -> Event:
    started = at_s - _START_S + 5000.0
    return _event(
        "committed",
        step,
        at_s + 3.2,
        reason="periodic",
        at_step=step + 12,
        num_bytes=1_200_000_000,
        linked_bytes=0,
        stall_s=0.012 * values.random(),
        copy_s=0.5,
        write_s=2.0,
        persist_s=2.5 * values.uniform(0.8, 1.2),
        started_monotonic_s=started,
        durable_monotonic_s=started + 3.0,
        bytes_per_s=4e8,
        direct=True,
        kept_existing=False,
        costs=_costs(values),
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="on the disk to use; default: the temporary one")
    return parser.parse_args()
