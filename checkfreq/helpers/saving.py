"""``atomic_save``: what ``torch.save`` writes, under its name as a whole or not at all.

The order, as for checkpoints: a temporary file beside the target, its contents synced, renamed over
the target, the folder synced. A crash at any instant leaves the old file or the new one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from checkfreq.errors import ConfigError, StorageError, storage_errors
from checkfreq.helpers.stream import PayloadStream
from checkfreq.store.fileops import FileOps, LocalFileOps, user_path

_SUFFIX = ".saving"
#: As many as the kernel follows.
_MOST_LINKS = 40
#: Characters of the target's name that begin a temporary one: a name has at most 255 bytes.
_NAME_CHARACTERS = 30
#: Temporary names that a thread of this process is writing to.
_in_use: set[str] = set()


def atomic_save(
    obj: object,
    path: str | os.PathLike[str],
    *,
    pickle_module: Any = None,
    pickle_protocol: int | None = None,
    _use_new_zipfile_serialization: bool = True,
    _disable_byteorder_record: bool = False,
    ops: FileOps | None = None,
) -> None:
    """``torch.save(obj, path)`` after which ``path`` is durable, and during which it is never torn.

    The keyword arguments are torch.save's, with its defaults. If ``path`` is a symbolic link, the
    file that it points to is replaced. A file of your own that is replaced hands on its permissions
    and its group, and one of another user nothing: the new file is yours, with the mode of the
    umask. There must be room for both files at once. Read the file with ``torch.load``.

    If it fails, or is interrupted, the old file stays and the temporary one is removed. A SIGKILL
    leaves ``.NAME.HOST.PID.ID.saving``, which the next save to ``path`` on that machine removes.
    Several processes may save to one path: the last to finish wins.

    Raises ConfigError for anything but a path, StorageError (an OSError) if the file system fails,
    and whatever ``torch.save`` raises for ``obj``.
    """
    given = {"pickle_module": pickle_module, "pickle_protocol": pickle_protocol}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    options["_use_new_zipfile_serialization"] = _use_new_zipfile_serialization
    options["_disable_byteorder_record"] = _disable_byteorder_record

    def save(stream: PayloadStream) -> None:
        import torch

        torch.save(obj, stream, **options)  # type: ignore[arg-type]

    write_atomically(path, save, what=f"atomic_save to {path!r:.200}", ops=ops)


def write_atomically(
    path: str | os.PathLike[str],
    write: Callable[[PayloadStream], object],
    *,
    what: str,
    ops: FileOps | None = None,
) -> None:
    """Have ``write`` write a file that appears under its name as a whole; see `atomic_save`."""
    with storage_errors(what):
        target = _behind_links(_as_path(path), ops)
        own = LocalFileOps(target.parent) if ops is None else ops
        with _temporary(own, target) as temporary:
            _write(own, temporary, write)
            own.replace(temporary, target)
        own.sync_dir(target.parent)


def _as_path(path: object) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(
            f"atomic_save(path=...): expected a str or PathLike, got a {type(path).__qualname__}. "
            "Only a name can be moved from the old file to the new one at an instant, so an open "
            "file cannot be written atomically: pass its path, or use torch.save"
        )
    return user_path(path)


def _behind_links(path: Path, ops: FileOps | None) -> Path:
    """The file that a write to ``path`` would reach."""
    for _ in range(_MOST_LINKS):
        at = LocalFileOps(path.parent) if ops is None else ops
        link = at.read_link(path)
        if link is None:
            return path
        path = path.parent / link
    raise StorageError(errno.ELOOP, "a chain of symbolic links that does not end", str(path))


@contextlib.contextmanager
def _temporary(ops: FileOps, target: Path) -> Iterator[Path]:
    """A name beside the target for a file; removed if the block raises."""
    prefix = f".{target.name[:_NAME_CHARACTERS]}.{os.uname().nodename}."
    # Unique, also where two containers share a host's name and have equal process ids.
    name = f"{prefix}{os.getpid()}.{uuid.uuid4().hex}{_SUFFIX}"
    path = target.with_name(name)
    _in_use.add(name)
    try:
        _remove_left(ops, target.parent, prefix)
        yield path
    except BaseException:
        with contextlib.suppress(OSError):
            ops.unlink(path)
        raise
    finally:
        _in_use.discard(name)


def _remove_left(ops: FileOps, folder: Path, prefix: str) -> None:
    """Remove what killed processes of this machine left under temporary names."""
    for name in ops.listdir(folder):
        is_temporary = name.startswith(prefix) and name.endswith(_SUFFIX)
        if is_temporary and not _is_written(name, prefix):
            with contextlib.suppress(OSError):  # another saver may be faster, or may own it
                ops.unlink(folder / name)


def _is_written(name: str, prefix: str) -> bool:
    """Whether the process that made a temporary file lives, and so may be writing to it."""
    number = name.removeprefix(prefix).partition(".")[0]
    if number == str(os.getpid()):
        return name in _in_use
    if not number.isdecimal():
        return False
    try:
        os.kill(int(number), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # of another user
        return True
    return True


def _write(ops: FileOps, path: Path, write: Callable[[PayloadStream], object]) -> None:
    payload = ops.create_payload(path, num_bytes=0)
    try:
        stream = PayloadStream(payload)
        try:
            write(stream)
        except BaseException:
            if stream.failure is not None:  # torch may have put an error of its own in its place
                raise stream.failure from None
            raise
        if stream.failure is not None:
            raise stream.failure
        stream.finish()
    finally:
        payload.close()
