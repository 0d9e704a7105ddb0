"""A list of files and labels, found as DALI's own file reader finds them, held compactly.

Paths are bytes in one buffer, beside 8 bytes of offset and 4 of label each: a list of Python
strings would cost several times that in every process. Immutable; any thread.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from iterators.fingerprint import listing_digest

StrPath: TypeAlias = str | os.PathLike[str]
Entry: TypeAlias = tuple[bytes, int]

#: What ``fn.readers.file`` takes from a class folder, in either case.
_SUFFIXES = (
    *(b".jpg", b".jpeg", b".png", b".bmp", b".tif", b".tiff", b".pnm", b".ppm", b".pgm", b".pbm"),
    *(b".jp2", b".webp", b".flac", b".ogg", b".wav"),
)
_LARGEST_LABEL = (1 << 31) - 1


class FileList:
    """``N`` files below ``root`` and their ``labels``, ``[N] int32``.

    ``name(i)`` is a file's path relative to ``root``, so a moved root is the same data;
    ``path(i)`` what DALI reads.
    """

    def __init__(self, root: StrPath, entries: Iterable[Entry]) -> None:
        self._prefix = os.path.join(os.fsencode(root), b"") if root else b""
        names, ends, labels = bytearray(), array("q", [0]), array("i")
        for name, label in entries:
            names += name.removeprefix(self._prefix)
            ends.append(len(names))
            labels.append(label)
        if not labels:
            raise ValueError(f"a reader needs at least one file, found none in {os.fspath(root)!r}")
        self._names = bytes(names)
        self._ends: NDArray[np.int64] = np.frombuffer(ends, dtype=np.int64)
        self.labels: NDArray[np.int32] = np.frombuffer(labels, dtype=np.int32)

    @classmethod
    def of_folder(cls, root: StrPath) -> FileList:
        """One folder per class, both levels in byte order; a label is its folder's index.

        As in DALI: an empty folder counts, and a folder inside a class folder does not.
        """
        _require_folder(root)
        return cls(root, _entries_of_folder(os.fsencode(root)))

    @classmethod
    def of_list(cls, path: StrPath, root: StrPath | None) -> FileList:
        """A text file of "path label" lines, paths relative to ``root`` or to the file's folder."""
        if not os.path.isfile(path):
            raise FileNotFoundError(f"file_list {os.fspath(path)!r} is not a file")
        root = os.path.dirname(os.path.abspath(path)) if root is None else root
        _require_folder(root)
        with open(path, "rb") as lines:
            return cls(root, _entries_of_lines(lines, os.fspath(path)))

    @classmethod
    def of_files(
        cls, files: Sequence[StrPath], labels: Sequence[int] | None, root: StrPath | None
    ) -> FileList:
        """Named files, relative to ``root`` or the working folder; by default labelled 0, 1, ..."""
        labels = range(len(files)) if labels is None else labels
        if len(labels) != len(files):
            raise ValueError(f"{len(files)} files were given and {len(labels)} labels")
        if root is not None:
            _require_folder(root)
        named = zip(files, labels, strict=True)
        return cls(root or "", ((os.fsencode(name), int(label)) for name, label in named))

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        """The path of file ``index`` relative to the root."""
        return os.fsdecode(self._name(index))

    def path(self, index: int) -> NDArray[np.uint8]:
        """The full path of file ``index``, ``[L] uint8``."""
        return np.frombuffer(os.path.join(self._prefix, self._name(index)), dtype=np.uint8)

    def data_fingerprint(self) -> str:
        """Name the content, relative paths and labels; 1 s for a million files."""
        entries = ((self.name(index), label) for index, label in enumerate(self.labels.tolist()))
        return f"{type(self).__qualname__}:{len(self)}:{listing_digest(entries)}"

    def _name(self, index: int) -> bytes:
        return self._names[self._ends[index] : self._ends[index + 1]]


def _require_folder(root: StrPath) -> None:
    if not os.path.isdir(root):
        raise FileNotFoundError(f"file_root {os.fspath(root)!r} is not a folder")


def _entries_of_folder(root: bytes) -> Iterator[Entry]:
    for label, folder in enumerate(_listed(root, folders=True)):
        for name in _listed(os.path.join(root, folder), folders=False):
            if name.lower().endswith(_SUFFIXES):
                yield os.path.join(folder, name), label


def _listed(folder: bytes, *, folders: bool) -> list[bytes]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() == folders)


def _entries_of_lines(lines: Iterable[bytes], source: str) -> Iterator[Entry]:
    for number, line in enumerate(lines, start=1):
        parts = line.rsplit(maxsplit=1)
        if not parts:
            continue
        if len(parts) != 2 or not parts[1].isdigit() or int(parts[1]) > _LARGEST_LABEL:
            raise ValueError(
                f"{source}, line {number}: expected a path and a label (a count), "
                f"found {os.fsdecode(line.strip())!r}"
            )
        yield parts[0].strip(), int(parts[1])
