"""The few lines that a user sees who has not set up logging.

All messages go through ``logging``, which checkfreq never configures. Without a handler, Python
itself shows warnings and errors. In that case, and only then, this module also prints the rare
routine lines (the first checkpoint, the interval) to standard error. If there is a handler, or a
level that excludes these lines, logging alone decides. The line about a restore is printed even
then: scripts that set the root logger to WARNING, as many do, mean their own lines. It is left to
logging where that shows it, and where our own loggers were set up.
"""

from __future__ import annotations

import contextlib
import logging
import sys

_ROOT_DEFAULT = logging.WARNING


def say(
    logger: logging.Logger,
    message: str,
    *args: object,
    is_shown: bool = True,
    is_vital: bool = False,
) -> None:
    """Log at INFO, and print to standard error if no logging handler would show it.

    ``is_shown``: False on ranks other than the one that prints for all of them. ``is_vital``: print
    it even if handlers or a level of the root logger exclude it, but not if our own loggers were
    set up.
    """
    logger.info(message, *args)
    if is_vital and not _is_set_up(logger):
        is_shown = is_shown and not (_is_shown_by_root(logger) or _is_switched_off(logger))
    elif logger.hasHandlers() or _is_silenced(logger):
        is_shown = False
    if is_shown:
        with contextlib.suppress(
            OSError, ValueError, AttributeError
        ):  # standard error is closed, or there is none
            sys.stderr.write(f"checkfreq: {message % args}\n")
            sys.stderr.flush()


def _is_set_up(logger: logging.Logger) -> bool:
    """Whether the user gave a level, a handler or a filter to a logger of ours."""
    each: logging.Logger | None = logger
    while each is not None and each is not logger.manager.root:
        if each.level or each.handlers or each.filters or not each.propagate:
            return True
        each = each.parent
    return False


def _is_shown_by_root(logger: logging.Logger) -> bool:
    handlers = logger.manager.root.handlers
    return logger.isEnabledFor(logging.INFO) and any(h.level <= logging.INFO for h in handlers)


def _is_switched_off(logger: logging.Logger) -> bool:
    disabled = logger.disabled or logger.manager.disable >= logging.INFO
    return disabled or logging.lastResort is None


def _is_silenced(logger: logging.Logger) -> bool:
    """Whether the user asked for less: set a level, or removed Python's last-resort handler."""
    if _is_switched_off(logger):
        return True
    each: logging.Logger | None = logger
    while each is not None and each.level == logging.NOTSET:
        each = each.parent
    if each is None:
        return False
    limit = _ROOT_DEFAULT if each is logger.manager.root else logging.INFO
    return each.level > limit
