"""The time of a whole training run that is killed repeatedly, beside one that is not.

    python -m benchmarks.interruptions
    python -m benchmarks.interruptions --data /imagenet --arch resnet50 --batch-size 256 \\
        --image-size 224 --workers 12 --epochs 2 --every 600 --amp

`checkfreq.examples.imagenet` runs in a separate process. SIGKILL ends it every ``--every`` seconds,
first after a delay drawn from ``--seed``, at the same times since the start in every interrupted
arm. The same command starts it again until it is done. Other options are passed on.

Arms: ``uninterrupted, no checkpoints`` is the base; ``uninterrupted, auto``; and, interrupted,
``auto``, ``epoch boundary`` (a checkpoint per epoch) and ``synchronous`` (at the last interval of
``uninterrupted, auto``, or else of ``auto``; training stops until each checkpoint is durable). An
arm that cannot finish, because an epoch does not fit between two interruptions, is given up after
``--patience`` times the base. Before all arms, one update is made and, with ``--data``, every file
is read, so the base does not pay for a cold page cache. With ``--repeats`` the two uninterrupted
arms alternate that many times.

A line per arm and repeat. ``seconds``: wall clock, every restart included; ``ratio``: to the
base (the median of its repeats).
``finished``; ``reached``: the part of the training that was done or, when given up, durable.
``kills``; ``iterations`` in all, ``needed``, ``redone``. ``resume_s``: median from the start of a
new process to its first update, and its parts ``startup_s`` (imports, data, model), ``restore_s``
(worker and checkpoint) and ``first_update_s``. ``checkpoints`` that became durable; ``k``: the last
interval. ``equal``: whether the loss at every update ``compared``, redone ones too, and the final
weights and optimizer match the base bit for bit. ``curve``: [seconds, step, loss].
"""

from __future__ import annotations

import argparse
import math
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.interruptions.restarts import (
    BASE,
    UNINTERRUPTED,
    Restart,
    differing,
    median,
    redone,
    restarts,
    schedule,
    thinned,
)
from benchmarks.lab.estimate import quartiles
from benchmarks.lab.record import emit
from benchmarks.lab.runs import Run, Survival, survive
from benchmarks.make_images import ImageSet, make
from checkfreq.examples.imagenet import options

SYNCHRONOUS = "synchronous"
CHECKFREQ = ("--checkfreq",)

#: The flags of the arms but the base, in the order in which they run.
ARMS: dict[str, tuple[str, ...]] = {
    UNINTERRUPTED: CHECKFREQ,
    "auto": CHECKFREQ,
    "epoch boundary": (*CHECKFREQ, "--chk-freq", "0"),
    SYNCHRONOUS: (*CHECKFREQ, "--chk_mode_baseline"),
}


def main() -> None:
    """Train the base, then every arm."""
    args, passed_on = _arguments()
    with tempfile.TemporaryDirectory(
        dir=args.folder, prefix="interruptions-", ignore_cleanup_errors=True
    ) as scratch:
        folder = Path(scratch)
        images = _images(args, folder)
        flags = [*_flags(args, images), *passed_on]
        args.amp = options.parse(flags).amp  # a wrong option fails right away
        if args.warm_up:
            if args.data is not None:
                read_all(images)
            Run(folder / "warm-up", [*flags, "--steps-to-run", "1"]).finish()
        Bench(folder, flags, args).train()


