"""What a user sees who never set logging up: the few lines that say what checkfreq does.

Everything is said through ``logging``, and nothing is configured. Python itself shows warnings and
errors where there is no handler. The rare routine lines (a restore, the first checkpoint, the
interval) are shown on standard error here in that case, and only then: with a handler anywhere
above the logger, or a level that leaves them out, logging alone decides.
"""

from __future__ import annotations

import contextlib
import logging
import sys

_ROOT_DEFAULT = logging.WARNING


def say(logger: logging.Logger, message: str, *args: object, is_shown: bool = True) -> None:
    """Log at INFO; with no handler to take it, print it to standard error.

    ``is_shown``: False on ranks whose line another one prints too.
    """
    logger.info(message, *args)
    if is_shown and not logger.hasHandlers() and not _is_silenced(logger):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none at all
            sys.stderr.write(f"checkfreq: {message % args}\n")
            sys.stderr.flush()


def _is_silenced(logger: logging.Logger) -> bool:
    """Whether the user wants less: a level was set, or what shows warnings was taken away."""
    if logger.manager.disable >= logging.INFO or logging.lastResort is None or logger.disabled:
        return True
    each: logging.Logger | None = logger
    while each is not None and each.level == logging.NOTSET:
        each = each.parent
    if each is None:
        return False
    limit = _ROOT_DEFAULT if each is logger.manager.root else logging.INFO
    return each.level > limit
