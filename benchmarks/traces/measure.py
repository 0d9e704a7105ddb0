"""Policies replayed over runs that were recorded under real loads: interval, overhead, lost work.

``record [NAME ...]`` trains under each load and writes ``recorded/NAME.jsonl.gz``, with the
machine, the load, the date and the command in its header. ``replay [NAME ...]``, the default,
replays AUTO over each, and prints a line: the smallest fixed interval that keeps the bound
(``ideal``), the interval recorded and the one that AUTO comes to now, and the overheads.

The loads are real, on this machine: other processes that compute and write, a worker whose writes
are limited, a trainer that is stopped for a part of each tenth of a second, a loader that is slower
than training. Whether a run was alone is in the header: how many cores others used meanwhile.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.lab.record import emit, environment
from benchmarks.lab.results import ROOT
from benchmarks.traces.loads import Slow, bursts, neighbour, nothing, throttled
from checkfreq.simulation.recorded import read_trace
from checkfreq.simulation.retrace import Replayed, as_recorded, auto, ideal_interval, policy_of
from checkfreq.simulation.series import take_apart

FOLDER = Path(__file__).resolve().parent / "recorded"
_SUFFIX = ".jsonl.gz"
_TRAINER = "benchmarks.traces.train"


@dataclass(frozen=True, slots=True)
class Scene:
    """A training, and what slows it down; ``says`` is kept with the trace."""

    says: str
    options: str = ""
    slow: Slow = nothing
    ranks: int = 1


SCENES = {
    "quiet": Scene("alone"),
    "neighbour": Scene("as many computing processes as cores, and a writing one", slow=neighbour),
    "bursts": Scene("the same for 3 s of every 12 s", slow=bursts),
    "slow-disk": Scene("alone, writes at 20 MB/s at most", "--write-bytes-per-s 20000000"),
    "throttled": Scene("alone, stopped for 40 ms of every 100 ms", slow=throttled),
    "loader": Scene("alone, a loader that is slower than training", "--loader-s 0.0003"),
    "short": Scene("alone, short iterations", "--width 256 --batch 64"),
    "long": Scene("alone, long iterations", "--width 1024 --batch 768 --seconds 100"),
    "two-ranks": Scene("two ranks on one machine, gloo", "--width 256", ranks=2),
    "rhythm": Scene(
        "alone, 4 batches an iteration, evaluating after every 10th",
        "--width 256 --accumulate 4 --evaluate-every 10 --evaluations 12",
    ),
}


def main() -> None:
    """Record, or replay and print a line per trace."""
    args = _arguments()
    if args.what == "record":
        for name in args.names or SCENES:
            record(name, SCENES[name], into=args.into, seconds=args.seconds)
        return
    found = sorted(path for path in args.into.iterdir() if path.name.endswith(_SUFFIX))
    for path in found:
        name = path.name.removesuffix(_SUFFIX)
        if not args.names or name in args.names:
            replay(name, path)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("what", nargs="?", choices=("replay", "record"), default="replay")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SCENES)}")
    parser.add_argument("--into", type=Path, default=FOLDER, help="where traces are kept")
    parser.add_argument("--seconds", type=float, help="of each training, instead of its own")
    args = parser.parse_args()
    if unknown := sorted({*args.names} - {*SCENES}):
        parser.error(f"expected names of {', '.join(SCENES)}, got {', '.join(unknown)}")
    return args


def record(name: str, scene: Scene, *, into: Path, seconds: float | None) -> None:
    """Train under a load, and keep the trace with its origin."""
    load, others = os.getloadavg()[0], Others()
    with tempfile.TemporaryDirectory(dir=".", prefix="traces-") as scratch:
        chk_dir = Path(scratch) / "chk"
        _train(scene, chk_dir, seconds)
        lines = (chk_dir / "trace.jsonl").read_bytes().splitlines(keepends=True)
    cores = others.cores()
    header = json.loads(lines[0])
    header["origin"] = {**_origin(), "name": name, "scene": scene.says,
                        "load average before": f"{load:.1f}",
                        "cores used by others": f"{cores:.2f}"}  # fmt: skip
    into.mkdir(parents=True, exist_ok=True)
    packed = gzip.compress(b"".join([json.dumps(header).encode(), b"\n", *lines[1:]]), mtime=0)
    (into / f"{name}{_SUFFIX}").write_bytes(packed)
    print(f"{name}: {len(packed)} bytes, others used {cores:.2f} cores", file=sys.stderr)


class Others:
    """How many cores were used since it was made, but not by this process's children."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._busy_s, self._ours_s = _busy_s(), _ours_s()

    def cores(self) -> float:
        """Their number; the children must have been waited for."""
        theirs_s = _busy_s() - self._busy_s - (_ours_s() - self._ours_s)
        return max(0.0, theirs_s / (time.monotonic() - self._began_s))


def _busy_s() -> float:
    """Seconds for which the machine's cores have worked, all together."""
    user, nice, system, _, _, irq, softirq, *_ = Path("/proc/stat").read_text().split()[1:9]
    return sum(map(int, (user, nice, system, irq, softirq))) / os.sysconf("SC_CLK_TCK")


def _ours_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def _train(scene: Scene, chk_dir: Path, seconds: float | None) -> None:
    options = scene.options.split() + ([] if seconds is None else ["--seconds", str(seconds)])
    command = [sys.executable, "-m", _TRAINER, str(chk_dir.resolve()), *options]
    if scene.ranks > 1:
        ranks = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(scene.ranks)]
        command = [sys.executable, "-m", *ranks, "-m", *command[2:]]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        with scene.slow(chk_dir.parent, process.pid):
            status = process.wait()
    finally:
        process.kill()
    if status:
        raise SystemExit(f"the training ended with status {status}")


def _origin() -> dict[str, str]:
    found = environment()
    machine = found["machine"]
    return {
        "machine": f"{machine['cpu']}, {machine['cores']} cores, Linux {machine['kernel']}",
        "versions": f"Python {found['versions']['python']}, torch {torch.__version__}",
        "commit": found["commit"],
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "command": found["command"],
    }


def replay(name: str, path: Path) -> None:
    """Print the line of a trace."""
    series = take_apart(read_trace(path))
    run, policy = series.recording, policy_of(series)
    ideal = ideal_interval(series, max_overhead=policy.max_overhead)
    recorded, now = as_recorded(series), auto(series, policy)
    costs = [cost.total_s for cost in series.costs]
    emit(
        "traces",
        arm=name,
        scene=run.origin.get("scene"),
        others=run.origin.get("cores used by others"),
        load=run.origin.get("load average before"),
        iterations=run.num_iterations,
        iteration_ms=round(1e3 * series.iteration_s(), 3),
        rhythm=series.rhythm,
        checkpoints=len(costs),
        cost_ms=round(1e3 * sum(costs) / len(costs), 3),
        bound=policy.max_overhead,
        ideal=ideal,
        recorded=_figures(recorded, ideal),
        auto=_figures(now, ideal),
    )


def _figures(done: Replayed, ideal: int | None) -> dict[str, object]:
    steps = done.interval_steps
    return {
        "interval": steps,
        "over_ideal": None if ideal is None or steps is None else round(steps / ideal, 3),
        "overhead": round(done.overhead, 5),
        "worst": round(done.worst_overhead, 5),
        "loss_s": round(done.expected_loss_s, 4),
        "checkpoints": len(done.placed),
    }


def names_of(folder: Path) -> Sequence[str]:
    """The traces in a folder."""
    return sorted(each.name.removesuffix(_SUFFIX) for each in folder.glob(f"*{_SUFFIX}"))
