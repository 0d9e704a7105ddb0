"""A file system in memory that loses what was not synced when its power is cut.

For tests, also those of users. The model is harsher than real file systems: unsynced operations
on different names survive independently of each other, in any combination.
"""

from __future__ import annotations

import copy
import errno
import itertools
import math
import os
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from checkfreq.errors import ForeignEntryError, StorageError
from checkfreq.store.fileops import SMALL_FILE_BYTES, Kind, PayloadFile, ReadFile
from checkfreq.types import PAGE_BYTES

#: Up to this many unsynced entry operations every subset is enumerated: 2**8, times what can
#: become of each unsynced file.
_MOST_ENUMERATED = 8


class PowerCut(BaseException):
    """The machine is off. Not an Exception, so that code under test cannot handle it."""


@dataclass(eq=False, slots=True)
class _File:
    data: bytes = b""
    durable: bytes = b""

    def fates(self) -> list[bytes]:
        """What a power cut can leave: the synced bytes, all bytes, a prefix, or zeros."""
        middle = (len(self.durable) + len(self.data)) // 2
        zeros = self.durable + bytes(max(len(self.data) - len(self.durable), 0))
        return list(dict.fromkeys([self.durable, self.data, self.data[:middle], zeros]))


@dataclass(eq=False, slots=True)
class _Dir:
    entries: dict[str, _Node] = field(default_factory=dict)
    durable: dict[str, _Node] = field(default_factory=dict)
    is_fixed: bool = False


@dataclass(eq=False, slots=True)
class _Link:
    """A symbolic link. It can be moved, removed and read, and is never followed."""

    target: str = ""


_Node: TypeAlias = _File | _Dir | _Link
_KINDS = {_File: Kind.FILE, _Dir: Kind.DIRECTORY, _Link: Kind.LINK}
_Change: TypeAlias = tuple[_Dir, str, _Node | None]
_Tree: TypeAlias = dict[_Dir, dict[str, _Node]]


@dataclass(eq=False, slots=True)
class _EntryOp:
    """One creation, rename or removal; after a power cut all its changes are there, or none."""

    changes: tuple[_Change, ...]
    unsynced: set[_Dir]

    def touches(self) -> set[tuple[_Dir, str]]:
        return {(directory, name) for directory, name, _ in self.changes}


@dataclass(slots=True)
class _Fault:
    """After ``countdown`` more operations, the next one raises ``error`` instead."""

    countdown: int
    error: BaseException


