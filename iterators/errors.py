"""Every error the iterators raise.

::

    NotResumableError(TypeError)        the loader cannot be resumed exactly; the message says why
    ResumeMismatchError(ValueError)     the position belongs to a different dataset, order or seed
    CorruptPositionError(ValueError)    the position is damaged, or written by a newer version
    IterationStateError(RuntimeError)   the call is not possible at this point of the iteration
    TrainingStopped(SystemExit)         not an error: a stop notice was honoured
"""

from __future__ import annotations

import sys


class NotResumableError(TypeError):
    """The loader cannot be resumed exactly. The message says why, and what to write instead."""


class ResumeMismatchError(ValueError):
    """The saved position does not fit this loader: they differ in ``field``.

    ``expected`` is the value in the position, ``found`` that of the live loader.
    """

    def __init__(self, field: str, *, expected: object, found: object, advice: str) -> None:
        self.field = field
        self.expected = expected
        self.found = found
        super().__init__(
            f"the saved position does not fit this loader: {field} is {found!r}, but the position "
            f"was saved with {expected!r}. {advice}"
        )


class CorruptPositionError(ValueError):
    """The saved position is damaged or was written by a newer version. Nothing was loaded."""


class IterationStateError(RuntimeError):
    """The iterator is in use, and the call would lose or repeat samples."""


class TrainingStopped(SystemExit):
    """A stop notice arrived, and the last checkpoint is durable: the process should exit now.

    This is a ``SystemExit`` with code 75 (``EX_TEMPFAIL``: try again). If it is not caught, the
    process ends without running the code after training, and a scheduler can requeue the job.
    """

    def __init__(self, reason: str = "stopped on request; the last checkpoint is durable") -> None:
        super().__init__(75)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


def add_note(error: RuntimeError, note: str) -> None:
    """Have ``note`` shown below an error. Python 3.10 has no notes: there it ends its text."""
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        error.args = (f"{error}\n{note}",)
