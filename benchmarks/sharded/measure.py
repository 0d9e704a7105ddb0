"""Checkpoints of several ranks: how the time falls with their number, beside torch's own.

    python -m benchmarks.sharded --mib 256 --rounds 5 --folder /mnt/disk/scratch

Real processes (gloo) train on a state of ``--mib`` in total: ``sharded``, DTensors as FSDP2 leaves
them, and ``replicated``, as under DDP (``split``: every rank writes a part). The training is matrix
products and a synchronisation of the ranks. In each round every arm saves once, in random order,
and training continues until that is durable. Of several ranks the slowest counts.

``held_ms``: how long the library's calls stop the training thread: the save (alone: ``save_ms``),
boundaries, entering the weight update. ``added_ms``: by how much all iterations until then were
longer. ``durable_s``: from the call until everything is synced and committed; ``persist_s`` (ours):
the part after the complete snapshot. ``raw``: the same bytes, written directly and synced by as
many processes: the limit of the disk. torch.distributed.checkpoint has as many threads, syncs, and
caches plans; ``aside``: it stages in a thread. The first save is reported separately; ``low`` and
``high`` are quartiles. ``meeting``: the cost of a meeting of a manager's ranks with nothing to do.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.lab.rawio import RawWriter
from benchmarks.lab.record import emit, median_ratio
from benchmarks.lab.rounds import Arm, Seconds, interleaved
from benchmarks.lab.saving import Work, sample, shown, slowest, spread
from benchmarks.peers import PEERS, Saver
from benchmarks.peers.dcp import KINDS
from benchmarks.peers.ours import CheckFreq
from benchmarks.sharded.states import ReplicatedState, ShardedState, State, training_of
from checkfreq.ranks.meetings import Meetings
from checkfreq.ranks.merging import said_by_each

_MEETING = "meeting"
_MEETINGS, _WARM_UP_MEETINGS = 500, 50


def main() -> None:
    """Start the ranks of each world, and print a line per arm; in a child process, run one rank."""
    args = _arguments()
    if args.result is not None:
        run_rank(args)
        return
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="sharded-") as scratch:
        for world in args.ranks:
            for what in args.only:
                if what == "sharded" or world > 1:
                    seconds = launched(what, world, args, Path(scratch))
                    if what == _MEETING:
                        report_meeting(world, args, seconds)
                    else:
                        report(what, world, args, seconds)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--mib", type=float, default=256, help="size of the state, of all ranks")
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5, help="after the first one")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--only", nargs="+", choices=_WHAT, default=_WHAT)
    parser.add_argument("--peers", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--iteration-s", type=float, default=0.3, help="of computing, about")
    parser.add_argument("--folder", default=".", help="a folder on the disk to measure")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)  # in a rank
    return parser.parse_args()


def launched(what: str, world: int, args: argparse.Namespace, scratch: Path) -> Seconds:
    """The figures that ``world`` ranks measured."""
    result, folder = scratch / "result.json", scratch / f"{what}-{world}"
    folder.mkdir()
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(world), "-m", "benchmarks.sharded", "--only", what]
    command += ["--mib", str(args.mib), "--tensors", str(args.tensors)]
    command += ["--rounds", str(args.rounds), "--iteration-s", str(args.iteration_s)]
    command += ["--folder", str(folder), "--result", str(result), "--peers", *args.peers]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, env=environment, stdout=sys.stderr)
    shutil.rmtree(folder)
    seconds: Seconds = json.loads(result.read_text())
    return seconds


def report_meeting(world: int, args: argparse.Namespace, seconds: Seconds) -> None:
    """One line."""
    emit(
        "sharded",
        folder=Path(args.folder),
        what=_MEETING,
        world=world,
        meetings=_MEETINGS,
        median_ms=round(seconds[_MEETING][0] * 1e3, 3),
    )


def report(what: str, world: int, args: argparse.Namespace, seconds: Seconds) -> None:
    """A line per arm."""
    arms: dict[str, dict[str, list[float]]] = {}
    for name, values in seconds.items():
        arm, _, figure = name.rpartition("/")
        arms.setdefault(arm, {})[figure] = values
    raw = arms["raw"]["durable_s"]
    for arm, figures in sorted(arms.items()):
        ratios = {
            f"{name.removesuffix('_s')}_against_raw": round(median_ratio(raw[1:], values[1:]), 3)
            for name, values in figures.items()
            if name in ("durable_s", "persist_s")
        }
        emit(
            "sharded",
            folder=Path(args.folder),
            what=what,
            arm=arm,
            world=world,
            mib=args.mib,
            rounds=args.rounds,
            **_medians(figures),
            **shown({f"first_{name}": values[0] for name, values in figures.items()}),
            gb_per_s=round(args.mib * 2**20 / statistics.median(figures["durable_s"][1:]) / 1e9, 3),
            **ratios,
        )


def _medians(figures: Mapping[str, list[float]]) -> dict[str, Any]:
    later = {name: values[1:] for name, values in figures.items()}
    medians = shown({name: statistics.median(values) for name, values in later.items()})
    several = {name: values for name, values in later.items() if len(values) > 1}
    return {**medians, **(spread(several) if several else {})}


# In a rank


def run_rank(args: argparse.Namespace) -> None:
    """Measure one part completely; the first rank writes the figures to a file."""
    dist.init_process_group("gloo")
    what = args.only[0]
    seconds = meeting() if what == _MEETING else saving(what, args)
    if dist.get_rank() == 0:
        args.result.write_text(json.dumps(seconds))
    dist.destroy_process_group()


def meeting() -> Seconds:
    """The median time of a meeting, on the slowest rank; each begins when the last one is over."""
    meetings = Meetings.of_process_group(timeout_s=60)
    taken_s = []
    for _ in range(_WARM_UP_MEETINGS + _MEETINGS):
        began_s = time.perf_counter()
        meetings.meet("measuring", dist.get_rank(), merge=said_by_each)
        taken_s.append(time.perf_counter() - began_s)
    meetings.close()
    slow = slowest({_MEETING: statistics.median(taken_s[_WARM_UP_MEETINGS:])})
    return {name: [value] for name, value in slow.items()}


def saving(what: str, args: argparse.Namespace) -> Seconds:
    """Every arm's saves, in each round."""
    num_bytes = int(args.mib * 2**20)
    with PARTS[what](args, num_bytes, Work(args.iteration_s)) as arms:
        return interleaved(arms, rounds=args.rounds + 1)


