"""``checkfreq run``: start a training again that crashed or was killed. Docs: docs/restart.md."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Sequence

from checkfreq.supervisor.supervise import Supervisor

_STDERR = 2
PURPOSE = "run a training, and start it again after a crash or a kill"


def main(argv: Sequence[str]) -> int:
    """``checkfreq run`` alone: it imports nothing of the other commands, to start fast."""
    parser = argparse.ArgumentParser(
        prog="checkfreq run",
        usage="%(prog)s [options] -- COMMAND [ARGUMENT ...]",
        description=PURPOSE.capitalize() + ".",
        epilog="exit status: that of the command's last run; 128 + N if signal N ended it; 2 wrong "
        "usage; 126 or 127 if the command cannot be run",
    )
    parser.add_argument(
        "--max-restarts",
        type=_count,
        metavar="N",
        help="how often to start it again (default: as long as its runs make progress)",
    )
    parser.add_argument(
        "--standby",
        action="store_true",
        help="keep a process waiting, with torch imported, that becomes the script at the next "
        "start; the command must be python SCRIPT or python -m MODULE",
    )
    parser.add_argument(
        "--standby-import",
        action="append",
        metavar="MODULE",
        help="have the standby import this too; may be given several times",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        parser.error("expected a command after --, for instance: checkfreq run -- python train.py")
    imports = args.standby_import or ([] if args.standby else None)
    supervisor = Supervisor(
        command, environ=os.environ, say=_say, max_restarts=args.max_restarts, standby=imports
    )
    return supervisor.run()


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"expected a number of restarts such as 5, got {text!r}")
    return int(text)


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # where nobody reads it any more, training goes on
        os.write(_STDERR, f"checkfreq run: {line}\n".encode())
