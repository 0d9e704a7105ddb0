"""``AtomicDirectory``: checkpoints of many files, one folder each, and a pointer to the newest.

::

    output_directory/
        NAME_checkpoint_7/                what the user wrote
        NAME_checkpoint_8_force/          one that is never removed
        NAME_checkpoint_9/                being written
        NAME.latest_checkpoint            a symbolic link to NAME_checkpoint_8_force
        .NAME_checkpoint_5.gone/          being removed

The order: everything in the new folder is synced, then its name, then the link is replaced in one
operation, then the link is synced; only then are redundant folders removed. So the link leads to a
whole checkpoint at every instant. The names are those of cycling_utils, whose folders it continues.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, get_args

from checkfreq.errors import (
    CheckFreqError,
    ConfigError,
    NoCheckpointError,
    StateError,
    storage_error,
    storage_errors,
)
from checkfreq.helpers.folders import ensure_folder, sync_tree
from checkfreq.helpers.group import Alone, Group, current_group
from checkfreq.store.fileops import FileOps, Kind, LocalFileOps, user_path

logger = logging.getLogger(__name__)

#: How several ranks work together; see AtomicDirectory.
Strategy: TypeAlias = Literal["sync_any", "sync_all", "async", "mono"]
_TOGETHER = ("sync_any", "sync_all")


@dataclass(frozen=True, slots=True, order=True)
class _Folder:
    """A checkpoint's number, its name, and whether it is kept for good."""

    number: int
    name: str
    is_forced: bool


