"""Every error checkfreq raises.

::

    CheckFreqError
    |-- ConfigError(ValueError)            arguments contradict each other, or the directory
    |   `-- DirectoryBusyError(SystemExit) ... which another run is using
    |-- StateError(RuntimeError)           the state, or the moment, does not allow the call
    |-- SnapshotError                      copying the state to host memory failed
    |-- PersistError                       writing a snapshot to disk failed
    |   `-- WorkerDiedError                ... because the worker process died or hangs
    |-- RankError                          a rank is missing, or ranks contradict one another
    |-- StorageError(OSError)              the file system reported an error
    |   `-- ForeignEntryError              ... or holds a link or FIFO where a file should be
    |-- CorruptCheckpointError             a checkpoint is damaged
    |-- MismatchError(KeyError)            a valid checkpoint does not fit the live objects
    `-- NoCheckpointError(FileNotFoundError)

Each error is also the built-in one in brackets. A message says what failed and on which object,
what was expected and what was found, and what to do.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any


def printable(text: str, *, keep: str = "") -> str:
    """``text`` with escapes for characters that could control a terminal or forge a log line.

    For text from a checkpoint: whoever wrote it chose the characters. Those in ``keep`` stay.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else _escape(c) for c in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


class CheckFreqError(Exception):
    """Base of every error that checkfreq raises. All can be pickled, to be sent between ranks."""

    def __str__(self) -> str:  # a worker's traceback has lines
        return printable(super().__str__(), keep="\n\t")

    if sys.version_info < (3, 11):

        def add_note(self, note: str) -> None:
            """As in later Pythons, whose tracebacks show notes too."""
            self.__notes__ = [*getattr(self, "__notes__", ()), note]

    def __reduce__(self) -> tuple[Callable[..., CheckFreqError], tuple[Any, ...]]:
        # Unpickling calls the class with ``args``, but our classes take different arguments.
        return _again, (type(self), self.args, self.__dict__)


def _again(
    kind: type[CheckFreqError], args: tuple[Any, ...], fields: Mapping[str, Any]
) -> CheckFreqError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


class ConfigError(CheckFreqError, ValueError):
    """An argument is out of range, or contradicts others or the checkpoint directory.

    Also raised for a checkpoint in a newer format than this version reads. Nothing was changed.
    """


class DirectoryBusyError(ConfigError, SystemExit):
    """Another run kept the checkpoint directory for as long as this one waits for it.

    Where nobody catches it, the process ends with status 75, as if it had been told to stop, and
    without a traceback. The log says who holds the directory; schedulers try again.
    """

    code = 75


class StateError(CheckFreqError, RuntimeError):
    """The tracked state, or the moment, does not allow the call.

    For example: an object that cannot be saved without pickle, ``restore()`` after the first
    batch, a ``load_state_dict`` that raised, or ranks that hold different weights.
    """


class SnapshotError(CheckFreqError):
    """Copying the state into host memory failed, so there is no snapshot to write.

    Raised in the training loop. Checkpoints that are on disk already are not affected.
    """


class PersistError(CheckFreqError):
    """Writing a snapshot to disk failed, so it is not a checkpoint; earlier ones are intact.

    ``step`` is the step of the snapshot, ``phase`` what failed ("commit", say), and
    ``child_traceback`` the worker's traceback ("" if it sent none). By default such a failure is
    logged and training continues; it is raised by ``save(wait=True)``, ``finish()``, ``close()``,
    and where there are more failures in a row than ``tolerate_failures`` allows.
    """

    def __init__(self, message: str, *, step: int, phase: str, child_traceback: str = "") -> None:
        self.step = step
        self.phase = phase
        self.child_traceback = child_traceback
        detail = f"\n\nPersist worker's traceback:\n{child_traceback}" if child_traceback else ""
        super().__init__(message + detail)


class WorkerDiedError(PersistError):
    """The worker process died, or stopped answering, before the snapshot was on disk."""