def _arguments(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """This benchmark's options, and those for the training script."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0] if __doc__ else "",
        epilog="Other options are passed to checkfreq.examples.imagenet.",
        allow_abbrev=False,
    )
    _add_training(parser)
    add = parser.add_argument
    add("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="beside the base")
    add("--every", type=float, help="seconds between interruptions")
    add("--every-of-base", type=float, default=0.6, help="instead: a fraction of the base's time")
    add("--first", type=float, help="seconds to the first; default: drawn, within --every")
    add("--seed", type=int, default=0, help="of the first interruption")
    add("--patience", type=float, default=3.0, help="times the base, after which to give up")
    add("--interval", type=int, help="of the synchronous arm; default: AUTO's last")
    add("--repeats", type=int, default=1, help="of the arms that are not interrupted")
    add(
        "--warm-up",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="one update first, and every file of --data read",
    )
    add("--folder", type=Path, default=Path(), help="a folder on the disk to write to")
    args, passed_on = parser.parse_known_args(argv)
    args.arms = [name for name in ARMS if name in args.arms]
    if refusal := _refuse(args):
        parser.error(refusal)
    return args, passed_on


def _refuse(args: argparse.Namespace) -> str | None:
    for name in ("every", "every_of_base", "patience", "repeats"):
        given = getattr(args, name)
        if given is not None and given <= 0:
            return f"--{name.replace('_', '-')} must be more than 0"
    return None


def _add_training(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("training").add_argument
    add("--data", type=Path, metavar="DIR", help="class folders; default: generated JPEG files")
    add("--images", type=int, default=48, help="generated per class, of 8 classes")
    add("-a", "--arch", default="resnet18")
    add("-b", "--batch-size", type=int, default=16)
    add("--epochs", type=int, default=3)
    add("--image-size", type=int, default=64)
    add("--workers", type=int, default=2)
    add("--deterministic", action=argparse.BooleanOptionalAction, default=True)


def _images(args: argparse.Namespace, folder: Path) -> Path:
    if args.data is not None:
        return Path(args.data)
    make(folder / "images", images=ImageSet(train=args.images, val=max(1, args.images // 6)))
    return folder / "images"


def read_all(folder: Path) -> int:
    """Read every file, to bring it into the page cache; returns the number of bytes."""
    buffer, num_bytes = bytearray(1 << 20), 0
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while count := file.readinto(buffer):
                    num_bytes += count
    return num_bytes


def _flags(args: argparse.Namespace, data: Path) -> list[str]:
    """The flags of every arm. Writing the loss of each update waits for the device."""
    return [
        *("--data", str(data.resolve()), "--arch", args.arch),
        *("--batch-size", str(args.batch_size), "--epochs", str(args.epochs)),
        *("--image-size", str(args.image_size), "--workers", str(args.workers)),
        *("--lr", "0.5", "--warmup-epochs", "0.5", "--print-freq", "1", "--quiet"),
        *("--cf_iterator", *(["--deterministic"] if args.deterministic else [])),
    ]


@dataclass(frozen=True, slots=True)
class Trained:
    """The output of an arm, and how it ended."""

    run: Run
    survival: Survival

    @classmethod
    def to_the_end(
        cls, folder: Path, flags: Sequence[str], kills_s: Iterable[float], limit_s: float
    ) -> Trained:
        """Train in ``folder``, killed at each of ``kills_s``, until done or until ``limit_s``."""
        trainer = Run(folder, flags)
        return cls(trainer, survive(trainer, kills_s, limit_s=limit_s))

    @property
    def k(self) -> int | None:
        """The last interval that AUTO chose, if any."""
        plans = self.run.events("plan")
        return plans[-1]["interval_steps"] if plans else None

    def equals(self, other: Trained) -> bool:
        """Whether every update and the final state match the other run's bit for bit."""
        mine, theirs = self.run.report(), other.run.report()
        is_same = all(mine[part] == theirs[part] for part in ("weights", "optimizer"))
        return is_same and not differing(self.run.updates(), other.run.updates())


class Bench:
    """The arms of one training, and what later arms need from earlier ones."""

    def __init__(self, folder: Path, flags: Sequence[str], args: argparse.Namespace) -> None:
        self._folder, self._flags, self._args = folder, flags, args
        self._bases: list[Trained] = []
        self._k: int | None = args.interval

    def train(self) -> None:
        """Run all arms, and print a line for each."""
        calm: list[Trained] = []
        for repeat in range(self._args.repeats):
            base = f"base-{repeat}"
            self._bases.append(Trained.to_the_end(self._folder / base, self._flags, (), math.inf))
            if UNINTERRUPTED in self._args.arms:
                calm.append(self._trained(UNINTERRUPTED, f"calm-{repeat}", CHECKFREQ, ()))
        for name, runs in ((BASE, self._bases), (UNINTERRUPTED, calm)):
            for repeat, trained in enumerate(runs, 1):
                self._report(name, trained, repeat)
        for name in self._args.arms:
            if name != UNINTERRUPTED:
                self._interrupted(name)

    def _interrupted(self, name: str) -> None:
        """Train one arm until it is done or given up."""
        flags = ARMS[name]
        if name == SYNCHRONOUS:
            if self._k is None:
                print("synchronous: left out, AUTO has chosen no interval", file=sys.stderr)
                return
            flags = (*flags, "--chk-freq", str(self._k))
        kills_s = schedule(self._first_s, self._every_s)
        self._report(name, self._trained(name, name.replace(" ", "-"), flags, kills_s))

    def _trained(
        self, name: str, folder: str, flags: Sequence[str], kills_s: Iterable[float]
    ) -> Trained:
        print(f"{name}: begins", file=sys.stderr)
        limit_s = self._args.patience * self._base_s
        trained = Trained.to_the_end(
            self._folder / folder, [*self._flags, *flags], kills_s, limit_s
        )
        self._k = self._k or trained.k
        return trained

    @property
    def _base_s(self) -> float:
        return statistics.median(each.survival.seconds for each in self._bases)

    @property
    def _every_s(self) -> float:
        every_s: float = self._args.every or self._args.every_of_base * self._base_s
        return every_s

    @property
    def _first_s(self) -> float:
        drawn_s = random.Random(self._args.seed).uniform(0, self._every_s)
        return drawn_s if self._args.first is None else float(self._args.first)

    def _report(self, name: str, trained: Trained, repeat: int = 1) -> None:
        """Print the line of an arm and remove its checkpoints."""
        survival, updates = trained.survival, trained.run.updates()
        print(f"{name}: {survival.seconds:.0f} s, {survival.kills} kills", file=sys.stderr)
        emit(
            "interruptions",
            folder=self._args.folder,
            packages=("torchvision",),
            arm=name,
            repeat=repeat,
            **self._setting(),
            seconds=round(survival.seconds, 2),
            ratio=round(survival.seconds / self._base_s, 4),
            finished=survival.finished,
            kills=survival.kills,
            **iterations(trained, needed=len(self._bases[0].run.steps())),
            **resumes(trained.run),
            checkpoints=len(trained.run.events("committed")),
            k=self._k if name == SYNCHRONOUS else trained.k,
            equal=self._is_equal(trained),
            compared=len(updates),
            curve=thinned(updates, start_unix_s=trained.run.starts_unix_s[0]),
        )
        shutil.rmtree(trained.run.chk_dir, ignore_errors=True)

    def _is_equal(self, trained: Trained) -> bool | None:
        """None if there is nothing to compare with: the first base, and runs given up."""
        can = trained is not self._bases[0] and trained.survival.finished
        return trained.equals(self._bases[0]) if can else None

    def _setting(self) -> dict[str, Any]:
        args = self._args
        return {
            "model": args.arch,
            "batch": args.batch_size,
            "image_size": args.image_size,
            "epochs": args.epochs,
            "workers": args.workers,
            "deterministic": args.deterministic,
            "amp": args.amp,
            "data": "generated" if args.data is None else args.data.resolve().name,
            "every_s": round(self._every_s, 3),
            "every_of_base": args.every_of_base if args.every is None else None,
            "first_s": round(self._first_s, 3),
            "seed": args.seed,
            "patience": args.patience,
        }


def iterations(trained: Trained, *, needed: int) -> dict[str, Any]:
    """The iterations made, needed and redone, and how much of the training is durable."""
    steps = trained.run.steps()
    durable = max((event["step"] for event in trained.run.events("committed")), default=0)
    return {
        "iterations": len(steps),
        "needed": needed,
        "redone": redone(steps),
        "reached": 1.0 if trained.survival.finished else round(durable / needed, 4),
    }


def resumes(trained: Run) -> dict[str, Any]:
    """Medians over the restarts that reached an update, and the quartiles of the whole."""
    found = restarts(
        trained.starts_unix_s,
        ready_s=trained.ready_unix_s(),
        restored_s=[event["time_unix_s"] for event in trained.events("restored")],
        updated_s=[update["time_unix_s"] for update in trained.updates()],
    )
    parts: dict[str, Callable[[Restart], float | None]] = {
        "resume_s": lambda each: each.resume_s,
        "startup_s": lambda each: each.startup_s,
        "restore_s": lambda each: each.restore_s,
        "first_update_s": lambda each: each.first_update_s,
    }
    medians = {name: median([part(each) for each in found]) for name, part in parts.items()}
    resumes_s = [each.resume_s for each in found]
    quartiles_s = [round(cut, 3) for cut in quartiles(resumes_s)] if len(found) > 1 else []
    return {**medians, "resume_quartiles_s": quartiles_s, "resumes": len(found)}
