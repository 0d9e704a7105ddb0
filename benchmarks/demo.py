"""``make demo``: train, get killed twice in mid-epoch, resume, and end with the same bits.

Two runs of `checkfreq.examples.imagenet` side by side, with the same flags: one undisturbed, one
that this process kills with SIGKILL, first at a random instant, then while a checkpoint is being
written. They are as long as fits into half a minute on this machine, which is measured first, and
every figure shown is measured in this run. The exit status is 1 if a claim does not hold.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from benchmarks.lab.rawio import raw_write
from benchmarks.lab.runs import Run
from benchmarks.make_images import ImageSet, make

EPOCHS, BATCH, INTERVAL, SIDE = 2, 16, 10, 64
IMAGES = ImageSet(classes=8, train=120, val=8)
#: Iterations of an epoch: a kill in the middle may lose two intervals; more show nothing more.
LEAST, MOST = 30, IMAGES.classes * IMAGES.train // BATCH
GOAL_S = 32.0
TIME_LIMIT_S = 900.0  # a safeguard

FLAGS = (
    *("--arch", "resnet18", "--image-size", str(SIDE), "--workers", "1"),
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
    show = Show()
    show.say("two trainings of a ResNet with the same flags; one is killed twice. Same bits?")
    length = fitting(show)
    images = replace(IMAGES, train=length * BATCH // IMAGES.classes)
    shutil.rmtree(args.out, ignore_errors=True)
    make(args.out / "images", images=images)
    show.say(
        f"resnet18 on {length * BATCH} JPEG files: {EPOCHS} epochs of {length} iterations, "
        f"a checkpoint every {INTERVAL} (kill seed {seed})"
    )
    flags = ("--data", str((args.out / "images").resolve()), *FLAGS)
    deadline_s = time.monotonic() + TIME_LIMIT_S
    calm, killed = (
        Run(args.out / name, flags, deadline_s=deadline_s) for name in ("undisturbed", "killed")
    )
    hunt = Hunt(killed, show, random.Random(seed), length)
    side_by_side(calm, hunt, show)
    claims = [*hunt.claims, *compare(calm, killed, num_samples=length * BATCH)]
    for claim in claims[len(hunt.claims) :]:
        show.claim(claim)
    for text in (*picture(calm, killed, hunt.kills), "", *figures(calm), "", *what_next(args.out)):
        print(text)
    return 0 if all(claim.holds for claim in claims) else 1


def _end(number: int, frame: object) -> NoReturn:
    """Leave, and end the trainings that run, as their contexts end."""
    raise SystemExit(128 + number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The claim, what was measured, and whether the claim holds."""

    what: str
    found: str
    holds: bool