class StorageError(CheckFreqError, OSError):
    """The file system reported an error, or memory for a file ran out.

    ``errno`` and ``filename`` are those of the OSError. Not a sign of corruption: try again once
    the storage works.
    """

    def __reduce__(self) -> tuple[Callable[..., CheckFreqError], tuple[Any, ...]]:
        # OSError does not keep the path in ``args``.
        return _again, (type(self), (*self.args, self.filename), self.__dict__)


class ForeignEntryError(StorageError):
    """Something inside a checkpoint directory is neither a regular file nor a directory.

    It is not followed, read or written: a link may lead anywhere, and a FIFO may block for ever. Or
    it is a directory where a file belongs.
    """

    @classmethod
    def at(cls, path: object, kind: str) -> ForeignEntryError:
        """For what is at ``path``: ``kind`` is "a symbolic link" or the like."""
        if kind == "a directory":
            text = "found a directory where a file belongs; move it away"
            return cls(errno.EISDIR, text, str(path))
        text = f"found {kind}, which is not followed, read or written inside a checkpoint directory"
        return cls(errno.ELOOP, f"{text}; remove it", str(path))


#: A disk or a server did not answer.
_OUTAGES = frozenset(
    {
        *(errno.EIO, errno.EREMOTEIO, errno.ESTALE, errno.ENOTCONN, errno.ETIMEDOUT),
        *(errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTUNREACH, errno.ENETUNREACH),
    }
)


def is_outage(error: BaseException) -> bool:
    """Whether a disk or a server did not answer, which may pass by itself."""
    return isinstance(error, OSError) and error.errno in _OUTAGES


#: What to do about errors whose own text does not explain them.
_HINTS = {
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
    errno.ENFILE: "the machine has no more open files to give (sysctl fs.file-max)",
    errno.EACCES: "change the owner or mode",
    errno.ELOOP: "a chain of symbolic links that never ends leads there",
    errno.ENOMEM: "there is not enough memory",
}


@contextlib.contextmanager
def storage_errors(what: str) -> Iterator[None]:
    """Turn any OSError of the block into a StorageError; ``what`` (was being done) begins it."""
    try:
        yield
    except CheckFreqError:
        raise
    except OSError as error:
        raise storage_error(what, error) from error


def storage_error(what: str, error: OSError) -> StorageError:
    """``error`` as a StorageError; ``what`` was being done."""
    code = error.errno or errno.EIO
    hint = f" ({_HINTS[code]})" if code in _HINTS else ""
    text = f"{what}: {error.strerror or error or os.strerror(code)}{hint}"
    return StorageError(code, text, error.filename)


class RankError(CheckFreqError):
    """Some ranks are missing from a meeting, left the run, or contradict the others.

    ``ranks`` are their numbers, and ``phase`` says what the ranks were doing together. The same
    error is raised on every rank that still runs; end them all and start the run again.
    """

    def __init__(self, message: str, *, ranks: Sequence[int], phase: str) -> None:
        self.ranks = tuple(ranks)
        self.phase = phase
        super().__init__(message)


class CorruptCheckpointError(CheckFreqError):
    """A checkpoint is damaged: a file is missing, or its content is not what was written.

    ``path`` is the file, ``check`` what was checked, with ``expected`` and ``got``. A restore
    without ``step=`` walks back to an older checkpoint, and raises this only if none validates.
    """

    def __init__(self, path: str, *, check: str, expected: object, got: object) -> None:
        self.path = path
        self.check = check
        self.expected = expected
        self.got = got
        found = str(got).removeprefix("found ")  # as errors of the storage begin
        super().__init__(printable(f"{path}: {check}: expected {expected}, got {found}"))


class MismatchError(CheckFreqError, KeyError):
    """A valid checkpoint does not fit the live objects. None of them was changed.

    ``missing`` lists what is live and not in the checkpoint, ``unexpected`` what is in the
    checkpoint and not live, and ``different`` what is in both, with another shape or type. Load
    what fits with ``strict=False``, or choose objects with ``only=`` or ``exclude=``.
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

    def __str__(self) -> str:  # KeyError would show the message with quotes and escapes
        return self.text


class NoCheckpointError(CheckFreqError, FileNotFoundError):
    """There is no checkpoint in the directory, or none of the step that was asked for."""
