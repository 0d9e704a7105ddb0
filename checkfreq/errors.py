"""Every error checkfreq raises.

::

    CheckFreqError
    |-- ConfigError(ValueError)            the arguments contradict each other or the directory
    |-- StateError(RuntimeError)           the training state cannot be checkpointed as it is
    |-- SnapshotError                      phase one failed: the host copy is void
    |-- PersistError                       phase two failed: the copy never became a checkpoint
    |   `-- WorkerDiedError                ... because the persist process is gone
    |-- RankError                          a rank is lost, or the ranks do not agree
    |-- CorruptCheckpointError             bytes on disk do not say what the manifest says
    |-- MismatchError(KeyError)            a valid checkpoint of another structure
    `-- NoCheckpointError(FileNotFoundError)

A message says what failed, on which object, expected against found, and what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any


def printable(text: str, *, keep: str = "") -> str:
    """``text`` with escapes for what could command a terminal or forge a line of a log.

    For whatever a checkpoint said: whoever wrote it chose the characters. ``keep`` stay.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else _escape(c) for c in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


class CheckFreqError(Exception):
    """Base of every error raised by checkfreq; can be pickled, for ranks to tell each other."""

    def __str__(self) -> str:  # a worker's traceback has lines
        return printable(super().__str__(), keep="\n\t")

    def __reduce__(self) -> tuple[Callable[..., CheckFreqError], tuple[Any, ...]]:
        # An exception is unpickled by calling its class with ``args``, and ours take other ones.
        return _again, (type(self), self.args, self.__dict__)


def _again(
    kind: type[CheckFreqError], args: tuple[Any, ...], fields: Mapping[str, Any]
) -> CheckFreqError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


class ConfigError(CheckFreqError, ValueError):
    """The arguments contradict each other, or the checkpoint directory."""


class StateError(CheckFreqError, RuntimeError):
    """The tracked state, or the moment, does not allow what was asked."""


class SnapshotError(CheckFreqError):
    """Phase one failed: the host copy of the state is void."""


class PersistError(CheckFreqError):
    """Phase two failed: a snapshot did not become a checkpoint.

    ``step`` is the step it would have had, ``phase`` the commit phase that failed, and
    ``child_traceback`` the worker's own traceback ("" if it left none).
    """

    def __init__(self, message: str, *, step: int, phase: str, child_traceback: str = "") -> None:
        self.step = step
        self.phase = phase
        self.child_traceback = child_traceback
        detail = f"\n\nPersist worker's traceback:\n{child_traceback}" if child_traceback else ""
        super().__init__(message + detail)


class WorkerDiedError(PersistError):
    """The persist process ended, or stopped answering, with work in hand."""


class RankError(CheckFreqError):
    """``ranks`` did not come to the meeting ``phase``, left the run, or contradict the others.

    The same error is raised on every rank that is still there.
    """

    def __init__(self, message: str, *, ranks: Sequence[int], phase: str) -> None:
        self.ranks = tuple(ranks)
        self.phase = phase
        super().__init__(message)


class CorruptCheckpointError(CheckFreqError):
    """A file of a checkpoint fails ``check``: ``expected`` against ``got``."""

    def __init__(self, path: str, *, check: str, expected: object, got: object) -> None:
        self.path = path
        self.check = check
        self.expected = expected
        self.got = got
        super().__init__(printable(f"{path}: {check}: expected {expected}, got {got}"))


class MismatchError(CheckFreqError, KeyError):
    """A valid checkpoint whose structure is not the live objects' structure.

    Nothing was changed. Each of ``missing`` (live, not in the checkpoint), ``unexpected``
    (in the checkpoint, not live) and ``different`` is a list of sentences or names.
    """

    def __init__(
        self,
        path: str,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        different: Sequence[str] = (),
    ) -> None:
        self.path = path
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.different = tuple(different)
        parts = [f"{printable(path)} does not fit the live objects; nothing was changed."]
        for title, names in (
            ("missing in the checkpoint", self.missing),
            ("unexpected in the checkpoint", self.unexpected),
            ("different", self.different),
        ):
            if names:
                parts.append(f"  {title} ({len(names)}): " + "; ".join(map(printable, names)))
        parts.append("  Pass strict=False, only= or exclude= to load what fits.")
        self.text = "\n".join(parts)
        super().__init__(self.text)

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return self.text


class NoCheckpointError(CheckFreqError, FileNotFoundError):
    """The directory, or the step asked for, holds no checkpoint."""
