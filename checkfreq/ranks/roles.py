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
from pathlib import Path

from checkfreq.config import CFConfig
from checkfreq.errors import ConfigError
from checkfreq.ranks.meetings import Meetings
from checkfreq.ranks.rendezvous import MAKING
from checkfreq.store.fileops import LocalFileOps
from checkfreq.types import Directory, Json, Role


def agree_on_settings(meetings: Meetings, settings: Mapping[str, object]) -> None:
    """Raise ConfigError on every rank, naming the first setting that differs, if one does."""
    said = {name: repr(value) for name, value in settings.items()}
    meetings.meet(MAKING, said, decide=_require_equal)


def _require_equal(said: Sequence[Json]) -> Json:
    for name, value in said[0].items():
        for rank, other in enumerate(said):
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
    token = meetings.meet(MAKING, None, decide=lambda said: uuid.uuid4().hex)
    own = chk_dir / f".rank-{token}-{meetings.rank}"
    ops = LocalFileOps(chk_dir)
    try:
        meetings.act(MAKING, lambda: ops.write_file(own, b""))
        sees = meetings.act(MAKING, lambda: _seen(ops.listdir(chk_dir), chk_dir, token, meetings))
    finally:
        with contextlib.suppress(OSError):
            ops.unlink(own)
    if config.directory is Directory.SHARED:
        _require_shared(sees)
    _require_consistent(sees)
    group = tuple(sees[meetings.rank]["ranks"])
    return Role(meetings.rank, meetings.world, group, config.split_replicated)


def _seen(names: Collection[str], chk_dir: Path, token: str, meetings: Meetings) -> Json:
    ranks = [rank for rank in range(meetings.world) if f".rank-{token}-{rank}" in names]
    return {"ranks": ranks, "dir": str(chk_dir), "host": socket.gethostname()}


def _require_shared(sees: Sequence[Json]) -> None:
    everyone = list(range(len(sees)))
    apart = [rank for rank, seen in enumerate(sees) if seen["ranks"] != everyone]
    if not apart:
        return
    places = "; ".join(_place(rank, sees[rank]) for rank in {0: 0, **dict.fromkeys(apart)})
    different = len({seen["dir"] for seen in sees}) > 1
    hint = "give every rank the same chk_dir" if different else "put it on storage that all see"
    raise ConfigError(
        f"the checkpoint directory is not shared by all {len(sees)} ranks: {places}. Expected one "
        f"that every rank sees: {hint}, or pass "
        "CFConfig(directory=Directory.NODE_LOCAL) if each node is to have its own"
    )


def _require_consistent(sees: Sequence[Json]) -> None:
    """Ranks that see each other's files share a directory, so both must see the same files."""
    for rank, seen in enumerate(sees):
        odd = [other for other in seen["ranks"] if sees[other]["ranks"] != seen["ranks"]]
        if odd or rank not in seen["ranks"]:
            raise ConfigError(
                "cannot tell which ranks share a checkpoint directory: "
                f"{'; '.join(_place(r, sees[r]) for r in (rank, *odd))}. Expected ranks that see "
                "one another's files to see the same files"
            )


def _place(rank: int, seen: Json) -> str:
    return f"rank {rank} ({seen['host']}, {seen['dir']}) sees {_ranks(seen['ranks'])}"


def _ranks(ranks: Iterable[int]) -> str:
    return f"the files of rank {', '.join(map(str, ranks))}"