@contextlib.contextmanager
def sharded(args: argparse.Namespace, num_bytes: int, work: Work) -> Iterator[list[Arm]]:
    """Ours on DTensors, beside torch.distributed.checkpoint."""
    folder, state = Path(args.folder), ShardedState(num_bytes, num_tensors=args.tensors)
    training = training_of(state)
    with contextlib.ExitStack() as stack:
        savers = {
            name: _closing(stack, PEERS[name].make(folder / name.replace(", ", "-"), training))
            for name in ("checkfreq", *args.peers)
        }
        yield stack.enter_context(measured(savers, state, args, num_bytes, work))


@contextlib.contextmanager
def replicated(args: argparse.Namespace, num_bytes: int, work: Work) -> Iterator[list[Arm]]:
    """Ours on replicated state: each rank writes a part, or the first one everything."""
    folder = Path(args.folder)
    state = ReplicatedState(num_bytes, num_tensors=args.tensors)
    training = training_of(state)
    with contextlib.ExitStack() as stack:
        split = _closing(stack, CheckFreq(folder / "split", training, split=True))
        one = _closing(stack, CheckFreq(folder / "one", training))
        savers = {"checkfreq, split": split, "checkfreq, one writer": one}
        yield stack.enter_context(measured(savers, state, args, num_bytes, work))


def _closing(stack: contextlib.ExitStack, saver: Saver) -> Saver:
    """Close it with the stack, also after an error."""
    stack.callback(saver.close)
    return saver


PARTS: dict[str, Callable[..., AbstractContextManager[list[Arm]]]] = {
    "sharded": sharded,
    "replicated": replicated,
}
_WHAT = [*PARTS, _MEETING]


@contextlib.contextmanager
def measured(
    savers: Mapping[str, Saver],
    state: State,
    args: argparse.Namespace,
    num_bytes: int,
    work: Work,
) -> Iterator[list[Arm]]:
    """An arm for each saver, and one for the disk."""
    path = Path(args.folder) / f"raw-{dist.get_rank()}"
    with RawWriter(path, num_bytes // dist.get_world_size()) as writer:
        yield [
            lambda: _raw(writer),
            *(
                lambda name=name, saver=saver: _named(name, sample(saver, state.change, work))  # type: ignore[misc]
                for name, saver in savers.items()
            ),
        ]


def _named(arm: str, figures: Mapping[str, float]) -> dict[str, float]:
    return {f"{arm}/{figure}": value for figure, value in figures.items()}


def _raw(writer: RawWriter) -> dict[str, float]:
    dist.barrier()
    return _named("raw", slowest({"durable_s": writer.once()}))
