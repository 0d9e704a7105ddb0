"""The command line. No torch. ``run`` imports nothing that only the other commands need."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == ["run"]:
        from checkfreq.cli import run

        return run.main(arguments[1:])
    from checkfreq.cli import parser

    return parser.main(arguments)
