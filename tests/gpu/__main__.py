"""What only a GPU can show, in stages, the most valuable first: ``make gpu-proof``.

    python -m tests.gpu --part 1      420 s: machine, tests, streams, a resumed training, costs
    python -m tests.gpu --part 2      200 s: restores, FSDP2, graphs, torch.compile, GPT-2
    python -m tests.gpu --part 3      the deliberate breaks of the order of snapshots

Every line that a stage prints is appended to ``--out`` as it comes; ``python -m tests.gpu.page``
makes a page of them, which is also printed here. Where no CUDA device is, each stage is a dry run
on the CPU. Exits with 1 unless all were run and passed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.gpu.page import page, read
from tests.gpu.runner import Lines, Stage, run_all
from tests.patience import slowness

#: The stages of each part, modules of tests/gpu/stages, and the seconds that each may take.
PARTS = {
    1: {"machine": 20, "tests": 150, "streams": 45, "resnet": 60, "stall": 78, "auto": 57},
    2: {"restoring": 40, "fsdp": 28, "graphs": 20, "compiled": 40, "gpt2": 62},
    3: {"breaks": 900},
}
#: Seconds for each part in all; what make and this program take before it begins is not counted.
LIMITS_S = {1: 410, 2: 190, 3: 900}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a part, and print its page."""
    args = _arguments(argv)
    signal.signal(signal.SIGTERM, _exit)  # the stage that is running is ended as well
    is_dry = args.dry or not torch.cuda.is_available()
    slower = slowness() if is_dry else 1.0
    limit_s = (args.limit_s or LIMITS_S[args.part]) * slower
    stages = [
        Stage(
            name,
            ("-m", f"tests.gpu.stages.{name}", *["--dry"] * is_dry),
            min(PARTS[args.part][name] * slower, limit_s),
        )
        for name in args.only or PARTS[args.part]
    ]
    if is_dry:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    with contextlib.closing(Lines(args.out)) as lines:
        names = [stage.name for stage in stages]
        about = {"part": args.part, "dry": is_dry, "limit_s": limit_s, "stages": names}
        lines.add("run", event="run", **about)
        is_good = run_all(stages, lines, limit_s=limit_s)
    print(f"\n{page(read([args.out]))}\nThe lines are in {args.out}.")
    return int(not is_good)


def _exit(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--part", type=int, choices=PARTS, default=1)
    add("--only", nargs="+", metavar="STAGE", help="only these stages of the part")
    add("--limit-s", type=float, help="for all stages together, instead of the part's own limit")
    add("--dry", action="store_true", help="small, on the CPU: whether each stage starts and ends")
    add("--out", type=Path, default=Path("build/gpu-proof.jsonl"), help="the file of lines")
    args = parser.parse_args(argv)
    if unknown := set(args.only or ()) - set(PARTS[args.part]):
        parser.error(f"part {args.part} has no {', '.join(sorted(unknown))}")
    return args


if __name__ == "__main__":
    sys.exit(main())
