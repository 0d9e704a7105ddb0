"""One checkpoint with each library: how long training stops, time to durable, time to restore.

    python -m benchmarks.compare --gib 1 --rounds 3 --folder /mnt/disk/scratch

The state is ``--gib`` of parameters and AdamW moments in ``--tensors`` parameters. In each round
every arm saves once, in random order, while training continues (matrix products of
``--iteration-s``, then a write to the whole state) until that save is durable. Then the arms that
read in different ways save once more, unmeasured, and restore right after it; after that they
restore in ``--restores`` rounds. The first save pays for start-up: it is reported separately and
excluded. All other figures are medians and quartiles.

``held_ms``: how long the library's calls stop the training thread: the save (alone: ``save_ms``),
boundaries, entering the weight update. ``added_ms``: by how much all iterations until the save was
durable were longer. ``durable_s``: from the call until everything is on disk; ``persist_s`` (ours):
the part after the complete snapshot. An arm that does not sync (``synced`` false) counts as durable
what it has written, so compare it only with such arms. If a library writes in the background, its
files are synced there too. ``restore_s``: into the live training, with the files dropped from the
page cache; ``warm_restore_s``: right after a save, with the page cache as the write left it. Ours
verifies every digest; the others verify nothing. What a process creates once before it restores
(manager, trainer, process group) is created beforehand. Our manager restores only once, so each
restore gets a new one, and still waits for the worker that it started. The restored state is
compared with the saved one: the step count, and the bits of one parameter and its moments.

``raw`` writes the same number of bytes directly with four threads, and reads them into memory that
is already allocated; ``fresh_restore_s`` reads into new memory, as most restores must. Ratios are
taken within a round: ``ours_*`` is ours divided by the arm's, ``against_raw_*`` the raw disk's
divided by the arm's. One line per target compares ours with the best synced arm of ``peers``:
``among`` is ``all`` installed ones, or those used ``as documented``, without DCP's staging in a
thread; with ``--arms`` it is ``chosen``. ``met`` is null if the median is within the target and the
upper quartile is not. A peer that fails is excluded and has ``failed`` instead of figures; ours may
not fail.

With all arms this needs about 11 times the state in memory and 10 times on disk, plus a GiB of
each; fewer ``--arms`` need less.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import statistics
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.compare.outcome import Round, arm_lines, target_lines
from benchmarks.compare.runs import RAW
from benchmarks.lab.capacity import shortage
from benchmarks.lab.rawio import RawWriter, drop_from_cache
from benchmarks.lab.record import emit
from benchmarks.lab.saving import Work, iterate, sample, seconds_of
from benchmarks.lab.states import adamw_training, fingerprint, write_to_all
from benchmarks.peers import OURS, PEERS, Peer, Saver, Training, installed

_RECENT = 9  # clean iterations of all arms, for the current duration of one
_RAW_COPIES, _PASSING_COPIES = 1, 3  # the raw write; what a peer allocates temporarily
_RAW_FILE, _REPLACING = 1, 1  # on disk: the raw file, and ours beside the one it replaces
_ON_DEVICE = 2  # some clone on the device

Figures = dict[str, float]
Calls = dict[str, Callable[[], Figures]]


def main() -> None:
    """Print a line per arm and a line per target."""
    args = _arguments()
    peers = list(installed(args.arms).values())
    _require_capacity(peers, args)
    rounds, failed = measure(peers, args)
    about = {
        "device": args.device,
        "gib": args.gib,
        "tensors": args.tensors,
        "threads": torch.get_num_threads(),
        "rounds": args.rounds,
        "restores": args.restores,
    }
    packages = sorted({package for peer in peers for package in peer.packages})
    targets = target_lines(peers, rounds[1:], chosen=args.arms is not None)
    for fields in [*arm_lines(peers, rounds, failed), *targets]:
        emit("compare", folder=Path(args.folder), packages=packages, **about, **fields)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--gib", type=float, default=1.0, help="size of the state")
    parser.add_argument("--tensors", type=int, default=64, help="parameters")
    parser.add_argument("--rounds", type=int, default=3, help="after the first one")
    parser.add_argument("--restores", type=int, default=3, help="rounds of restores")
    parser.add_argument("--arms", nargs="+", choices=PEERS, help="default: all installed ones")
    parser.add_argument("--iteration-s", type=float, default=0.25, help="of computing, about")
    parser.add_argument("--device", default=device)
    parser.add_argument("--folder", default=".", help="a folder on the disk to measure")
    return parser.parse_args()


def _require_capacity(peers: Sequence[Peer], args: argparse.Namespace) -> None:
    why_not = shortage(
        int(args.gib * 2**30),
        torch.device(args.device),
        Path(args.folder),
        copies=_RAW_COPIES + sum(peer.keeps for peer in peers) + _PASSING_COPIES,
        on_device=_ON_DEVICE,
        on_disk=_RAW_FILE + sum(not peer.restores_as for peer in peers) + _REPLACING,
    )
    if why_not is not None:
        raise SystemExit(
            f"{args.gib:g} GiB with {len(peers)} arms {why_not}: take a smaller --gib, fewer --arms"
        )


# Measuring


@dataclass(slots=True)
class Arm:
    """A peer that saves the shared training; ``recent_s`` are its clean iterations."""

    peer: Peer
    saver: Saver
    training: Training
    work: Work
    recent_s: deque[float]
    folder: Path
    saved: tuple[int, ...] = ()

    def save(self) -> Figures:
        """Save once and keep the checkpoint."""
        self.recent_s.append(iterate(self.saver, self._change, self.work).total_s)
        self.saved = fingerprint(self.training)
        figures = sample(
            self.saver, self._change, self.work, clean_iterations=0, recent_s=self.recent_s
        )
        return figures | {"iteration_s": statistics.median(self.recent_s)}

    def save_only(self) -> Figures:
        """Save once and discard the checkpoint."""
        figures = self.save()
        self.saver.discard()
        return figures

    def save_and_restore(self) -> Figures:
        """The time to restore right after a save, unmeasured because restores disturb saves."""
        self.save()
        return {"warm_restore_s": self._restored()}

    def restore(self) -> Figures:
        """The time to restore the last save from disk."""
        drop_from_cache(self.saver.files())
        return {"restore_s": self._restored()}

    def _restored(self) -> float:
        self._change()
        self.saver.prepare_restore()
        seconds = seconds_of(self.saver.restore, self.work)
        self.saver.rest()
        if fingerprint(self.training) != self.saved:
            raise ValueError("the restored state differs from the saved one")
        return seconds

    def close(self) -> None:
        """Close the saver and remove what it wrote."""
        try:
            self.saver.close()
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _change(self) -> None:
        write_to_all(self.training)


class Arms:
    """The arms that take part. One that fails is closed and excluded; ours may not fail."""

    def __init__(self) -> None:
        self.present: dict[str, Arm] = {}
        self.failed: dict[str, str] = {}

    def make(self, peer: Peer, make: Callable[[], Arm]) -> None:
        """Add an arm."""
        with self._noting(peer.name):
            self.present[peer.name] = make()

    def one_round(self, title: str, calls: Calls, *, seed: int) -> Round:
        """Run every call once, in random order; progress goes to standard error."""
        measured = {}
        for name in random.Random(seed).sample(list(calls), len(calls)):
            with self._noting(name):
                figures = measured[name] = calls[name]()
                shown = ", ".join(f"{figure[:-2]} {s:.3f} s" for figure, s in figures.items())
                print(f"{title}, {name}: {shown}", file=sys.stderr)
        return measured

    @contextlib.contextmanager
    def _noting(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if name in (RAW, OURS):
                raise
            first_line = (str(error).splitlines() or [""])[0]
            self.failed.setdefault(name, f"{type(error).__name__}: {first_line}")
            print(f"{name} failed: {self.failed[name]}", file=sys.stderr)
            self.close(name)

    def close(self, name: str) -> None:
        """Close and exclude an arm."""
        arm = self.present.pop(name, None)
        if arm is not None:
            with self._noting(name):
                arm.close()

    def close_all(self) -> None:
        """Close all arms, even if some fail to close."""
        with contextlib.ExitStack() as stack:
            for name in list(self.present):
                stack.callback(self.close, name)


def measure(
    peers: Sequence[Peer], args: argparse.Namespace
) -> tuple[list[Round], Mapping[str, str]]:
    """Run all rounds, the first included and restores last; returns also who failed, and why."""
    device, num_bytes = torch.device(args.device), int(args.gib * 2**30)
    training = adamw_training(num_bytes, num_tensors=args.tensors, device=device)
    work, arms = Work(args.iteration_s, device=device), Arms()
    recent_s: deque[float] = deque(maxlen=_RECENT)
    with contextlib.ExitStack() as stack:
        scratch = tempfile.TemporaryDirectory(dir=args.folder, prefix="compare-")
        folder = Path(stack.enter_context(scratch))
        stack.callback(arms.close_all)  # before the folder is removed: a worker could recreate it
        for peer in peers:
            place = folder / slug(peer.name)
            arms.make(peer, partial(_arm, peer, place, training, work, recent_s))
        writer = stack.enter_context(RawWriter(folder / RAW, num_bytes))
        rounds = [*saving(arms, writer, args.rounds), *restoring(arms, writer, args.restores)]
    return [_without(arms.failed, each) for each in rounds], arms.failed


def _arm(peer: Peer, folder: Path, training: Training, work: Work, recent_s: deque[float]) -> Arm:
    return Arm(peer, peer.make(folder, training), training, work, recent_s, folder)


def saving(arms: Arms, writer: RawWriter, rounds: int) -> Iterator[Round]:
    """The first round and ``rounds`` more."""
    for index in range(rounds + 1):
        calls: Calls = {RAW: lambda: {"durable_s": writer.once()}}
        for name, arm in arms.present.items():
            if index or arm.peer.synced:  # both variants of a peer have the same start-up
                calls[name] = arm.save_only
        yield arms.one_round(f"save {index}", calls, seed=index)


def restoring(arms: Arms, writer: RawWriter, rounds: int) -> Iterator[Round]:
    """Restores by the arms that read in different ways: right after a save, then from disk."""
    for name, arm in list(arms.present.items()):
        if arm.peer.restores_as:
            arms.close(name)
    straight: Calls = {name: arm.save_and_restore for name, arm in arms.present.items()}
    yield arms.one_round("warm restore", straight, seed=0)
    for index in range(rounds):
        calls: Calls = {RAW: lambda: _read_back(writer)}
        calls |= {name: arm.restore for name, arm in arms.present.items()}
        yield arms.one_round(f"restore {index}", calls, seed=index)


def _read_back(writer: RawWriter) -> Figures:
    return {"restore_s": writer.read_back(), "fresh_restore_s": writer.read_back(fresh=True)}


def _without(failed: Mapping[str, str], measured: Round) -> Round:
    return {name: figures for name, figures in measured.items() if name not in failed}


def slug(name: str) -> str:
    """The arm as a folder name."""
    return name.replace(", ", "-").replace(" ", "-")
