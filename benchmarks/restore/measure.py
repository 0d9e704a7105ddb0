"""The time to restore a training from a cold file into its live tensors, and the memory it takes.

    python -m benchmarks.restore
    python -m benchmarks.restore --gib 4 --rounds 3 --folder /mnt/disk/scratch

The state is ``--gib`` of parameters and AdamW moments in ``--tensors`` parameters, saved once by
each library. Every restore has a process of its own, in which the live state is there already, as
after the construction of model and optimizer, all of its memory touched; what a process makes once
before it resumes (manager and worker, trainer, process group) is made before the time begins. The
files are dropped from the page cache. Arms take turns in random order in every round.

``memory`` is ``plenty``, or ``short``: a cgroup leaves ``--spare`` of the state beyond what the
process holds by then (needs root). A manager, which refuses to run where not even one snapshot
fits, has room for one slot on top. ``seconds`` end when every byte is in the live state; it is then
compared with what was saved: the step count, and the bits of one parameter and its moments. Ours
verifies every digest, the others nothing. ``raw`` reads the files of our checkpoint directly, by
four threads into the same few MiB again and again, which stay in the processor's cache: that is the
speed of the disk. ``against_raw`` is the median over rounds of the ratio to it. ``peak_mib``, of
the worst round: the kernel's high-water mark of resident memory during the restore, minus what was
resident before; mapped files count while they are resident, shared memory does not (snapshot slots
that a manager begins to fill when it is done). ``checkfreq, from memory`` restores what a process
that was killed just before left to its worker; its peak is of private memory, looked at every 2 ms.
``failed``: why there are no figures; a process that was killed has run out of memory. ``met``, of
ours: within 1.3 of raw (from memory: 0.3), faster than every other library in the same memory
(medians), and below 64 MiB.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

from benchmarks.lab.estimate import quartiles
from benchmarks.lab.record import emit, median_ratio
from benchmarks.restore import child
from benchmarks.restore.arms import ARMS, OUR_ARMS, RAW
from benchmarks.restore.child import Fingerprint, Restored, Shortage, State
from benchmarks.restore.memory import Group

PLENTY, SHORT = "plenty", "short"
#: What ours may take at most: of the time of the raw read, from the disk and from memory.
MOST_OF_RAW, MOST_FROM_MEMORY, MOST_BYTES = 1.3, 0.3, 64 << 20
_LIMIT_S = 300.0
#: Imported once, in the process from which all others are forked.
_IMPORTED = ("benchmarks.restore.child", "torch._dynamo", "torch.distributed.checkpoint")
_LARGE = ("transformers.trainer", "accelerate")


def main() -> None:
    """Print a line per state, memory and arm."""
    args = _arguments()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # a worker would compile every source
    arms = _installed(args.arms)
    memories = _memories(args)
    for gib in args.gib:
        state = State(int(gib * 2**30), args.tensors, args.device)
        with tempfile.TemporaryDirectory(dir=args.folder, prefix="restore-") as scratch:
            bench = Bench(Path(scratch), state, arms, args)
            found = bench.measure(memories)
        for memory in memories:
            _report(found[memory], memory, gib, args)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--gib", type=float, nargs="+", default=[0.5, 1.0], help="of state")
    parser.add_argument("--tensors", type=int, default=64, help="parameters")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--arms", nargs="+", choices=ARMS, help="beside raw; default: installed")
    parser.add_argument(
        "--memory", nargs="+", choices=(PLENTY, SHORT), default=[PLENTY, SHORT], help="which"
    )
    parser.add_argument("--spare", type=float, default=0.3, help="of the state, in short memory")
    parser.add_argument("--device", default="cpu", help="of the live state")
    parser.add_argument("--folder", default=".", help="a folder on the disk to measure")
    return parser.parse_args()


def _installed(chosen: Sequence[str] | None) -> list[str]:
    """The arms whose packages are there; for the others a sentence goes to standard error."""
    names = []
    for name in ARMS if chosen is None else chosen:
        missing = [package for package in ARMS[name].packages if find_spec(package) is None]
        if missing:
            print(f"{name} needs {', '.join(missing)}: left out", file=sys.stderr)
        else:
            names.append(name)
    return names


def _memories(args: argparse.Namespace) -> list[str]:
    if SHORT in args.memory:
        try:
            Group.make(_group_name()).remove()
        except OSError as error:
            print(f"no cgroup that limits memory can be made ({error})", file=sys.stderr)
            return [memory for memory in args.memory if memory != SHORT]
    return list(args.memory)


def _group_name() -> str:
    return f"checkfreq-restore-{os.getpid()}"


@dataclass(slots=True)
class Figures:
    """What an arm took, a value per round, or why it has none."""

    seconds: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)
    failed: str = ""


Found = dict[str, dict[str, Figures]]


class Bench:
    """One state: its checkpoints in every format, and the processes that restore them."""

    def __init__(
        self, scratch: Path, state: State, arms: Sequence[str], args: argparse.Namespace
    ) -> None:
        self._scratch, self._state, self._arms, self._args = scratch, state, arms, args
        self._context = _context(state, arms)
        self._saved: dict[str, Fingerprint] = {}

    def measure(self, memories: Sequence[str]) -> Found:
        """All rounds; by memory and arm."""
        for name in dict.fromkeys(["ours", *(ARMS[arm].format for arm in self._arms)]):
            self._write(name)
        found: Found = {
            memory: {arm: Figures() for arm in (RAW, *self._arms)} for memory in memories
        }
        for number in range(self._args.rounds):
            for memory, arm in self._order(memories, number):
                if not found[memory][arm].failed:
                    self._restore(found[memory][arm], memory, arm, number)
        return found

    def _order(self, memories: Sequence[str], number: int) -> Iterator[tuple[str, str]]:
        pairs = [(memory, arm) for memory in memories for arm in (RAW, *self._arms)]
        yield from random.Random(number).sample(pairs, len(pairs))

    def _write(self, name: str) -> None:
        print(f"writing {name}", file=sys.stderr)
        said = self._run(child.write, self._state, name, self._scratch / name)
        if isinstance(said, str):
            raise SystemExit(f"{name} could not be written: {said}")
        self._saved[name] = said

    def _restore(self, figures: Figures, memory: str, arm: str, number: int) -> None:
        said = self._read_raw() if arm == RAW else self._restore_by(arm, memory)
        if isinstance(said, Restored):
            figures.seconds.append(said.seconds)
            figures.peaks.append(said.peak_bytes)
            shown = f"{said.seconds:.3f} s, {said.peak_bytes / 2**20:.0f} MiB"
        else:
            shown = figures.failed = said
            if arm == RAW:
                raise SystemExit(f"the raw read failed: {said}")
        print(f"round {number}, {memory}, {arm}: {shown}", file=sys.stderr)

    def _read_raw(self) -> Any:
        return self._run(child.read_raw, self._scratch / "ours")

    def _restore_by(self, arm: str, memory: str) -> Any:
        name = ARMS[arm].format
        short = Shortage(_group_name(), self._args.spare) if memory == SHORT else None
        folder, expected = self._scratch / name, self._saved[name]
        if ARMS[arm].from_memory:
            folder = self._scratch / "left"
            said = self._run(child.leave, self._state, folder, short is not None)
            if isinstance(said, str):
                return said
        try:
            return self._run(child.restore, self._state, arm, folder, short, expected)
        finally:
            if short is not None:
                Group.make(short.group).remove()
            if ARMS[arm].from_memory:
                shutil.rmtree(folder)

    def _run(self, work: Callable[..., None], *arguments: object) -> Any:
        """What a process of its own sends, or a text that says why it sent nothing."""
        receiving, sending = self._context.Pipe(duplex=False)
        process = self._context.Process(target=work, args=(*arguments, sending))  # type: ignore[attr-defined]
        process.start()
        sending.close()
        try:
            said = receiving.recv() if receiving.poll(_LIMIT_S) else f"no end in {_LIMIT_S:.0f} s"
        except EOFError:
            said = ""
        process.join(_LIMIT_S if said else None)
        if process.is_alive():
            process.kill()
            process.join()
        return said or _ended(process.exitcode)


def _ended(status: int | None) -> str:
    return "killed" if status == -9 else f"ended with status {status}"


def _context(state: State, arms: Sequence[str]) -> BaseContext:
    """Processes are forked from one that has imported everything; a device allows no fork."""
    if state.device != "cpu":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    large = [name for name in _LARGE if name.partition(".")[0] in _packages(arms)]
    context.set_forkserver_preload([*_IMPORTED, *large])
    return context


def _packages(arms: Sequence[str]) -> list[str]:
    return sorted({package for arm in arms for package in ARMS[arm].packages})


def _report(
    found: Mapping[str, Figures], memory: str, gib: float, args: argparse.Namespace
) -> None:
    for arm, figures in found.items():
        emit(
            "restore",
            folder=Path(args.folder),
            packages=_packages([arm for arm in found if arm in ARMS]),
            arm=arm,
            memory=memory,
            spare=args.spare if memory == SHORT else None,
            gib=gib,
            tensors=args.tensors,
            device=args.device,
            rounds=args.rounds,
            **_figures(figures, found[RAW]),
            **({"met": is_met(arm, found)} if arm in OUR_ARMS else {}),
        )


def _figures(figures: Figures, raw: Figures) -> dict[str, Any]:
    if figures.failed:
        return {"failed": figures.failed}
    median_s = statistics.median(figures.seconds)
    low_s, high_s = quartiles(figures.seconds)
    return {
        "seconds": round(median_s, 4),
        "low": round(low_s, 4),
        "high": round(high_s, 4),
        "against_raw": round(median_ratio(figures.seconds, raw.seconds), 3),
        "peak_mib": round(max(figures.peaks) / 2**20, 1),
    }


def is_met(arm: str, found: Mapping[str, Figures]) -> bool:
    """Whether an arm of ours is fast enough beside raw, faster than others, and small enough."""
    ours = found[arm]
    if ours.failed:
        return False
    others = [x for name, x in found.items() if name not in (RAW, *OUR_ARMS) and not x.failed]
    ours_s = statistics.median(ours.seconds)
    most = MOST_FROM_MEMORY if ARMS[arm].from_memory else MOST_OF_RAW
    return (
        median_ratio(ours.seconds, found[RAW].seconds) <= most
        and all(ours_s < statistics.median(other.seconds) for other in others)
        and max(ours.peaks) < MOST_BYTES
    )
