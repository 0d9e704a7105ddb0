"""``make demo``: train, be killed twice in mid-epoch, resume, and end with the same bits.

Two runs of `benchmarks.imagenet` with the same flags: one undisturbed, one that this process
kills with SIGKILL, first at a random instant, then while a checkpoint is being written. Every
figure in the table is measured in this run; the exit status is 1 if a claim does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.make_images import ImageSet, make
from benchmarks.rawio import raw_write

ROOT = Path(__file__).resolve().parents[1]
EPOCHS, BATCH, INTERVAL = 3, 16, 10
IMAGES = ImageSet(classes=8, train=100, val=20)
STEPS_PER_EPOCH = -(-IMAGES.classes * IMAGES.train // BATCH)
TIME_LIMIT_S = 900.0  # a guard; two free cores need about 90 s

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
    seed = random.SystemRandom().randrange(1000) if args.seed is None else args.seed
    deadline_s = time.monotonic() + TIME_LIMIT_S
    make(args.out / "images", images=IMAGES)
    print(
        f"resnet18 on {IMAGES.classes * IMAGES.train} JPEG files, {EPOCHS} epochs of "
        f"{STEPS_PER_EPOCH} iterations, a checkpoint every {INTERVAL} (kill seed {seed})"
    )
    calm = Run(args.out / "calm", images=args.out / "images", deadline_s=deadline_s)
    hunted = Run(args.out / "hunted", images=args.out / "images", deadline_s=deadline_s)
    train_calmly(calm)
    kills = train_hunted(hunted, rng=random.Random(seed))
    claims = [*compare(calm, hunted), *(kill.claim() for kill in kills)]
    print_table(claims, figures(calm))
    return 0 if all(claim.holds for claim in claims) else 1


class Run:
    """One training run in a folder of its own: started, watched and, perhaps, killed."""

    def __init__(self, folder: Path, *, images: Path, deadline_s: float) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self.chk_dir = folder / "chk"
        self._history, self._report = folder / "history.jsonl", folder / "report.json"
        self._log = folder / "log.txt"
        self._deadline_s = deadline_s
        self._command = [
            *(sys.executable, "-m", "benchmarks.imagenet", "--data", str(images.resolve()), *FLAGS),
            *("--chk-prefix", str(self.chk_dir.resolve())),
            *("--history", str(self._history.resolve()), "--report", str(self._report.resolve())),
        ]

    @contextlib.contextmanager
    def started(self) -> Iterator[subprocess.Popen[bytes]]:
        """The trainer, in a process that is gone when the block ends."""
        search = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": search}
        with self._log.open("ab") as log:
            trainer = subprocess.Popen(
                self._command, stdout=log, stderr=log, cwd=ROOT, env=environment
            )
            try:
                yield trainer
            finally:
                trainer.kill()
                trainer.wait()

    def finish(self) -> float:
        """Train to the end; returns the seconds it took."""
        began_s = time.monotonic()
        with self.started() as trainer:
            self.wait(lambda: trainer.poll() is not None, trainer, poll_s=0.1)
            if trainer.returncode != 0:
                self._fail(f"the trainer ended with status {trainer.returncode}")
        return time.monotonic() - began_s

    def wait(
        self,
        condition: Callable[[], bool],
        trainer: subprocess.Popen[bytes],
        *,
        poll_s: float = 0.0005,
    ) -> None:
        """Poll until ``condition`` holds; ends the demo when the trainer or the time ends first."""
        while not condition():
            if trainer.poll() is not None and not condition():
                self._fail(f"the trainer ended early, with status {trainer.returncode}")
            if time.monotonic() > self._deadline_s:
                self._fail(f"the demo did not end within {TIME_LIMIT_S:.0f} s")
            time.sleep(poll_s)

    def _fail(self, why: str) -> None:
        tail = self._log.read_text(errors="replace").splitlines()[-20:]
        raise SystemExit("\n".join([f"demo: {why}; the end of {self._log}:", *tail]))

    def steps(self) -> list[int]:
        """Iterations in the order in which they were made, redone ones included."""
        return [line["step"] for line in _lines(self._history) if "batch" in line]

    def last_step(self) -> int:
        """The newest iteration; 0 before the first."""
        lines = _lines(self._history, last_bytes=4096)
        return next((line["step"] for line in reversed(lines) if "step" in line), 0)

    def epoch_ends(self) -> list[dict[str, Any]]:
        """What the data ledger said whenever an epoch was over."""
        return [line for line in _lines(self._history) if "exactly_once" in line]

    def report(self) -> dict[str, Any]:
        """What the run ended with."""
        report: dict[str, Any] = json.loads(self._report.read_text())
        return report

    def events(self, kind: str) -> list[dict[str, Any]]:
        """What checkfreq wrote of itself."""
        return [line for line in _lines(self.chk_dir / "events.jsonl") if line["kind"] == kind]

    def being_written(self) -> int | None:
        """The step of a checkpoint that is being written at this instant."""
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self.chk_dir):
                if name.startswith(".tmp-"):
                    return int(name.split("-")[1])
        return None


def _lines(path: Path, *, last_bytes: int | None = None) -> list[dict[str, Any]]:
    """Objects of a JSON-lines file, or of its end; a line that is cut off is left out."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    whole = data[: data.rfind(b"\n") + 1]
    if last_bytes is not None and len(whole) > last_bytes:
        whole = whole[-last_bytes:].partition(b"\n")[2]
    return [json.loads(line) for line in whole.splitlines()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """One line of the table: what is claimed, what was found, whether that is it."""

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


def train_calmly(run: Run) -> None:
    """The reference: never interrupted."""
    seconds = run.finish()
    accuracy = run.report()["best"]["accuracy"]
    print(
        f"uninterrupted: {run.last_step()} iterations in {seconds:.0f} s, "
        f"validation accuracy {accuracy:.1%}"
    )


def train_hunted(run: Run, *, rng: random.Random) -> list[Kill]:
    """The same training, killed in the first epoch at random and in the second while persisting."""
    first = rng.randint(2 * INTERVAL + 1, STEPS_PER_EPOCH - INTERVAL // 2)
    second = STEPS_PER_EPOCH + rng.randint(2, STEPS_PER_EPOCH // 2)
    began_s = time.monotonic()
    struck = [
        ("at a random instant", *strike(run, after_step=first, delay_s=rng.uniform(0, 0.1))),
        *strike_persist(run, after_step=second),
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


def strike_persist(run: Run, *, after_step: int) -> list[tuple[str, int, int | None]]:
    """Kill until a kill falls into a persist: one may end between our look and the signal."""
    struck: list[tuple[str, int, int | None]] = []
    while len(struck) < 3:
        at, written = strike(run, after_step=after_step, delay_s=0.0, persisting=True)
        struck.append(("during a persist" if written else "just after a persist", at, written))
        if written:
            return struck
        after_step = at + 1
    raise SystemExit(f"demo: no kill fell into a persist, in {len(struck)} tries")


def strike(
    run: Run, *, after_step: int, delay_s: float, persisting: bool = False
) -> tuple[int, int | None]:
    """Kill the trainer after a step, at once or in a persist: its last step, the one written."""
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
    """Data and weights of the two runs."""
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
    """The ledgers of all epochs: every sample's hash counted, summed and xored exactly once."""
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
    """Speeds, measured in this run and claimed by nobody."""
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
