"""A compact list of files and labels, found in the way of DALI's own file reader.

Paths are bytes in one buffer, with 8 bytes of offset and 4 of label each; a list of Python strings
would take several times as much in every process. Names are relative to an absolute root, so that
neither a moved folder nor a changed working directory matters. Immutable; any thread.
"""

from __future__ import annotations

import fnmatch
import os
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import accumulate
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

StrPath: TypeAlias = str | os.PathLike[str]
Entry: TypeAlias = tuple[bytes, int]

#: The files that ``fn.readers.file`` reads from a class folder; upper case matches too.
_PATTERNS = (
    *("*.jpg", "*.jpeg", "*.png", "*.bmp", "*.tif", "*.tiff", "*.pnm", "*.ppm", "*.pgm", "*.pbm"),
    *("*.jp2", "*.webp", "*.flac", "*.ogg", "*.wav"),
)
_LARGEST_LABEL = (1 << 31) - 1
_NEEDLESS = re.compile(rb"/+(?:\./+)*")


class FileList:
    """``N`` files below ``root`` and their ``labels``, ``[N] int32``.

    ``name(i)`` is the path of a file relative to ``root``, so a moved root is the same data;
    ``path(i)`` is the path that DALI reads. ``root`` is absolute. An absolute name is that of a
    file outside ``root``.
    """

    def __init__(
        self,
        root: bytes,
        names: Sequence[bytes],
        labels: Sequence[int],
        *,
        if_empty: type[Exception] = ValueError,
    ) -> None:
        self._prefix = os.path.join(root, b"")
        if not names:
            raise if_empty(f"a reader needs at least one file, found none in {os.fsdecode(root)!r}")
        self._names = b"".join(names)
        # A Python array and not NumPy's: plain integers halve the time that a batch of paths takes.
        self._ends = array("q", accumulate(map(len, names), initial=0))
        self.labels: NDArray[np.int32] = np.array(labels, dtype=np.int32)

    @classmethod
    def of_folder(cls, root: StrPath) -> FileList:
        """One folder per class, both levels in byte order. The label is the index of the folder.

        As in DALI, an empty folder counts, and folders inside a class folder are ignored.
        """
        folder = _existing(root)
        found = list(entries_of_folder(folder, _PATTERNS))
        return cls(folder, *_columns(found), if_empty=FileNotFoundError)

    @classmethod
    def of_list(cls, path: StrPath, root: StrPath | None) -> FileList:
        """A text file of "path label" lines, paths relative to ``root`` or to the file's folder."""
        if not os.path.isfile(path):
            raise FileNotFoundError(f"file_list {os.fspath(path)!r} is not a file")
        folder = _existing(os.path.dirname(os.path.abspath(path)) if root is None else root)
        names, labels = _columns(list(_entries_of_list(path)))
        return cls(*rooted(names, folder), labels)

    @classmethod
    def of_files(
        cls, files: Sequence[StrPath], labels: Sequence[int] | None, root: StrPath | None
    ) -> FileList:
        """Given files, relative to ``root`` or the working directory; default labels 0, 1, ...

        Without ``root``, names become relative to the folder that contains all of them.
        """
        labels = range(len(files)) if labels is None else labels
        if len(labels) != len(files):
            raise ValueError(f"{len(files)} files were given and {len(labels)} labels")
        return cls(*rooted(files, None if root is None else _existing(root)), labels)

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        """The path of file ``index`` relative to the root."""
        return os.fsdecode(self._name(index))

    def path(self, index: int) -> NDArray[np.uint8]:
        """The full path of file ``index``, ``[L] uint8``."""
        name = self._name(index)
        full = name if name.startswith(b"/") else self._prefix + name
        return np.frombuffer(full, dtype=np.uint8)

    def data_fingerprint(self) -> str:
        """Identifies the data by its relative paths and labels."""
        digest = blake2b(self._names, digest_size=8)
        digest.update(np.frombuffer(self._ends, dtype=np.int64).astype("<i8").tobytes())
        digest.update(self.labels.astype("<i4").tobytes())
        return f"{type(self).__qualname__}:{len(self)}:{digest.hexdigest()}"

    def _name(self, index: int) -> bytes:
        return self._names[self._ends[index] : self._ends[index + 1]]


def _columns(entries: Sequence[Entry]) -> tuple[list[bytes], list[int]]:
    return [name for name, _ in entries], [label for _, label in entries]


def absolute(root: StrPath) -> bytes:
    """``root`` as an absolute path."""
    return os.path.abspath(os.fsencode(root))


def rooted(names: Sequence[StrPath | bytes], root: bytes | None) -> tuple[bytes, list[bytes]]:
    """``root`` (default: the folder that contains all ``names``), and the names relative to it."""
    tidied = [_tidied(os.fsencode(name)) for name in names]
    if root is None:
        here = os.path.join(os.getcwdb(), b"")
        tidied = [name if name.startswith(b"/") else here + name for name in tidied]
        root = _common_folder(tidied) if tidied else here
    prefix = os.path.join(root, b"")  # absolute, so no relative name begins with it
    return root, [name.removeprefix(prefix) for name in tidied]


def _tidied(name: bytes) -> bytes:
    """Without doubled slashes and "./". A ".." may lead through a link, and stays."""
    if b"//" not in name and b"./" not in name:
        return name
    return _NEEDLESS.sub(b"/", name).removeprefix(b"./")


def _common_folder(names: list[bytes]) -> bytes:
    """The folder that contains all of them: what the first and last in order share, all share."""
    shared = os.path.commonprefix([min(names), max(names)])  # noqa: RUF071 (dirname cuts it)
    return os.path.dirname(os.fsencode(shared))


def _existing(root: StrPath) -> bytes:
    if not os.path.isdir(root):
        raise FileNotFoundError(f"file_root {os.fspath(root)!r} is not a folder")
    return absolute(root)


def entries_of_folder(
    root: bytes, patterns: Iterable[str], *, loose: bool = False
) -> Iterator[Entry]:
    """Files matching a pattern in the folders in ``root``, labelled by folder, in byte order.

    With ``loose``, those in ``root`` itself come first, with label -1.
    """
    fits = re.compile(
        b"|".join(os.fsencode(fnmatch.translate(one.lower())) for one in patterns)
    ).match
    for label, folder in enumerate([*([b""] if loose else []), *_listed(root, folders=True)]):
        for name in _listed(os.path.join(root, folder), folders=False):
            if fits(name.lower()):
                yield os.path.join(folder, name), label - loose


def _listed(folder: bytes, *, folders: bool) -> list[bytes]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() == folders)


def lines_of_list(path: StrPath) -> Iterator[tuple[int, bytes]]:
    """The lines of a file list that are not empty, with their numbers from 1."""
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if stripped := line.strip():
                yield number, stripped


def _entries_of_list(path: StrPath) -> Iterator[Entry]:
    for number, line in lines_of_list(path):
        parts = line.rsplit(maxsplit=1)
        if len(parts) != 2 or not parts[1].isdigit() or int(parts[1]) > _LARGEST_LABEL:
            raise ValueError(
                f"{os.fspath(path)}, line {number}: expected a path and a label (a count), "
                f"found {os.fsdecode(line)!r}"
            )
        yield parts[0], int(parts[1])
