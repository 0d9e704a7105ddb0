"""``make demo``: train, get killed twice in mid-epoch, resume, and end with the same bits.

Two runs of `checkfreq.examples.imagenet` with the same flags: one undisturbed, one that this
process kills with SIGKILL, first at a random instant, then while a checkpoint is being written.
Every figure in the table is measured in this run. The exit status is 1 if a claim does not hold.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from benchmarks.lab.rawio import raw_write
from benchmarks.lab.runs import Run
from benchmarks.make_images import ImageSet, make

EPOCHS, BATCH, INTERVAL = 3, 16, 10
IMAGES = ImageSet(classes=8, train=100, val=20)
STEPS_PER_EPOCH = -(-IMAGES.classes * IMAGES.train // BATCH)
TIME_LIMIT_S = 900.0  # a safeguard; one core and another that is busy need about 120 s

FLAGS = (
    *("--arch", "resnet18", "--image-size", "64", "--workers", "2"),
    *("--batch-size", str(BATCH), "--epochs", str(EPOCHS), "--lr", "0.5", "--warmup-epochs", "0.5"),
    *("--deterministic", "--checkfreq", "--cf_iterator", "--chk-freq", str(INTERVAL), "--quiet"),
)


def main(argv: list[str] | None = None) -> int:
    """Run the demo; 0 if every claim holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="working folder")
    parser.add_argument("--seed", type=int, default=None, help="of the kills (default: random)")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, _end)  # a container's first process has no default effect of it
    # Threads of torch that want more cores than are free, in a container with `--cpus` or beside
    # other work, wait for each other in every layer: 6 times as long, measured on 2026-11-26.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    seed = random.SystemRandom().randrange(1000) if args.seed is None else args.seed
    deadline_s = time.monotonic() + TIME_LIMIT_S
    make(args.out / "images", images=IMAGES)
    print(
        f"resnet18 on {IMAGES.classes * IMAGES.train} JPEG files, {EPOCHS} epochs of "
        f"{STEPS_PER_EPOCH} iterations, a checkpoint every {INTERVAL} (kill seed {seed})"
    )
    flags = ("--data", str((args.out / "images").resolve()), *FLAGS)
    calm, hunted = (
        Run(args.out / name, flags, deadline_s=deadline_s) for name in ("calm", "hunted")
    )
    train_uninterrupted(calm)
    kills = train_killed(hunted, rng=random.Random(seed))
    claims = [*compare(calm, hunted), *(kill.claim() for kill in kills)]
    print_table(claims, figures(calm))
    return 0 if all(claim.holds for claim in claims) else 1