class Show:
    """What happens, with the seconds since the start; on a terminal, the progress below it."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._lock = threading.Lock()
        self._is_terminal = sys.stdout.isatty()

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began_s

    def say(self, text: str) -> None:
        """A line that stays."""
        self._write(f"{self.elapsed_s:5.1f} s  {text}\n")

    def claim(self, claim: Claim) -> None:
        """A claim and its verdict."""
        self.say(f"{'yes' if claim.holds else 'NO '}  {claim.what}: {claim.found}")

    def progress(self, text: str) -> None:
        """Replace the progress, which only a terminal shows."""
        if self._is_terminal:
            self._write(f"{self.elapsed_s:5.1f} s  {text}")

    def _write(self, text: str) -> None:
        with self._lock:
            print(f"\r\033[K{text}" if self._is_terminal else text, end="", flush=True)


def fitting(show: Show) -> int:
    """How many iterations of an epoch fit, by the time of a few here, and of the imports."""
    startup_s = -time.monotonic()
    import torch

    from checkfreq.examples.imagenet.models import build

    torch.set_num_threads(1)
    model = build("resnet18", num_classes=IMAGES.classes)
    startup_s += time.monotonic()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seconds = []
    for _ in range(4):
        began_s = time.monotonic()
        model(torch.randn(BATCH, 3, SIDE, SIDE)).sum().backward()
        optimizer.step()
        seconds.append(time.monotonic() - began_s)
    # Beside it run the other training, two loaders and two writers.
    step_s = 1.3 * min(seconds) * max(1.0, 2.0 / len(os.sched_getaffinity(0)))
    left_s = GOAL_S - show.elapsed_s - 3.0 * (startup_s + 2.0)
    show.say(f"this machine imports torch in {startup_s:.1f} s, and trains {1 / step_s:.0f} it/s")
    return min(MOST, max(LEAST, int(left_s / step_s / EPOCHS) - INTERVAL))


def side_by_side(calm: Run, hunt: Hunt, show: Show) -> None:
    """Both trainings to their ends. An error of one, or a signal, ends the other too."""

    def train_uninterrupted() -> None:
        seconds = calm.finish()
        accuracy = calm.report()["best"]["accuracy"]
        show.say(f"undisturbed: over after {seconds:.0f} s, validation accuracy {accuracy:.0%}")

    total = EPOCHS * hunt.length
    with ThreadPoolExecutor(2) as pool:
        try:
            running: set[Future[None]] = {pool.submit(train_uninterrupted), pool.submit(hunt.train)}
            while running:
                done, running = wait(running, timeout=0.2, return_when=FIRST_EXCEPTION)
                for one in done:
                    one.result()
                bars = (_bar(name, run.last_step(), total) for name, run in
                        (("undisturbed", calm), ("killed", hunt.run)))  # fmt: skip
                show.progress("   ".join(bars))
        except BaseException:
            calm.abandon()
            hunt.run.abandon()
            raise


def _bar(name: str, step: int, total: int) -> str:
    width = 20 * step // total
    return f"{name} {'#' * width}{'.' * (20 - width)} {step}/{total}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A SIGKILL from outside. Steps count iterations since training began."""

    when: str
    at_unix_s: float
    at_step: int
    written_step: int | None

    def claim(self, restored_step: int, length: int) -> Claim:
        """At most two intervals of work are lost; a checkpoint being written is not lost."""
        lost = self.at_step - restored_step
        kept = self.written_step is None or restored_step >= self.written_step
        in_epoch = (self.at_step - 1) % length + 1
        writing = "" if self.written_step is None else f" writing {self.written_step},"
        return Claim(
            what=f"SIGKILL {self.when}: at most {2 * INTERVAL} iterations lost",
            found=f"at {self.at_step} (batch {in_epoch}),{writing} resumed from "
            f"{restored_step}: {lost} lost",
            holds=0 <= lost <= 2 * INTERVAL and kept and 1 < in_epoch < length,
        )


