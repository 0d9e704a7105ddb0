"""The command line. No torch. A verb imports nothing that only others need."""

from __future__ import annotations

import sys
from collections.abc import Sequence

_BAD_COMMAND = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    arguments = sys.argv[1:] if argv is None else argv
    try:
        from checkfreq.cli import group

        return group.main(arguments)
    except ModuleNotFoundError as error:  # installed without what it requires
        package = (error.name or "").partition(".")[0]
        if package in ("", "checkfreq"):
            raise
        advice = f"{sys.executable} -m pip install {package}"
    print(
        f"checkfreq: expected the package {package} beside checkfreq, found none in {sys.prefix}: "
        f"{advice}",
        file=sys.stderr,
    )
    return _BAD_COMMAND
