"""The commands that look: ``checkfreq ls|show|verify DIR|URL``, ``checkfreq prune DIR``, and
``checkfreq simulate``.

All commands but ``prune`` only read, and take no lock, so they are safe beside a run.

Exit status: 0 when all is well; 1 when there is no checkpoint, or a damaged one; 2 when the
command is wrong or the directory cannot be read.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import checkfreq
from checkfreq.cli import commands, prune, run, simulate
from checkfreq.errors import (
    CheckFreqError,
    ConfigError,
    CorruptCheckpointError,
    NoCheckpointError,
    printable,
)
from checkfreq.mirror.reader import MirrorReader
from checkfreq.mirror.settings import Mirror, is_url
from checkfreq.store.source import CheckpointSource
from checkfreq.store.store import CheckpointStore

BAD_CHECKPOINT, BAD_COMMAND = 1, 2


def main(argv: Sequence[str]) -> int:
    """Run one command; returns the exit status."""
    args = _parser().parse_args(argv)
    try:
        status: int = args.run(args)
        sys.stdout.flush()
    except BrokenPipeError:
        return _reader_went_away()
    except (CorruptCheckpointError, NoCheckpointError) as error:
        return _fail(error, BAD_CHECKPOINT)
    except (CheckFreqError, OSError) as error:
        return _fail(error, BAD_COMMAND)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="checkfreq",
        description="Inspect a directory of checkpoints or a mirror, simulate a run, or run one. "
        "Of those that inspect, only prune changes anything, or takes the lock.",
        epilog="exit status: 0 success; 1 no checkpoint, or a damaged one; 2 wrong usage, or the "
        "directory cannot be read",
    )
    parser.add_argument("--version", action="version", version=f"checkfreq {checkfreq.__version__}")
    verbs = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    listing = _verb(verbs, "ls", commands.ls, "list the checkpoints, oldest first")
    listing.add_argument("--json", action="store_true", help="one JSON object per line")
    show = _verb(verbs, "show", commands.show, "show what a checkpoint holds (default: the newest)")
    show.add_argument(
        "step", type=_step_or_best, nargs="?", metavar="STEP", help="also best:METRIC[:max|:min]"
    )
    show.add_argument("--tensors", action="store_true", help="also list every tensor")
    show.add_argument(
        "--objects", action="store_true", help="also print the state that is not tensors"
    )
    show.add_argument("--json", action="store_true", help="print the whole manifest")
    verify = _verb(verbs, "verify", commands.verify, "read every byte and check every digest")
    verify.add_argument("step", type=_step, nargs="?", metavar="STEP", help="default: all")
    pruning = _verb(verbs, "prune", _prune, "remove the checkpoints that are not to be kept")
    prune.add_arguments(pruning)
    purpose = "simulate a training run with failures, for several ways to choose the interval"
    paper = verbs.add_parser("simulate", help=purpose, description=purpose.capitalize() + ".")
    simulate.add_arguments(paper)
    paper.set_defaults(run=simulate.simulate)
    verbs.add_parser("run", help=run.PURPOSE)  # it has a parser of its own
    return parser


def _verb(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: commands.Command,
    purpose: str,
) -> argparse.ArgumentParser:
    verb = verbs.add_parser(name, help=purpose, description=purpose.capitalize() + ".")
    purpose = "the chk_dir of a CFManager, or the URL of a mirror (s3://bucket/run)"
    verb.add_argument("dir", metavar="DIR|URL", help=purpose)
    verb.set_defaults(run=lambda args: run(_source(args.dir), args))
    return verb


def _prune(source: CheckpointSource, args: argparse.Namespace) -> int:
    if not isinstance(source, CheckpointStore):
        raise ConfigError(
            f"prune: expected a directory, got {source.name}: a mirror is pruned by its run"
        )
    return prune.prune(source, args)


def _source(text: str) -> CheckpointSource:
    return MirrorReader(Mirror(text)) if is_url(text) else CheckpointStore(Path(text))


def _step(text: str) -> int:
    """``1200``, or a directory name as a shell completes it: ``step-00001200/``."""
    digits = text.rstrip("/").rpartition("/")[2].removeprefix("step-")
    if not digits.isascii() or not digits.isdigit():
        raise argparse.ArgumentTypeError(f"expected a step such as 1200, got {text!r}")
    return int(digits)


def _step_or_best(text: str) -> int | str:
    return text if text.startswith("best:") else _step(text)


def _fail(error: Exception, status: int) -> int:
    print(f"checkfreq: {printable(str(error), keep=chr(10))}", file=sys.stderr)
    return status


def _reader_went_away() -> int:
    """``checkfreq show DIR | head`` is not an error; a flush at exit must not raise again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
