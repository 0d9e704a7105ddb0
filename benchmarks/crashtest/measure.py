"""How long ``checkfreq crashtest`` takes to come to a verdict on a script of ten seconds.

    python -m benchmarks.crashtest

The whole command, with its default of four kills, each start of the script a new process that
imports torch. ``script_s``: the script alone. The arms: a clean script, on one rank and on two; one
whose fault shows at once; one whose fault shows at the end of an epoch.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.lab.record import emit

_SCRIPT = Path(__file__).with_name("script.py")
_ARMS: dict[str, tuple[str, int]] = {
    "clean": ("", 1),
    "clean, 2 ranks": ("", 2),
    "forgotten scheduler": ("forgotten-scheduler", 1),
    "validation loader draws": ("validation-draws", 1),
}


def main() -> None:
    """Print a line per arm."""
    args = _arguments()
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="crashtest-bench-") as name:
        folder = Path(name).absolute()
        script = [
            sys.executable,
            str(_SCRIPT),
            "--steps",
            str(args.steps),
            "--wait",
            str(args.wait),
        ]
        start_s = time.perf_counter()
        subprocess.run(script, check=True, cwd=folder, env=_environment())
        script_s = time.perf_counter() - start_s
        for arm in args.arms:
            fault, ranks = _ARMS[arm]
            command = [*script, *(["--fault", fault] if fault else [])]
            seconds, verdict = _verdict(command, ranks=ranks, kills=args.kills, folder=folder)
            emit(
                "crashtest",
                arm=arm,
                folder=folder,
                ranks=ranks,
                steps=args.steps,
                script_s=round(script_s, 2),
                seconds=round(seconds, 1),
                kills=len(verdict["kills"]),
                outcome=verdict["outcome"],
                cause=verdict["causes"][0]["name"] if verdict["causes"] else None,
            )


def _verdict(
    script: list[str], *, ranks: int, kills: int, folder: Path
) -> tuple[float, dict[str, Any]]:
    """Seconds, and what the command printed."""
    command = [sys.executable, "-m", "checkfreq.cli", "crashtest", "--json"]
    command += ["--kills", str(kills), "--ranks", str(ranks), "--", *script]
    start_s = time.perf_counter()
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, cwd=folder, env=_environment()
    )
    seconds = time.perf_counter() - start_s
    if done.returncode not in (0, 1):
        raise RuntimeError(f"expected a verdict, found exit status {done.returncode}")
    return seconds, json.loads(done.stdout)


def _environment() -> dict[str, str]:
    """One thread each: the processes share the cores."""
    root = str(_SCRIPT.parents[2])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arms", nargs="+", choices=[*_ARMS], default=[*_ARMS])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--wait", type=float, default=0.04, help="seconds of each step")
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--folder", help="on the disk to use; default: the temporary one")
    return parser.parse_args()
