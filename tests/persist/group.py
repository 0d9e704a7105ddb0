"""Ranks for tests: each has its own slot and a real worker; one process plays all trainers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from checkfreq.config import CFConfig
from checkfreq.persist import protocol as p
from checkfreq.persist.client import WorkerClient
from checkfreq.store.store import CheckpointStore
from checkfreq.store.tree import Tree
from checkfreq.testing import commit_bytes
from checkfreq.types import Role
from tests.persist.conftest import HandMadeSlot, next_reply, request

ROW = 3000
OLD_STEP = 1
DEADLINE_S = 120.0


def role_of(rank: int, world: int) -> Role:
    return Role(rank, world, tuple(range(world)))


def files_of(rank: int) -> list[tuple[str, dict[str, int]]]:
    ending = f"rank-{rank:05d}.safetensors"
    shared = [("model.safetensors", {"same": 10_000})] if rank == 0 else []
    return [*shared, (f"model.{ending}", {"weight": ROW}), (f"rng.{ending}", {"state": 16})]


def own_of(rank: int, world: int) -> dict[str, object]:
    shards = {"weight": [[ROW * world], [ROW * rank]]}
    return {"model": {"shards": shards}, "rng": {"kind": "rng", "seed": rank}}


@dataclass
class Rank:
    """One rank: its role, its slot, and the client of its worker."""

    role: Role
    client: WorkerClient
    images: dict[str, bytes]

    def submit(self, step: int, **changes: object) -> None:
        """Hand slot 0 over as this rank's part of a step."""
        rank, world = self.role.rank, self.role.world
        fields: dict[str, object] = {
            "objects": {"model": {"kind": "module"}} if self.role.leads else {},
            "own": own_of(rank, world),
            "world": world,
            "part_timeout_s": DEADLINE_S,
        }
        self.client.submit(request(step, **{**fields, **changes}))

    def reply(self) -> p.Message:
        """The next reply about a snapshot."""
        while isinstance(reply := next_reply(self.client), p.Opened):
            pass
        return reply


class Group:
    """All ranks of one directory, which has a checkpoint of step 1 from the start."""

    def __init__(self, chk_dir: Path, on_exit: contextlib.ExitStack) -> None:
        self.chk_dir = chk_dir
        self.store = CheckpointStore(chk_dir)
        self.is_tree = False
        self._on_exit = on_exit
        self.store.open()
        commit_bytes(self.store, OLD_STEP, {"m": b"old"})

    def start(self, world: int, *, scripts: dict[int, str] | None = None) -> list[Rank]:
        """Every rank, by number; ``scripts``: faults of some ranks' first workers."""
        return [self._start(rank, world, (scripts or {}).get(rank, "")) for rank in range(world)]

    def _start(self, rank: int, world: int, script: str) -> Rank:
        role = role_of(rank, world)
        config = CFConfig(
            takeover_s=120.0, rank_timeout_s=5.0, tree_from_ranks=2 if self.is_tree else world + 1
        )
        client = WorkerClient(self.chk_dir, config=config, role=role)
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("CHECKFREQ_FAULT", script)
            client.start()
        self._on_exit.callback(client.kill)
        slot = HandMadeSlot(files_of(rank))
        self._on_exit.callback(slot.close)
        slot.share(client)
        client.wait_opened()
        return Rank(role, client, slot.images)

    def verify(self, *steps: int) -> None:
        """Assert that exactly these steps are there, with what every rank wrote."""
        assert self.store.steps() == [OLD_STEP, *steps]
        for step in steps:
            head, manifest = self.store.verify(step), self.store.manifest(step)
            assert isinstance(head, Tree) is self.is_tree
            assert manifest.ranks == {
                rank: own_of(rank, manifest.world) for rank in range(manifest.world)
            }
            folder = self.store.path(step)
            written = {path.name for path in folder.iterdir()}
            files = (*head.files, *manifest.files)
            assert written == {"manifest.json", *(file.name for file in files)}
        assert self.store.manifest(OLD_STEP) == self.store.verify(OLD_STEP)

    @property
    def pending(self) -> list[str]:
        """Directories of attempts that are, or were, in progress."""
        return sorted(path.name for path in self.chk_dir.glob(".tmp-*"))


@contextlib.contextmanager
def group_in(chk_dir: Path) -> Iterator[Group]:
    with contextlib.ExitStack() as on_exit:
        yield Group(chk_dir, on_exit)