class CrashingFileOps:
    """`FileOps` in memory; a power cut may undo everything that was not synced.

    A file keeps at least the bytes of its last sync; of later bytes it keeps none, a prefix,
    zeros, or all. Creating, renaming or removing an entry is durable after `sync_dir` of its
    directory (of both directories, for a move); before that any subset of such operations may
    survive.
    """

    def __init__(self, *, capacity_bytes: int = 1 << 40) -> None:
        self.capacity_bytes = capacity_bytes
        #: Operations that changed or synced something, in order, such as "rename /a /b".
        self.calls: list[str] = []
        self._root = _Dir()
        self._pending: list[_EntryOp] = []
        self._fault: _Fault | None = None
        self._off = False
        self._lock = threading.RLock()

    # Faults.

    def cut_power_after(self, num_calls: int) -> None:
        """Let ``num_calls`` operations succeed; all later ones raise PowerCut."""
        self._fault = _Fault(num_calls, PowerCut())

    def fail_after(self, num_calls: int, error: OSError) -> None:
        """Let ``num_calls`` operations succeed; the next one raises ``error``, once."""
        self._fault = _Fault(num_calls, error)

    def fork(self) -> CrashingFileOps:
        """A copy of the disk in the same state, unsynced changes included; no faults set."""
        twin = type(self)(capacity_bytes=self.capacity_bytes)
        twin._root, twin._pending = copy.deepcopy((self._root, self._pending))
        return twin

    def survivors(self, *, limit: int = 1024, seed: int = 0) -> Iterator[CrashingFileOps]:
        """Every distinct disk that a power cut now could leave.

        If there are more than ``limit`` outcomes, a sample of that many, drawn with ``seed``, which
        always includes the best and the worst outcome.
        """
        seen = set()
        for kept, contents in self._outcomes(limit, random.Random(seed)):
            disk = self._disk(kept, contents)
            key = None if disk is None else disk.image()
            if disk is not None and key not in seen:
                seen.add(key)
                yield disk

    def plant_link(self, path: Path) -> None:
        """Put a symbolic link at ``path``, durably, as an attacker or a user may."""
        directory = self._dir(path.parent)
        directory.entries[path.name] = directory.durable[path.name] = _Link()

    def fix(self, path: Path) -> None:
        """Make renames of this directory fail (EXDEV), as in a lower layer of overlayfs."""
        self._dir(path).is_fixed = True

    def image(self) -> object:
        """All names and bytes, as a hashable value."""
        return _image(self._root)

    # FileOps.

    def mkdir(self, path: Path, *, parents: bool = False) -> None:
        if parents and isinstance(self._find(path), _Dir):
            return
        if parents and self._find(path.parent) is None:
            self.mkdir(path.parent, parents=True)
        self._enter("mkdir", path)
        self._create(path, _Dir())

    def listdir(self, path: Path) -> list[str]:
        return sorted(self._dir(path).entries)

    def scan(self, path: Path, *, beginning: tuple[str, ...] = ("",)) -> Mapping[str, Kind]:
        entries = self._dir(path).entries
        wanted = sorted(name for name in entries if name.startswith(beginning))
        return {name: _KINDS[type(entries[name])] for name in wanted}

    def sizes(self, path: Path) -> Mapping[str, int]:
        entries = self._dir(path).entries
        return {name: len(node.data) for name, node in entries.items() if isinstance(node, _File)}

    def kind(self, path: Path) -> Kind | None:
        node = self._find(path)
        return None if node is None else _KINDS[type(node)]

    def exists(self, path: Path) -> bool:
        return self.kind(path) is not None

    def is_dir(self, path: Path) -> bool:
        return self.kind(path) is Kind.DIRECTORY

    def file_size(self, path: Path) -> int:
        return len(self._file(path).data)

    def read_bytes(self, path: Path, *, max_bytes: int = SMALL_FILE_BYTES) -> bytes:
        data = self._file(path).data
        if len(data) > max_bytes:
            text = f"expected at most {max_bytes} bytes, found {len(data)}"
            raise StorageError(errno.EFBIG, text, str(path))
        return data

    def write_file(self, path: Path, data: bytes) -> None:
        self._enter("write_file", path)
        if self._find(path) is None:
            self._create(path, _File())
        self._set_data(self._file(path), data)

    def sync_file(self, path: Path) -> None:
        self._enter("sync_file", path)
        file = self._file(path)
        file.durable = file.data

    def sync_dir(self, path: Path) -> None:
        self._enter("sync_dir", path)
        directory = self._dir(path)
        waiting: list[_EntryOp] = []
        blocked: set[tuple[_Dir, str]] = set()
        for op in self._pending:
            op.unsynced.discard(directory)
            if op.unsynced or op.touches() & blocked:
                waiting.append(op)  # later operations on the same names wait for this one
                blocked |= op.touches()
            else:
                _apply(op, {changed: changed.durable for changed, _, _ in op.changes})
        self._pending = waiting

    def rename(self, src: Path, dst: Path) -> None:
        self._enter("rename", src, dst)
        if self._find(dst) is not None:
            raise _error(FileExistsError, errno.EEXIST, dst)
        node = self._find(src)
        if isinstance(node, _Dir) and node.is_fixed:
            raise _error(OSError, errno.EXDEV, src)
        self._move(src, dst)

    def replace(self, src: Path, dst: Path) -> None:
        self._enter("replace", src, dst)
        self._file(src)
        if isinstance(self._find(dst), _Dir):
            raise _error(IsADirectoryError, errno.EISDIR, dst)
        self._move(src, dst)

    def link(self, src: Path, dst: Path) -> None:
        self._enter("link", src, dst)
        self._create(dst, self._file(src))

    def point_link(self, path: Path, target: str) -> None:
        temporary = path.with_name(f".{path.name}.new")
        if self.exists(temporary):
            self.unlink(temporary)
        self._enter("symlink", temporary)
        if isinstance(self._find(path), _Dir):
            raise _error(IsADirectoryError, errno.EISDIR, path)
        self._create(temporary, _Link(target))
        self._enter("replace", path)
        self._move(temporary, path)

    def read_link(self, path: Path) -> str | None:
        node = self._find(path)
        return node.target if isinstance(node, _Link) else None

    def unlink(self, path: Path) -> None:
        self._enter("unlink", path)
        if not isinstance(self._find(path), _Link):
            self._file(path)
        self._change((self._dir(path.parent), path.name, None))

    def remove_tree(self, path: Path) -> None:
        if self.kind(path) is Kind.LINK:
            raise _error(NotADirectoryError, errno.ENOTDIR, path)
        for name in self.listdir(path):
            child = path / name
            if self.is_dir(child):
                self.remove_tree(child)
            else:
                self.unlink(child)
        self._enter("rmdir", path)
        self._change((self._dir(path.parent), path.name, None))

    def replace_file(self, path: Path, data: bytes, *, sync: bool = True) -> None:
        temporary = path.with_name(f".{path.name}.new")
        if self.kind(temporary) is Kind.LINK:
            self.unlink(temporary)
        self.write_file(temporary, data)
        if sync:
            self.sync_file(temporary)
        self._enter("replace", path)
        self._move(temporary, path)

    def append_line(self, path: Path, line: str) -> None:
        self._enter("append_line", path)
        if self._find(path) is None:
            self._create(path, _File())
        file = self._file(path)
        torn = file.data and not file.data.endswith(b"\n")
        self._set_data(file, file.data + f"{chr(10) if torn else ''}{line}\n".encode())

    def free_bytes(self, path: Path) -> int:
        self._dir(path)
        return self.capacity_bytes - _used_bytes(self._root)

    def create_payload(self, path: Path, *, num_bytes: int) -> PayloadFile:
        self._enter("create_payload", path)
        if self._find(path) is not None:
            raise _error(FileExistsError, errno.EEXIST, path)
        file = _File()
        self._create(path, file)
        self._set_data(file, bytes(-(-num_bytes // PAGE_BYTES) * PAGE_BYTES))
        return _MemoryPayload(self, path, file)

    def open_for_read(self, path: Path) -> ReadFile:
        return _MemoryRead(self._file(path).data)

    # Names.

    def _find(self, path: Path) -> _Node | None:
        if self._off:
            raise PowerCut
        node: _Node | None = self._root
        for name in path.parts[1:]:
            if isinstance(node, _Link):
                raise ForeignEntryError.at(path, Kind.LINK.value)
            node = node.entries.get(name) if isinstance(node, _Dir) else None
        return node

    def _dir(self, path: Path) -> _Dir:
        node = self._find(path)
        if node is None:
            raise _error(FileNotFoundError, errno.ENOENT, path)
        if isinstance(node, _Link):
            raise ForeignEntryError.at(path, Kind.LINK.value)
        if isinstance(node, _File):
            raise _error(NotADirectoryError, errno.ENOTDIR, path)
        return node

    def _file(self, path: Path) -> _File:
        node = self._find(path)
        if node is None:
            raise _error(FileNotFoundError, errno.ENOENT, path)
        if isinstance(node, _Dir):
            raise ForeignEntryError.at(path, Kind.DIRECTORY.value)
        if isinstance(node, _Link):
            raise ForeignEntryError.at(path, Kind.LINK.value)
        return node

    def _create(self, path: Path, node: _Node) -> None:
        if self._find(path) is not None:
            raise _error(FileExistsError, errno.EEXIST, path)
        self._change((self._dir(path.parent), path.name, node))

    def _move(self, src: Path, dst: Path) -> None:
        node = self._find(src)
        if node is None:
            raise _error(FileNotFoundError, errno.ENOENT, src)
        gone: _Change = (self._dir(src.parent), src.name, None)
        self._change(gone, (self._dir(dst.parent), dst.name, node))

    def _change(self, *changes: _Change) -> None:
        op = _EntryOp(changes, {directory for directory, _, _ in changes})
        self._pending.append(op)
        _apply(op, {directory: directory.entries for directory, _, _ in changes})

    # Bytes and faults.

    def _set_data(self, file: _File, data: bytes) -> None:
        if _used_bytes(self._root) - len(file.data) + len(data) > self.capacity_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        file.data = data

    def _enter(self, name: str, *paths: Path) -> None:
        with self._lock:
            if self._off:
                raise PowerCut
            fault = self._fault
            if fault is not None and fault.countdown == 0:
                self._fault = None
                self._off = isinstance(fault.error, PowerCut)
                raise fault.error
            if fault is not None:
                fault.countdown -= 1
            self.calls.append(" ".join([name, *map(str, paths)]))

    # Power cuts.

    def _outcomes(
        self, limit: int, chance: random.Random
    ) -> Iterator[tuple[Sequence[_EntryOp], Mapping[_File, bytes]]]:
        self._forget_unreachable()
        if len(self._pending) <= _MOST_ENUMERATED:
            subsets = [self._kept(mask) for mask in range(1 << len(self._pending))]
            files = [self._unsynced_files(kept) for kept in subsets]
            num_outcomes = sum(math.prod(len(file.fates()) for file in some) for some in files)
            if num_outcomes <= limit:
                for kept, some in zip(subsets, files, strict=True):
                    for fates in itertools.product(*(file.fates() for file in some)):
                        yield kept, dict(zip(some, fates, strict=True))
                return
        yield [], {file: file.durable for file in self._unsynced_files([])}
        yield self._pending, {}
        for _ in range(limit - 2):
            kept = self._kept(chance.getrandbits(len(self._pending)))
            some = self._unsynced_files(kept)
            yield kept, {file: chance.choice(file.fates()) for file in some}

    def _kept(self, mask: int) -> list[_EntryOp]:
        return [op for bit, op in enumerate(self._pending) if mask >> bit & 1]

    def _tree(self, kept: Sequence[_EntryOp]) -> _Tree:
        """The entries of each directory if just these unsynced operations survived."""
        tree: _Tree = {}
        for op in kept:
            for directory, _, _ in op.changes:
                tree.setdefault(directory, dict(directory.durable))
            _apply(op, tree)
        return tree

    def _unsynced_files(self, kept: Sequence[_EntryOp]) -> list[_File]:
        found = dict.fromkeys(_walk(self._root, self._tree(kept)))
        return [node for node in found if isinstance(node, _File) and node.data != node.durable]

    def _disk(
        self, kept: Sequence[_EntryOp], contents: Mapping[_File, bytes]
    ) -> CrashingFileOps | None:
        tree = self._tree(kept)
        directories = [node for node in _walk(self._root, tree) if isinstance(node, _Dir)]
        if len(set(directories)) < len(directories):
            # A directory would have two names: a later move survived, an earlier one did not.
            # No file system allows that.
            return None
        disk = type(self)(capacity_bytes=self.capacity_bytes)
        disk._root = _rebuilt(self._root, tree, contents, {})
        return disk

    def _forget_unreachable(self) -> None:
        """Drop operations inside directories whose removal is durable."""
        everything: _Tree = {}
        reachable = -1
        while reachable != len(found := set(_walk(self._root, everything))):
            reachable = len(found)
            for number, op in enumerate(self._pending):
                for directory, name, node in op.changes:
                    if directory in found and node is not None:
                        entries = everything.setdefault(directory, dict(directory.durable))
                        entries[f"{name}/{number}"] = node
        self._pending = [op for op in self._pending if any(c[0] in found for c in op.changes)]


class _MemoryPayload:
    def __init__(self, ops: CrashingFileOps, path: Path, file: _File) -> None:
        self._ops = ops
        self._path = path
        self._file = file
        self.direct = True

    def pwrite(self, view: memoryview, offset: int) -> None:
        with self._ops._lock:
            self._ops._enter("pwrite", self._path)
            self.direct = self.direct and offset % PAGE_BYTES == len(view) % PAGE_BYTES == 0
            old = self._file.data.ljust(offset, b"\0")
            self._ops._set_data(self._file, old[:offset] + bytes(view) + old[offset + len(view) :])

    def truncate(self, num_bytes: int) -> None:
        self._ops._enter("truncate", self._path)
        self._file.data = self._file.data[:num_bytes].ljust(num_bytes, b"\0")

    def datasync(self) -> None:
        self._ops._enter("datasync", self._path)
        self._file.durable = self._file.data

    def close(self) -> None:
        pass


class _MemoryRead:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)
        self.direct = False

    def preadinto(self, view: memoryview, offset: int) -> int:
        piece = self._data[offset : offset + len(view)]
        view[: len(piece)] = piece
        return len(piece)

    def close(self) -> None:
        pass


def _apply(op: _EntryOp, tree: Mapping[_Dir, dict[str, _Node]]) -> None:
    for directory, name, node in op.changes:
        if node is None:
            tree[directory].pop(name, None)
        else:
            tree[directory][name] = node


def _walk(node: _Node, tree: _Tree) -> Iterator[_Node]:
    """The nodes below, as after a power cut; a node with several names comes several times."""
    seen: set[_Node] = set()
    stack = [node]
    while stack:
        node = stack.pop()
        yield node
        if isinstance(node, _Dir) and node not in seen:
            seen.add(node)
            stack.extend(tree.get(node, node.durable).values())


def _rebuilt(
    directory: _Dir, tree: _Tree, contents: Mapping[_File, bytes], made: dict[_File, _File]
) -> _Dir:
    """``made``: what has become of each file so far, since one may have several names."""
    entries: dict[str, _Node] = {}
    for name, node in tree.get(directory, directory.durable).items():
        if isinstance(node, _Dir):
            entries[name] = _rebuilt(node, tree, contents, made)
        elif isinstance(node, _Link):
            entries[name] = node
        else:
            data = contents.get(node, node.data)
            entries[name] = made.setdefault(node, _File(data, data))
    return _Dir(entries, dict(entries), directory.is_fixed)


def _image(node: _Node) -> object:
    if isinstance(node, _File):
        return node.data
    if isinstance(node, _Link):
        return Kind.LINK, node.target
    return tuple(sorted((name, _image(child)) for name, child in node.entries.items()))


def _used_bytes(root: _Dir) -> int:
    """Bytes in all files; one with several names counts once."""
    files: set[_File] = set()
    stack: list[_Node] = [root]
    while stack:
        node = stack.pop()
        if isinstance(node, _File):
            files.add(node)
        elif isinstance(node, _Dir):
            stack.extend(node.entries.values())
    return sum(len(file.data) for file in files)


def _error(kind: type[OSError], code: int, path: Path) -> OSError:
    return kind(code, os.strerror(code), str(path))
