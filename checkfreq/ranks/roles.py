"""Who writes what: the roles that ranks agree on when their managers are made.

Every rank puts a file into its checkpoint directory and lists which ranks' files it sees. Ranks
that see each other's files share a directory, and the first of them commits there. A directory
that should be shared and is not is thus noticed before anything is written.
"""

from __future__ import annotations

import contextlib
import socket
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from checkfreq.config import CFConfig
from checkfreq.errors import ConfigError
from checkfreq.ranks.meetings import Meetings
from checkfreq.ranks.merging import agreeing, distinct, grouped, said_by_each
from checkfreq.ranks.rank_sets import RankSet, listed, members, of_ranks
from checkfreq.ranks.rendezvous import MAKING
from checkfreq.store.fileops import LocalFileOps
from checkfreq.types import Directory, Json, Role


def agree_on_settings(meetings: Meetings, settings: Mapping[str, object]) -> None:
    """Raise ConfigError on every rank, naming the first setting that differs, if one does."""
    said = {name: repr(value) for name, value in settings.items()}
    meetings.meet(MAKING, said, merge=distinct(_require_equal, most=2))


def _require_equal(said: Sequence[tuple[int, Mapping[str, str]]]) -> Json:
    (_, first), *others = said
    for rank, other in others:
        for name, value in first.items():
            if other.get(name) != value:
                raise ConfigError(
                    f"{name} is {value} on rank 0 and {other.get(name)} on rank {rank}: every rank "
                    "must make its CFManager with the same arguments"
                )
    return None


def agree_on_role(meetings: Meetings, chk_dir: Path, *, config: CFConfig) -> Role:
    """This rank's role, from which ranks see the same directory.

    Raises ConfigError on every rank if the directory should be shared by all ranks and is not.
    """
    token = meetings.meet(MAKING, None, merge=agreeing(lambda: uuid.uuid4().hex))
    own = chk_dir / f".rank-{token}-{meetings.rank}"
    ops = LocalFileOps(chk_dir)
    try:
        meetings.act(MAKING, lambda: ops.write_file(own, b""), merge=agreeing())
        sees = meetings.act(
            MAKING, lambda: _seen(ops.listdir(chk_dir), token, meetings), merge=grouped()
        )
    finally:
        with contextlib.suppress(OSError):
            ops.unlink(own)
    groups = [_Group(members(seen), members(by)) for seen, by in sees]
    is_shared = config.directory is Directory.SHARED
    if (is_shared and len(groups) > 1) or not all(group.is_consistent for group in groups):
        here = {"dir": str(chk_dir), "host": socket.gethostname()}
        places = meetings.meet(MAKING, here, merge=said_by_each)
        raise _apart(groups, places, is_shared=is_shared)
    group = next(group for group in groups if meetings.rank in group.by)
    return Role(meetings.rank, meetings.world, tuple(group.seen), config.split_replicated)


@dataclass(frozen=True, slots=True)
class _Group:
    """The ranks ``by`` whom the files of the ranks ``seen`` are seen, and no others."""

    seen: Sequence[int]
    by: Sequence[int]

    @property
    def is_consistent(self) -> bool:
        """Ranks that see each other's files share a directory, so both see the same files."""
        return self.seen == self.by


def _seen(names: Collection[str], token: str, meetings: Meetings) -> RankSet:
    return of_ranks(rank for rank in range(meetings.world) if f".rank-{token}-{rank}" in names)


def _apart(
    groups: Sequence[_Group], places: Sequence[Mapping[str, str]], *, is_shared: bool
) -> ConfigError:
    """The error for ranks that do not see the files that they should."""
    sees = {rank: group.seen for group in groups for rank in group.by}
    if is_shared:
        return _not_shared(sees, places)
    odd_for = {r: [o for o in seen if sees[o] != seen] for r, seen in sorted(sees.items())}
    rank = next(rank for rank, odd in odd_for.items() if odd or rank not in sees[rank])
    where = "; ".join(_place(r, places[r], sees[r]) for r in (rank, *odd_for[rank]))
    return ConfigError(
        f"cannot tell which ranks share a checkpoint directory: {where}. Expected ranks that "
        "see one another's files to see the same files"
    )


def _not_shared(
    sees: Mapping[int, Sequence[int]], places: Sequence[Mapping[str, str]]
) -> ConfigError:
    everyone = list(range(len(places)))
    apart = [rank for rank in everyone if sees[rank] != everyone]
    where = "; ".join(_place(r, places[r], sees[r]) for r in {0: 0, **dict.fromkeys(apart)})
    different = len({place["dir"] for place in places}) > 1
    hint = "give every rank the same chk_dir" if different else "put it on storage that all see"
    return ConfigError(
        f"the checkpoint directory is not shared by all {len(places)} ranks: {where}. Expected one "
        f"that every rank sees: {hint}, or pass "
        "CFConfig(directory=Directory.NODE_LOCAL) if each node is to have its own"
    )


def _place(rank: int, place: Mapping[str, str], seen: Sequence[int]) -> str:
    return f"rank {rank} ({place['host']}, {place['dir']}) sees {_ranks(seen)}"


def _ranks(ranks: Iterable[int]) -> str:
    return f"the files of rank {listed(ranks)}"