class Hunt:
    """A training that is killed in its first epoch at random, in its second while persisting."""

    def __init__(self, run: Run, show: Show, rng: random.Random, length: int) -> None:
        self.run, self.length = run, length
        self.kills: list[Kill] = []
        self.claims: list[Claim] = []
        self._show, self._rng = show, rng

    def train(self) -> None:
        """To the end, over all kills."""
        for after_step, in_persist in self._plan():
            with self.run.started() as trainer:
                self._judge(trainer)
                self.kills.append(self._kill(trainer, after_step, in_persist))
            when, at_step = self.kills[-1].when, self.kills[-1].at_step
            self._show.say(f"killed: SIGKILL {when}, at iteration {at_step}; started again")
        with self.run.started() as trainer:
            self._judge(trainer)
            self.run.wait(lambda: trainer.poll() is not None, trainer, poll_s=0.1)
            self.run.check(trainer)
        self._show.say("killed: over")

    def _kill(self, trainer: subprocess.Popen[bytes], after_step: int, in_persist: bool) -> Kill:
        run, when, written = self.run, "at a random instant", None
        run.wait(lambda: run.last_step() >= after_step, trainer, poll_s=0.005)
        if in_persist:
            run.wait(lambda: run.being_written() is not None, trainer)
        else:
            time.sleep(self._rng.uniform(0, 0.1))
        trainer.send_signal(signal.SIGKILL)
        at_unix_s = time.time()
        if in_persist:  # it may have finished between the look and the signal
            written = run.being_written()
            when = "just after a persist" if written is None else "during a persist"
        trainer.wait()
        return Kill(when=when, at_unix_s=at_unix_s, at_step=run.last_step(), written_step=written)

    def _plan(self) -> Iterator[tuple[int, bool]]:
        """After which step to kill, and whether in a persist: again until one is hit."""
        yield self._rng.randint(2 * INTERVAL + 1, self.length - INTERVAL // 2), False
        after_step = self.length + self._rng.randint(2, self.length // 2)
        for _ in range(3):
            yield after_step, True
            if self.kills[-1].written_step is not None:
                return
            after_step = self.kills[-1].at_step + 1
        raise SystemExit("demo: no kill hit a persist, in 3 tries")

    def _judge(self, trainer: subprocess.Popen[bytes]) -> None:
        """Show what the kill before this start cost."""
        if not self.kills:
            return
        num = len(self.kills)
        self.run.wait(lambda: len(self.run.events("restored")) >= num, trainer, poll_s=0.02)
        restored_step = self.run.events("restored")[num - 1]["step"]
        self.claims.append(self.kills[-1].claim(restored_step, self.length))
        self._show.claim(self.claims[-1])


def compare(calm: Run, killed: Run, *, num_samples: int) -> list[Claim]:
    """Compare the data and the weights of the two runs."""
    first, second = calm.report(), killed.report()
    claims = [
        exactly_once(run, name, num_samples)
        for run, name in ((calm, "undisturbed"), (killed, "killed"))
    ]
    for part in ("weights", "optimizer"):
        same = first[part] == second[part]
        found = f"{first[part][:12]} {'=' if same else 'is not'} {second[part][:12]}"
        claims.append(Claim(what=f"final {part} equal, bit for bit", found=found, holds=same))
    return claims


def exactly_once(run: Run, name: str, num_samples: int) -> Claim:
    """From the ledgers of all epochs: the hash of every sample was counted exactly once."""
    ends = run.epoch_ends()
    served = {end["epoch"]: end["served"] for end in ends}
    return Claim(
        what=f"each of {num_samples} samples exactly once per epoch, {name}",
        found=", ".join(f"epoch {epoch + 1}: {count}" for epoch, count in served.items()),
        holds=served == dict.fromkeys(range(EPOCHS), num_samples)
        and all(end["exactly_once"] for end in ends),
    )


def picture(calm: Run, killed: Run, kills: list[Kill]) -> Iterator[str]:
    """Iterations against time: ``.`` undisturbed, ``o`` killed, ``X`` the kills."""
    width, height = 64, 12
    points = [(line["time_unix_s"], line["step"], mark)
              for run, mark in ((calm, "."), (killed, "o")) for line in run.updates()]  # fmt: skip
    points += [(kill.at_unix_s, kill.at_step, "X") for kill in kills]
    began_s = min(*calm.starts_unix_s, *killed.starts_unix_s)
    seconds, most = max(at for at, _, _ in points) - began_s, max(step for _, step, _ in points)
    rows = [[" "] * width for _ in range(height)]
    for at_s, step, mark in points:
        column = int((at_s - began_s) / seconds * (width - 1))
        rows[height - 1 - step * (height - 1) // most][column] = mark
    yield ""
    for index, row in enumerate(rows):
        label = str(most) if index == 0 else "0" if index == height - 1 else ""
        yield f"{label:>9} |{''.join(row).rstrip()}"
    yield f"{'iteration':>9} +{'-' * width}"
    yield f"{'':>10}0 s{f'{seconds:.0f} s':>{width - 2}}"
    yield f"{'':>11}. undisturbed   o killed   X SIGKILL"


def figures(run: Run) -> Iterator[str]:
    """Speeds measured in this run, about which nothing is claimed."""
    committed = run.events("committed")
    num_bytes = committed[-1]["num_bytes"]
    holds_s = [event["stall_s"] for event in committed]
    persist = num_bytes / statistics.median(event["persist_s"] for event in committed)
    raw = raw_write(run.chk_dir.parent, num_bytes=num_bytes, rounds=3)
    how = "direct" if raw.direct else "buffered (direct I/O refused)"
    median_ms, worst_ms = statistics.median(holds_s) * 1e3, max(holds_s) * 1e3
    for what, found in (
        ("checkpoints of the undisturbed run", f"{len(committed)} of {num_bytes / 2**20:.1f} MiB"),
        ("training stalled for each", f"median {median_ms:.1f} ms, worst {worst_ms:.1f} ms"),
        ("persist, beside both trainings", f"{persist / 1e9:.2f} GB/s"),
        (f"raw {how} write, afterwards", f"{raw.bytes_per_s / 1e9:.2f} GB/s"),
    ):
        yield f"{what:36}  {found}"


def what_next(out: Path) -> Iterator[str]:
    """A line each on what to try."""
    command = "checkfreq"
    if shutil.which(command) is None:
        command = os.path.relpath(Path(sys.executable).with_name(command))
    chk_dir = out / "killed" / "chk"
    yield "What next:"
    for what, line in (
        ("what happened, as a page", f"{command} report {chk_dir} --out {out / 'report.html'}"),
        ("while a run trains", f"{command} watch {chk_dir}"),
        ("does your script resume exactly?", f"{command} crashtest -- python train.py"),
    ):
        yield f"  {what:32}  {line}"


if __name__ == "__main__":
    sys.exit(main())
