"""A list of files and labels, found as DALI's own file reader finds them, held compactly.

Paths are bytes in one buffer, beside 8 bytes of offset and 4 of label each: a list of Python
strings would cost several times that in every process. Immutable; any thread. Names are kept
below an absolute root, so neither a moved folder nor a changed working folder matters.
"""

from __future__ import annotations

import fnmatch
import os
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from iterators.fingerprint import listing_digest

StrPath: TypeAlias = str | os.PathLike[str]
Entry: TypeAlias = tuple[bytes, int]

#: What ``fn.readers.file`` takes from a class folder, in either case.
_PATTERNS = (
    *("*.jpg", "*.jpeg", "*.png", "*.bmp", "*.tif", "*.tiff", "*.pnm", "*.ppm", "*.pgm", "*.pbm"),
    *("*.jp2", "*.webp", "*.flac", "*.ogg", "*.wav"),
)
_LARGEST_LABEL = (1 << 31) - 1
_NEEDLESS = re.compile(rb"/+(?:\./+)*")


class FileList:
    """``N`` files below ``root`` and their ``labels``, ``[N] int32``.

    ``name(i)`` is a file's path relative to ``root``, so a moved root is the same data;
    ``path(i)`` what DALI reads. ``root`` is absolute; a name that is absolute lies elsewhere.
    """

    def __init__(
        self, root: bytes, entries: Iterable[Entry], *, if_empty: type[Exception] = ValueError
    ) -> None:
        self._prefix = os.path.join(root, b"")
        names, ends, labels = bytearray(), array("q", [0]), array("i")
        for name, label in entries:
            names += name
            ends.append(len(names))
            labels.append(label)
        if not labels:
            raise if_empty(f"a reader needs at least one file, found none in {os.fsdecode(root)!r}")
        # An array of Python's: its plain numbers halve the time of a batch of paths.
        self._names, self._ends = bytes(names), ends
        self.labels: NDArray[np.int32] = np.frombuffer(labels, dtype=np.int32)

    @classmethod
    def of_folder(cls, root: StrPath) -> FileList:
        """One folder per class, both levels in byte order; a label is its folder's index.

        As in DALI: an empty folder counts, and a folder inside a class folder does not.
        """
        folder = _existing(root)
        return cls(folder, entries_of_folder(folder, _PATTERNS), if_empty=FileNotFoundError)

    @classmethod
    def of_list(cls, path: StrPath, root: StrPath | None) -> FileList:
        """A text file of "path label" lines, paths relative to ``root`` or to the file's folder."""
        if not os.path.isfile(path):
            raise FileNotFoundError(f"file_list {os.fspath(path)!r} is not a file")
        folder = _existing(os.path.dirname(os.path.abspath(path)) if root is None else root)
        named = _entries_of_list(path)
        return cls(folder, ((below(folder, name), label) for name, label in named))

    @classmethod
    def of_files(
        cls, files: Sequence[StrPath], labels: Sequence[int] | None, root: StrPath | None
    ) -> FileList:
        """Named files, relative to ``root`` or the working folder; by default labelled 0, 1, ...

        Without ``root``, names are kept below the folder that all of them are in.
        """
        labels = range(len(files)) if labels is None else labels
        if len(labels) != len(files):
            raise ValueError(f"{len(files)} files were given and {len(labels)} labels")
        folder, names = rooted(files, None if root is None else _existing(root))
        return cls(folder, zip(names, map(int, labels), strict=True))

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
        """Name the content, relative paths and labels; 1 s for a million files."""
        entries = ((self.name(index), label) for index, label in enumerate(self.labels.tolist()))
        return f"{type(self).__qualname__}:{len(self)}:{listing_digest(entries)}"

    def _name(self, index: int) -> bytes:
        return self._names[self._ends[index] : self._ends[index + 1]]


def absolute(root: StrPath) -> bytes:
    """``root`` from the file system's own root on."""
    return os.path.abspath(os.fsencode(root))


def rooted(names: Sequence[StrPath], root: bytes | None) -> tuple[bytes, list[bytes]]:
    """``root``, by default the folder that all ``names`` are in, and their names below it."""
    tidied = [_tidied(os.fsencode(name)) for name in names]
    if root is None:
        here = os.getcwdb()
        tidied = [os.path.join(here, name) for name in tidied]
        root = _common_folder(tidied) if tidied else here
    return root, [below(root, name) for name in tidied]


def below(root: bytes, name: bytes) -> bytes:
    """``name`` relative to ``root``, if it is absolute and in there; otherwise as it is."""
    tidied = _tidied(name)
    if not tidied.startswith(b"/"):
        return tidied
    return tidied.removeprefix(os.path.join(root, b""))


def _tidied(name: bytes) -> bytes:
    """Without what leads nowhere; ".." may lead through a link, and stays."""
    if b"//" not in name and b"./" not in name:
        return name
    return _NEEDLESS.sub(b"/", name).removeprefix(b"./")


def _common_folder(names: list[bytes]) -> bytes:
    """The folder above all of them: what the outermost two share, all share."""
    shared = os.path.commonprefix([min(names), max(names)])  # noqa: RUF071 (dirname cuts it)
    return os.path.dirname(os.fsencode(shared))


def _existing(root: StrPath) -> bytes:
    if not os.path.isdir(root):
        raise FileNotFoundError(f"file_root {os.fspath(root)!r} is not a folder")
    return absolute(root)


def entries_of_folder(
    root: bytes, patterns: Iterable[str], *, loose: bool = False
) -> Iterator[Entry]:
    """Files that fit a pattern in the folders in ``root``, labelled by folder, all in byte order.

    With ``loose``, first those in ``root`` itself, labelled -1.
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
    """The lines of a file list that hold something, and their numbers from 1."""
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
