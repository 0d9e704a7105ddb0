"""Every error the iterators raise.

::

    NotResumableError(TypeError)        this loader cannot be resumed exactly; the reason is named
    ResumeMismatchError(ValueError)     a position of another dataset, order or seed
    CorruptPositionError(ValueError)    a position that is damaged, or of a newer version
    IterationStateError(RuntimeError)   the moment does not allow what was asked
    TrainingStopped(SystemExit)         not an error: a stop notice was honoured
"""

from __future__ import annotations


class NotResumableError(TypeError):
    """The loader cannot be resumed exactly; the message says why and what to write instead."""


class ResumeMismatchError(ValueError):
    """The saved position belongs to other data; ``field`` was ``expected``, the live one ``found``.

    ``expected`` is what the position says, ``found`` what the live loader has.
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
    """The saved position is damaged or was written by a newer version; nothing was loaded."""


class IterationStateError(RuntimeError):
    """The iterator is already in use, so what was asked would lose or repeat samples."""


class TrainingStopped(SystemExit):
    """A stop notice arrived and the last checkpoint is durable: leave, skipping what follows.

    A ``SystemExit`` with code 75 (``EX_TEMPFAIL``: try again), so that an uncaught one ends the
    process without running post-training code and a scheduler can requeue the job.
    """

    def __init__(self, reason: str = "stopped on request; the last checkpoint is durable") -> None:
        super().__init__(75)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason
