"""The share of time that step() takes under several ranks with short iterations, beside the bound.

    python -m benchmarks.boundaries --ranks 1 2 --iteration-ms 5 --seconds 30

Real processes (gloo) reach a boundary after every ``--iteration-ms``, during which they sleep, so
ranks wait for one another only when their managers meet: the worst case. Figures are from rank 0
and from the second half of the run, when costs are known. ``share``: the fraction of the time spent
in ``step()``, checkpoints included. ``median_us``: a single boundary, usually without a meeting.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.lab.record import emit
from checkfreq import CFCheckpoint, CFManager


def main() -> None:
    """Print a line per number of ranks; in a child process, run one rank."""
    args = _arguments()
    if args.result is not None:
        run_rank(args)
        return
    for world in args.ranks:
        with tempfile.TemporaryDirectory(dir=args.folder, prefix="boundaries-") as scratch:
            figures = launched(world, args, Path(scratch))
        emit(
            "boundaries",
            folder=Path(args.folder),
            world=world,
            iteration_ms=args.iteration_ms,
            bound=args.bound,
            seconds=args.seconds,
            **figures,
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--iteration-ms", type=float, default=5.0)
    parser.add_argument("--seconds", type=float, default=30.0, help="of training, at each world")
    parser.add_argument("--bound", type=float, default=0.035)
    parser.add_argument("--folder", default=".", help="a folder on the disk to use")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)  # in a rank
    return parser.parse_args()


def launched(world: int, args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """The figures that ``world`` ranks measured."""
    result = scratch / "result.json"
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(world), "-m", "benchmarks.boundaries"]
    command += ["--iteration-ms", str(args.iteration_ms), "--seconds", str(args.seconds)]
    command += ["--bound", str(args.bound), "--folder", str(scratch), "--result", str(result)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment, stdout=sys.stderr)
    figures: dict[str, Any] = json.loads(result.read_text())
    return figures


def run_rank(args: argparse.Namespace) -> None:
    """Train for that long; the first rank writes the figures of the second half to a file."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # the same weights on all ranks
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    chk = CFCheckpoint(model=model, optimizer=optimizer)
    steps = max(1, int(args.seconds * 1e3 / args.iteration_ms / 2))
    with CFManager(Path(args.folder) / "chk", chk, max_overhead=args.bound) as cf_manager:
        trained(cf_manager, steps, args.iteration_ms / 1e3)
        figures = trained(cf_manager, steps, args.iteration_ms / 1e3)
    if dist.get_rank() == 0:
        args.result.write_text(json.dumps(figures))
    dist.destroy_process_group()


def trained(cf_manager: CFManager, steps: int, iteration_s: float) -> dict[str, Any]:
    """Train that many iterations; returns the seconds that each boundary took."""
    taken_s, before, began_s = [], cf_manager.stats(), time.perf_counter()
    for _ in range(steps):
        time.sleep(iteration_s)
        with cf_manager.updating():  # without an update, snapshots would be taken another way
            pass
        at_s = time.perf_counter()
        cf_manager.step()
        taken_s.append(time.perf_counter() - at_s)
    stats = cf_manager.stats()
    return {
        "share": round(sum(taken_s) / (time.perf_counter() - began_s), 4),
        "median_us": round(1e6 * statistics.median(taken_s)),
        "interval_steps": stats["interval_steps"],
        "checkpoints": stats["num_committed"] - before["num_committed"],
    }
