"""Where in a checkpoint's directory the files of a rank lie. Pure.

A shared file system is slow to list a directory of thousands of files, and to add to it. So where
the records of many ranks make a tree (see `tree`), what the ranks 64 to 127 write lies in the
folder ``ranks-00064`` of the checkpoint, and so on. The files of the first 64 ranks, and those that
belong to no rank, lie beside the manifest, as all do where ranks are few.
"""

from __future__ import annotations

import re

#: So many ranks with a handful of files each; 4,096 ranks make as many folders.
RANKS_A_FOLDER = 64
#: The files of a rank: its payloads, its record, and what it says instead of one.
_OF_A_RANK = re.compile(r"(?:.*\.rank-|part-|failed-)([0-9]{5,9})\.[a-z]+")
_FOLDER = re.compile(r"ranks-[0-9]{5,9}")


def folder_of(rank: int) -> str:
    """The folder of a rank's files; empty for the checkpoint's own directory."""
    first = rank - rank % RANKS_A_FOLDER
    return f"ranks-{first:05d}" if first else ""


def place_of(name: str) -> str:
    """A file's path in the directory of a checkpoint with folders."""
    match = _OF_A_RANK.fullmatch(name)
    folder = folder_of(int(match[1])) if match else ""
    return f"{folder}/{name}" if folder else name


def is_folder(name: str) -> bool:
    """Whether an entry of a checkpoint's directory with this name is such a folder."""
    return _FOLDER.fullmatch(name) is not None