class AtomicDirectory:
    """Folders of checkpoint files, of which the newest complete one can always be found.

    ::

        saver = AtomicDirectory("out/", keep_last=3)
        if (latest := saver.latest()) is not None:
            model.load_state_dict(torch.load(latest / "model.pt"))
        ...
        folder = saver.prepare_checkpoint_directory()
        torch.save(model.state_dict(), folder / "model.pt")  # any files, by any means
        saver.atomic_symlink(folder)

    Under torch.distributed every rank makes one and calls its methods together with the others; all
    write to one folder, and rank 0 moves the pointer when every rank's files are durable.

    Arguments
        name: names the folders and the pointer, so that several savers may share a directory.
        keep_last: how many complete checkpoints to keep, the newest included; forced ones are kept
            in addition. Default -1: all.
        strategy: of the ranks of a process group. "sync_any" (default) and "sync_all": one folder
            of all ranks, forced if any, or if every rank asks for it. "async": a folder and a
            pointer (NAME_rank_R) of each rank's own, without meetings. "mono": as without a process
            group; each process needs a name of its own.

    One process, or process group, at a time may write under a name. Raises ConfigError for
    arguments out of range, and StorageError (an OSError) if the file system fails, on every rank.
    """

    def __init__(
        self,
        output_directory: str | os.PathLike[str],
        *,
        name: str = "AtomicDirectory",
        keep_last: int = -1,
        strategy: Strategy = "sync_any",
        group: Group | None = None,
        ops: FileOps | None = None,
    ) -> None:
        _check(name, keep_last, strategy)
        found = current_group() if group is None else group
        self._group: Group = found if strategy in _TOGETHER else Alone()
        self._strategy = strategy
        self._name = f"{name}_rank_{found.rank}" if strategy == "async" else name
        self._keep_last = keep_last
        self._root = user_path(output_directory)
        self._ops = LocalFileOps(self._root) if ops is None else ops
        self._ours = re.compile(rf"{re.escape(self._name)}_checkpoint_(\d+)(_force)?")
        self._do("AtomicDirectory", lambda: ensure_folder(self._ops, self._root))

    @property
    def symlink_name(self) -> str:
        """The name of the pointer in the output directory.

        It is a symbolic link to a name in its own folder, so that the folder may be moved, and be
        mounted elsewhere by others. `latest` opens it, and so does ``os.path.realpath``;
        ``os.readlink`` gives the name alone, which is no path from the working directory.
        """
        return f"{self._name}.latest_checkpoint"

    def latest(self) -> Path | None:
        """The newest complete checkpoint; None before the first.

        The pointer is read by the last name in it, so the output directory may have been moved.
        Raises NoCheckpointError if what it names is not there.
        """
        with storage_errors(f"AtomicDirectory.latest of {self._root}"):
            name = self._pointed()
            if name is None or self._ops.is_dir(self._root / name):
                return None if name is None else self._root / name
        raise NoCheckpointError(
            f"{self._root / self.symlink_name} points to {name}, which is not there. Copy that "
            "folder back, or remove the pointer to begin without a checkpoint"
        )

    def prepare_checkpoint_directory(self, force_save: bool = False) -> Path:
        """An empty folder for the next checkpoint; the same one on every rank.

        Removes what an interrupted checkpoint left. With ``force_save`` the checkpoint is never
        removed as redundant.
        """
        asked = self._group.gather(force_save)
        is_forced = all(asked) if self._strategy == "sync_all" else any(asked)
        made = self._do("AtomicDirectory.prepare", lambda: self._prepare(is_forced))
        return self._root / made

    def atomic_symlink(self, checkpoint_directory: str | os.PathLike[str]) -> None:
        """Make a prepared folder the latest checkpoint. On return it survives a power cut.

        Every rank syncs the files that it sees. If that fails on any rank, the pointer stays where
        it is, and every rank raises. Then removes checkpoints beyond ``keep_last``; a failure of
        that is a warning.

        Raises StateError for a folder that is not one of this saver's.
        """
        folder = self._root / Path(os.fsdecode(checkpoint_directory)).name
        what = "AtomicDirectory.atomic_symlink"
        self._do(what, lambda: self._sync(folder, checkpoint_directory), on_all=True)
        self._do(what, lambda: self._point_to(folder.name))

    #: The later name of the method in cycling_utils.
    symlink_latest = atomic_symlink

    # What one rank does.

    def _prepare(self, is_forced: bool) -> str:
        latest = self._latest_number()
        folders = self._folders()
        if latest is None and folders:
            logger.warning(
                "%s: there are checkpoints and no pointer %s to a complete one; keeping all of "
                "them. Remove those that are not complete, or make the pointer again (ln -s)",
                self._root,
                self.symlink_name,
            )
        for folder in folders:
            if latest is not None and folder.number > latest:
                self._ops.remove_tree(self._root / folder.name)
        self._bury()
        left = [folder.number for folder in self._folders()]
        name = f"{self._name}_checkpoint_{max(left, default=-1) + 1}{'_force' * is_forced}"
        self._ops.mkdir(self._root / name)
        return name

    def _sync(self, folder: Path, given: object) -> None:
        if not self._ours.fullmatch(folder.name) or not self._ops.is_dir(folder):
            raise StateError(
                f"atomic_symlink({str(given)!r:.200}): expected the folder that "
                f"prepare_checkpoint_directory() returned, a {self._name}_checkpoint_N in "
                f"{self._root}, which every rank sees"
            )
        sync_tree(self._ops, folder)

    def _point_to(self, name: str) -> None:
        self._ops.sync_dir(self._root)  # the folder's own name, before the pointer to it
        self._ops.point_link(self._root / self.symlink_name, name)
        self._ops.sync_dir(self._root)
        self._remove_redundant()

    def _remove_redundant(self) -> None:
        latest = self._latest_number()
        plain = [f for f in self._folders() if not f.is_forced and f.number != latest]
        kept = len([f for f in self._folders() if f.number == latest and not f.is_forced])
        redundant = plain[: max(len(plain) - (self._keep_last - kept), 0)]
        if self._keep_last < 0 or not redundant:
            return
        try:
            for folder in redundant:
                self._ops.rename(self._root / folder.name, self._root / f".{folder.name}.gone")
            self._ops.sync_dir(self._root)  # else a crash could leave part of one under its name
            self._bury()
        except OSError as error:
            logger.warning("%s: cannot remove old checkpoints: %s", self._root, error)

    def _bury(self) -> None:
        for name in self._ops.listdir(self._root):
            inner = name.removeprefix(".").removesuffix(".gone")
            if name == f".{inner}.gone" and self._ours.fullmatch(inner):
                self._ops.remove_tree(self._root / name)

    # What is there.

    def _folders(self) -> list[_Folder]:
        """The checkpoints, complete or not, in the order of their numbers."""
        found = []
        for name, kind in self._ops.scan(self._root).items():
            match = self._ours.fullmatch(name)
            if match is not None and kind is Kind.DIRECTORY:
                found.append(_Folder(int(match[1]), name, match[2] is not None))
        return sorted(found)

    def _pointed(self) -> str | None:
        target = self._ops.read_link(self._root / self.symlink_name)
        return None if target is None else Path(target).name

    def _latest_number(self) -> int | None:
        """The number of the checkpoint that the pointer leads to; None if it leads to none."""
        name = self._pointed()
        return next((f.number for f in self._folders() if f.name == name), None)

    # Together.

    def _do(self, what: str, act: Callable[[], str | None], *, on_all: bool = False) -> str:
        """Run ``act`` on rank 0, or on all ranks; what rank 0's returned. Raises on every rank."""
        said = ""
        failure: OSError | CheckFreqError | None = None
        if on_all or self._group.rank == 0:
            try:
                said = act() or ""
            except (OSError, CheckFreqError) as error:
                failure = error
        mine = None if failure is None else _portable(f"{what} in {self._root}", failure)
        results = self._group.gather((said, mine))
        for rank, (_, theirs) in enumerate(results):
            if theirs is not None:
                if rank != self._group.rank:
                    theirs.add_note(f"on rank {rank}")
                raise theirs from (failure if rank == self._group.rank else None)
        return results[0][0]


def _portable(what: str, error: OSError | CheckFreqError) -> CheckFreqError:
    """As an error of ours, which can be sent between ranks."""
    return error if isinstance(error, CheckFreqError) else storage_error(what, error)


def _check(name: object, keep_last: object, strategy: object) -> None:
    if not isinstance(name, str) or not name or "/" in name or "\0" in name:
        raise ConfigError(f"AtomicDirectory(name=...): expected part of a file name, got {name!r}")
    if isinstance(keep_last, bool) or not isinstance(keep_last, int) or keep_last in (0,):
        raise ConfigError(
            f"AtomicDirectory(keep_last=...): expected a number from 1, or -1 for all, got "
            f"{keep_last!r}"
        )
    if strategy not in get_args(Strategy):
        raise ConfigError(
            f"AtomicDirectory(strategy=...): expected one of {', '.join(get_args(Strategy))}, "
            f"got {strategy!r}"
        )