def _end(number: int, frame: object) -> NoReturn:
    """Leave, and end the training that runs, as its context ends."""
    raise SystemExit(128 + number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A line of the table: the claim, what was measured, and whether the claim holds."""

    what: str
    found: str
    holds: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A SIGKILL from outside. Steps count iterations since training began."""

    when: str
    at_step: int
    written_step: int | None
    restored_step: int

    def claim(self) -> Claim:
        """At most two intervals of work are lost; a checkpoint being written is not lost."""
        lost = self.at_step - self.restored_step
        kept = self.written_step is None or self.restored_step >= self.written_step
        in_epoch = (self.at_step - 1) % STEPS_PER_EPOCH + 1
        writing = "" if self.written_step is None else f" writing {self.written_step},"
        return Claim(
            what=f"SIGKILL {self.when}: at most {2 * INTERVAL} iterations lost",
            found=f"at {self.at_step} (batch {in_epoch}),{writing} resumed from "
            f"{self.restored_step}: {lost} lost",
            holds=0 <= lost <= 2 * INTERVAL and kept and 1 < in_epoch < STEPS_PER_EPOCH,
        )


def train_uninterrupted(run: Run) -> None:
    """The reference: never interrupted."""
    seconds = run.finish()
    accuracy = run.report()["best"]["accuracy"]
    print(
        f"uninterrupted: {run.last_step()} iterations in {seconds:.0f} s, "
        f"validation accuracy {accuracy:.1%}"
    )


def train_killed(run: Run, *, rng: random.Random) -> list[Kill]:
    """The same training, killed in the first epoch at random and in the second while persisting."""
    first = rng.randint(2 * INTERVAL + 1, STEPS_PER_EPOCH - INTERVAL // 2)
    second = STEPS_PER_EPOCH + rng.randint(2, STEPS_PER_EPOCH // 2)
    began_s = time.monotonic()
    struck = [
        ("at a random instant", *kill_trainer(run, after_step=first, delay_s=rng.uniform(0, 0.1))),
        *kill_during_persist(run, after_step=second),
    ]
    run.finish()
    seconds = time.monotonic() - began_s
    print(f"killed twice:  {len(run.steps())} iterations in {seconds:.0f} s, restarts included")
    restored = [event["step"] for event in run.events("restored")]
    if len(restored) != len(struck):
        raise SystemExit(f"demo: {len(struck)} kills, but {len(restored)} restores: {restored}")
    return [
        Kill(when=when, at_step=at, written_step=written, restored_step=step)
        for (when, at, written), step in zip(struck, restored, strict=True)
    ]


def kill_during_persist(run: Run, *, after_step: int) -> list[tuple[str, int, int | None]]:
    """Kill until one hits a persist: it may finish between our check and the signal."""
    struck: list[tuple[str, int, int | None]] = []
    while len(struck) < 3:
        at, written = kill_trainer(run, after_step=after_step, delay_s=0.0, persisting=True)
        struck.append(("during a persist" if written else "just after a persist", at, written))
        if written:
            return struck
        after_step = at + 1
    raise SystemExit(f"demo: no kill hit a persist, in {len(struck)} tries")


def kill_trainer(
    run: Run, *, after_step: int, delay_s: float, persisting: bool = False
) -> tuple[int, int | None]:
    """Kill the trainer after a step, or in a persist; returns its last step and the one written."""
    with run.started() as trainer:
        run.wait(lambda: run.last_step() >= after_step, trainer, poll_s=0.005)
        time.sleep(delay_s)
        if persisting:
            run.wait(lambda: run.being_written() is not None, trainer)
        trainer.send_signal(signal.SIGKILL)
        written = run.being_written()
        trainer.wait()
    return run.last_step(), written if persisting else None


def compare(calm: Run, hunted: Run) -> list[Claim]:
    """Compare the data and the weights of the two runs."""
    first, second = calm.report(), hunted.report()
    claims = [
        exactly_once(run, name) for run, name in ((calm, "uninterrupted"), (hunted, "killed"))
    ]
    for part in ("weights", "optimizer"):
        same = first[part] == second[part]
        found = f"{first[part][:12]} {'=' if same else 'is not'} {second[part][:12]}"
        claims.append(Claim(what=f"final {part} equal, bit for bit", found=found, holds=same))
    return claims


def exactly_once(run: Run, name: str) -> Claim:
    """From the ledgers of all epochs: the hash of every sample was counted exactly once."""
    ends = run.epoch_ends()
    served = {end["epoch"]: end["served"] for end in ends}
    expected = IMAGES.classes * IMAGES.train
    return Claim(
        what=f"each of {expected} samples exactly once per epoch, {name}",
        found=", ".join(f"epoch {epoch + 1}: {count}" for epoch, count in served.items()),
        holds=served == dict.fromkeys(range(EPOCHS), expected)
        and all(end["exactly_once"] for end in ends),
    )


def figures(run: Run) -> list[tuple[str, str]]:
    """Speeds measured in this run, about which nothing is claimed."""
    committed = run.events("committed")
    num_bytes = committed[-1]["num_bytes"]
    holds_s = [event["stall_s"] for event in committed]
    persist = num_bytes / statistics.median(event["persist_s"] for event in committed)
    raw = raw_write(run.chk_dir.parent, num_bytes=num_bytes)
    how = "direct" if raw.direct else "buffered (direct I/O refused)"
    return [
        ("checkpoints", f"{len(committed)} of {num_bytes / 2**20:.1f} MiB"),
        (
            "training stalled per checkpoint",
            f"median {statistics.median(holds_s) * 1e3:.1f} ms, worst {max(holds_s) * 1e3:.1f} ms",
        ),
        ("persist, snapshot to durable", f"{persist / 1e9:.2f} GB/s while training"),
        (f"raw {how} write, same bytes", f"{raw.bytes_per_s / 1e9:.2f} GB/s, training over"),
        ("persist / raw write", f"{persist / raw.bytes_per_s:.2f}"),
    ]


def print_table(claims: list[Claim], measured: list[tuple[str, str]]) -> None:
    """Claims with a verdict, then figures."""
    print()
    for claim in claims:
        print(f"{claim.what:60}  {claim.found:54}  {'yes' if claim.holds else 'NO'}")
    print()
    for what, found in measured:
        print(f"{what:60}  {found}")


if __name__ == "__main__":
    sys.exit(main())
