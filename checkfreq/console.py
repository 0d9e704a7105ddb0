"""The few lines that a user sees who has not set up logging.

All messages go through ``logging``, which checkfreq never configures. Without a handler, Python
itself shows warnings and errors. In that case, and only then, this module also prints the rare
routine lines (a restore, the first checkpoint, the interval) to standard error. If there is a
handler, or a level that excludes these lines, logging alone decides.
"""

from __future__ import annotations

import contextlib
import logging
import sys

_ROOT_DEFAULT = logging.WARNING


def say(logger: logging.Logger, message: str, *args: object, is_shown: bool = True) -> None:
    """Log at INFO, and print to standard error if no logging handler would show it.

    ``is_shown``: False on ranks other than the one that prints for all of them.
    """
    logger.info(message, *args)
    if is_shown and not logger.hasHandlers() and not _is_silenced(logger):
        with contextlib.suppress(
            OSError, ValueError, AttributeError
        ):  # standard error is closed, or there is none
            sys.stderr.write(f"checkfreq: {message % args}\n")
            sys.stderr.flush()


def _is_silenced(logger: logging.Logger) -> bool:
    """Whether the user asked for less: set a level, or removed Python's last-resort handler."""
    if logger.manager.disable >= logging.INFO or logging.lastResort is None or logger.disabled:
        return True
    each: logging.Logger | None = logger
    while each is not None and each.level == logging.NOTSET:
        each = each.parent
    if each is None:
        return False
    limit = _ROOT_DEFAULT if each is logger.manager.root else logging.INFO
    return each.level > limit
