"""The command line: the original script's flags, and what they need now.

An option that is not supported, or a combination that would lose or repeat data, is refused with a
sentence.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
from pathlib import Path

from checkfreq.examples.imagenet.models import MODELS, SMALLEST_IMAGE, names


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The checked options. Ends the process (status 2) with one sentence if they do not fit."""
    parser = argparse.ArgumentParser(
        prog="python -m checkfreq.examples.imagenet",
        description="Train an image classifier on a folder of class folders, with CheckFreq.",
    )
    _add_training(parser)
    _add_checkpointing(parser)
    _add_output(parser)
    args = parser.parse_args(argv)
    args.image_size = args.image_size or max(224, SMALLEST_IMAGE.get(args.arch, 0))
    refusal = refuse(args)
    if refusal:
        parser.error(refusal)
    return args


def _add_training(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("training").add_argument
    add("--data", type=Path, required=True, metavar="DIR", help="train/ and val/, or class folders")
    known = f"{', '.join(MODELS)} or another classifier of torchvision; default: %(default)s"
    add("-a", "--arch", default="resnet18", metavar="MODEL", help=known)
    add("-b", "--batch-size", type=int, default=256, metavar="N", help="per update and rank")
    add("--workers", type=int, default=3, metavar="N", help="loader processes")
    add("--epochs", type=int, default=90, metavar="N", help="in total, resumes included")
    add("--steps-to-run", type=int, metavar="N", help="stop this process after N updates")
    add("--lr", type=float, default=0.1, help="for 256 images; scaled by those of an update")
    add("--lr-schedule", choices=("step", "cosine"), default="step", help="per epoch or per update")
    add("--warmup-epochs", type=float, default=5.0, metavar="N", help="linear; may be a fraction")
    add("--weight-decay", type=float, default=1e-4)
    add("--momentum", type=float, default=0.9)
    add("--image-size", type=int, metavar="PIXELS", help="default: 224, or the model's smallest")
    add("--seed", type=int, default=0, help="weights, order of the images, augmentation")
    add("--amp", action="store_true", help="mixed precision")
    add("--deterministic", action="store_true", help="the same bits on every run")
    add("--noeval", action="store_true", help="no validation after an epoch")
    add("--barrier", action="store_true", help="ranks meet after an epoch")
    add("--dali", action="store_true", help="read the images with NVIDIA DALI")
    add("--device", help="default: cuda where there is one (each rank its own), else cpu")
    # torch.distributed.launch gives it; both launchers set LOCAL_RANK too, and that is read.
    add("--local-rank", "--local_rank", type=int, help=argparse.SUPPRESS)


def _add_checkpointing(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("checkpointing").add_argument
    add("--checkfreq", action="store_true", help="checkpoint, and resume from --chk-prefix")
    add("--cf_iterator", "--cf-iterator", action="store_true", help="resumable data order")
    add("--chk-prefix", type=Path, default=Path("chk"), metavar="DIR", help="default: %(default)s/")
    add(
        "--chk-freq",
        type=int,
        metavar="N",
        help="updates between checkpoints; 0: each epoch; default: chosen to keep --max-overhead",
    )
    add("--max-overhead", type=float, metavar="FRACTION", help="bound; default: 0.035")
    add("--mtbf", type=float, metavar="SECONDS", help="mean time between failures, if known")
    add("--static", action="store_true", help="keep the first interval chosen")
    add(
        "--chk_mode_baseline",
        "--chk-mode-baseline",
        action="store_true",
        help="synchronous baseline: training waits until a checkpoint is durable",
    )
    add("--fresh", action="store_true", help="start over; older checkpoints are set aside")
    add(
        "--split-replicated",
        action="store_true",
        help="every rank writes a part of the model, instead of the first all of it",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("output").add_argument
    add("--report", type=Path, metavar="FILE", help="write a JSON summary at the end")
    add("--history", type=Path, metavar="FILE", help="append one JSON line per update")
    add("--print-freq", type=int, default=10, metavar="N", help="updates between progress figures")
    add("--quiet", action="store_true", help="no progress bar")


def is_installed(module: str) -> bool:
    """Whether ``module`` can be imported, without importing more than its parents."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even its parent
        return False


def refuse(args: argparse.Namespace) -> str | None:
    """Why these options cannot be run, as a sentence; None if they can."""
    for refusal in (_not_there(args), _contradiction(args), _bad_value(args)):
        if refusal:
            return refusal
    return None


def _not_there(args: argparse.Namespace) -> str | None:
    if args.arch not in MODELS and args.arch not in names():
        return f"--arch {args.arch} is no classifier of torchvision"
    if args.dali and not is_installed("nvidia.dali"):
        return '--dali needs NVIDIA DALI: pip install "checkfreq[dali]"'
    return None


def _contradiction(args: argparse.Namespace) -> str | None:
    if args.chk_mode_baseline and not args.checkfreq:
        return "--chk_mode_baseline says how to checkpoint; it needs --checkfreq"
    if args.checkfreq and not args.cf_iterator:
        return (
            "--checkfreq needs --cf_iterator: without it a resume repeats some images, skips others"
        )
    if args.steps_to_run is not None and not args.cf_iterator:
        return "--steps-to-run is counted by the resumable iterator; it needs --cf_iterator"
    if args.chk_freq is not None and not args.checkfreq:
        return "--chk-freq needs --checkfreq"
    if args.chk_mode_baseline and args.chk_freq is None:
        return "--chk_mode_baseline needs --chk-freq: an interval is chosen for two phases only"
    chooses = args.max_overhead is not None or args.mtbf is not None or args.static
    if chooses and args.chk_freq is not None:
        return "--max-overhead, --mtbf and --static choose the interval; leave out --chk-freq"
    if chooses and not args.checkfreq:
        return "--max-overhead, --mtbf and --static need --checkfreq"
    if args.split_replicated and not args.checkfreq:
        return "--split-replicated says how to checkpoint; it needs --checkfreq"
    return None


def _bad_value(args: argparse.Namespace) -> str | None:
    for name, least in (("batch_size", 1), ("epochs", 1), ("print_freq", 1), ("workers", 0)):
        if getattr(args, name) < least:
            return f"--{name.replace('_', '-')} must be at least {least}"
    if args.chk_freq is not None and args.chk_freq < 0:
        return "--chk-freq must be 0 (each epoch) or a number of updates"
    if args.max_overhead is not None and not 0 < args.max_overhead < 1:
        return "--max-overhead must be between 0 and 1"
    if args.mtbf is not None and not 0 < args.mtbf < math.inf:
        return "--mtbf must be a number of seconds, more than 0"
    if args.steps_to_run is not None and args.steps_to_run < 1:
        return "--steps-to-run must be at least 1"
    least_pixels = SMALLEST_IMAGE.get(args.arch, 32)
    if args.image_size < least_pixels:
        return f"--image-size must be at least {least_pixels} for {args.arch}"
    if not args.data.is_dir():
        return f"--data {args.data} is not a folder"
    return None
