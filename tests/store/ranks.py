"""Parts of small checkpoints, written by hand: what several ranks' workers do, in one process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from checkfreq.store.digests import digest_pieces, piece_bytes_of
from checkfreq.store.fileops import Kind
from checkfreq.store.joint import JointStore
from checkfreq.store.manifest import FileEntry, Manifest, TensorEntry, digest_of
from checkfreq.store.store import CommitResult, Pending
from checkfreq.testing import page_aligned
from checkfreq.types import Json, TensorSpec

Tensors = Mapping[str, tuple[Sequence[int], bytes]]


def image_of(name: str, tensors: Tensors) -> tuple[bytes, FileEntry]:
    """A safetensors file of uint8 tensors, and its entry."""
    header: dict[str, Json] = {}
    end = 0
    for key, (shape, data) in tensors.items():
        header[key] = {"dtype": "U8", "shape": list(shape), "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(header).encode()
    head = len(text).to_bytes(8, "little") + text
    entries, at = [], len(head)
    for key, (shape, data) in tensors.items():
        spec = TensorSpec(key, "uint8", tuple(shape), at, len(data), piece_bytes_of(len(data)))
        digest = digest_pieces(memoryview(data), spec)
        entries.append(
            TensorEntry(key, "uint8", spec.shape, at, len(data), digest, spec.piece_bytes)
        )
        at += len(data)
    body = b"".join(data for _, data in tensors.values())
    return head + body, FileEntry(name, at, len(head), digest_of(head), tuple(entries))


@dataclass
class Share:
    """One rank's part."""

    rank: int
    files: dict[str, Tensors] = field(default_factory=dict)
    own: Json = field(default_factory=dict)
    objects: Json = field(default_factory=dict)
    step: int = 5
    attempt: str = "a5"
    world: int = 3

    def write_payloads(self, pending: Pending) -> None:
        for name, tensors in self.files.items():
            image, _ = image_of(name, tensors)
            payload = pending.create_payload(name, len(image))
            payload.pwrite(memoryview(page_aligned(image)), 0)
            pending.finish_payload(payload, len(image))

    def manifest(self) -> Manifest:
        files = tuple(image_of(name, tensors)[1] for name, tensors in self.files.items())
        return Manifest(
            self.step, self.attempt, self.world, 0.0, {}, files, self.objects, {self.rank: self.own}
        )


def shares(step: int = 5, *, world: int = 3, attempt: str = "") -> list[Share]:
    """Rank 0 writes what is the same on all; each has a generator and a row of "m"'s weight."""
    found = []
    for rank in range(world):
        ending = f"rank-{rank:05d}.safetensors"
        row = bytes([step, rank]) * 2
        files: dict[str, Tensors] = {
            f"m.{ending}": {"weight": ([1, 4], row)},
            f"rng.{ending}": {"state": ([2], bytes([step, rank]))},
        }
        objects = {}
        if rank == 0:
            files = {"m.safetensors": {"bias": ([1], bytes([step]))}, **files}
            objects = {"m": {"kind": "module"}}
        own = {
            "m": {"shards": {"weight": [[world, 4], [rank, 0]]}},
            "rng": {"kind": "rng", "seed": rank},
        }
        found.append(Share(rank, files, own, objects, step, attempt or f"a{step}", world))
    return found


def member_begins(store: JointStore, share: Share) -> Pending:
    pending = store.join(share.step, attempt=share.attempt, rank=share.rank)
    assert pending is not None
    share.write_payloads(pending)
    return pending


def write_part(store: JointStore, share: Share) -> None:
    store.write_part(member_begins(store, share), share.manifest())


def leader_begins(store: JointStore, share: Share) -> Pending:
    pending = store.lead(share.step, attempt=share.attempt)
    share.write_payloads(pending)
    return pending


def leader_commits(
    store: JointStore, pending: Pending, share: Share, *, after: int | None = None
) -> CommitResult:
    """Commit with the parts that are there; raises at once if one is missing."""
    others = range(1, share.world)
    store.wait_for_parts(pending, others, timeout_s=0.0)
    merged = store.merge_parts(pending, share.manifest(), others)
    return store.commit(pending, merged, supersede_after=after)


def all_write(store: JointStore, step: int = 5, *, world: int = 3) -> tuple[Share, Pending]:
    """Every rank has written its part; returns the leader's share, and what it can commit."""
    leader, *members = shares(step, world=world)
    pending = leader_begins(store, leader)
    for member in members:
        write_part(store, member)
    return leader, pending


def commit_jointly(store: JointStore, step: int, *, world: int = 3) -> CommitResult:
    leader, pending = all_write(store, step, world=world)
    return leader_commits(store, pending, leader)


def expect_whole(store: JointStore, step: int, *, world: int = 3) -> None:
    """Assert that a step has what its ranks wrote, and nothing else."""
    head, manifest = store.verify(step), store.manifest(step)
    for share in shares(step, world=world):
        assert manifest.ranks[share.rank] == share.own
        for name, tensors in share.files.items():
            assert store.ops.read_bytes(store.locate(step, name)) == image_of(name, tensors)[0]
    names = {"manifest.json", *(file.name for file in (*head.files, *manifest.files))}
    expected = {store.locate(step, name) for name in names}
    found = set()
    for folder in {path.parent for path in expected}:
        kinds = store.ops.scan(folder)
        found |= {folder / name for name, kind in kinds.items() if kind is Kind.FILE}
    assert found == expected
