"""What only a GPU can show, in stages, the most valuable first: ``make gpu-proof``.

    python -m tests.gpu --part 1      420 s: machine, tests, streams, a resumed training, costs
    python -m tests.gpu --part 2      200 s: restores, FSDP2, graphs, torch.compile, some of GPT-2
    python -m tests.gpu --part 3      20 minutes: all of GPT-2, the deliberate breaks of the order

That is enough for what the stages are expected to take, but not for their limits: where one takes
as long as it may, the last ones get less or are skipped, unless ``--limit-s`` gives more. Part 3
is too long for a GPU that is lent for minutes: ``--limit-s 200`` is enough for its first stage,
``--only breaks --limit-s N`` for some of the breaks.

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

#: The stages of each part, modules of tests/gpu/stages with their arguments. For each the seconds
#: that it is expected to take on an H100, as it took, and those that it may take.
PARTS = {
    1: {
        "machine": (9, 20),
        "tests": (110, 150),
        "streams": (27, 45),
        "resnet": (35, 60),
        "stall": (90, 105),
        "auto": (127, 145),
    },
    2: {
        "restoring": (21, 45),
        "fsdp": (24, 45),
        "graphs": (16, 30),
        "compiled": (23, 70),
        "gpt2": (50, 62),
    },
    3: {"gpt2 --whole": (150, 200), "breaks": (800, 1000)},
}
#: Seconds for each part in all; what make and this program take before it begins is not counted.
LIMITS_S = {1: 410, 2: 190, 3: 1200}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a part, and print its page."""
    args = _arguments(argv)
    signal.signal(signal.SIGTERM, _exit)  # the stage that is running is ended as well
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a job of a shell's background
        signal.signal(signal.SIGINT, signal.default_int_handler)  # stages end by it in time
    is_dry = args.dry or not torch.cuda.is_available()
    slower = slowness() if is_dry else 1.0
    limit_s = (args.limit_s or LIMITS_S[args.part]) * slower
    stages = []
    for name in args.only or PARTS[args.part]:
        _, at_most_s = PARTS[args.part][name]
        module, *more = f"tests.gpu.stages.{name}".split()
        arguments = ("-m", module, *more, *["--dry"] * is_dry)
        stages.append(Stage(name, arguments, min(at_most_s * slower, limit_s)))
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
