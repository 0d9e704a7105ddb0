"""Checkpoints whose root names the records of the ranks: commits, readers, and what they refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkfreq.errors import CorruptCheckpointError, PersistError
from checkfreq.store.joint import JointStore
from checkfreq.store.manifest import sealed
from checkfreq.store.outline import Outline, RankRecord, decode_part, encode_part
from checkfreq.store.parts import merge, part_name
from checkfreq.store.records import Records
from checkfreq.store.store import CheckpointStore, Pending
from checkfreq.store.tree import Tree, decode_record
from checkfreq.testing import CrashingFileOps, commit_bytes
from tests.store.ranks import (
    Share,
    leader_begins,
    leader_commits,
    shares,
    write_part,
)

ROOT = Path("/chk")
WORLD = 5


def listed(world: int = WORLD, step: int = 5) -> list[Share]:
    """Shares of ranks on one mesh: the leader lists what is sharded, and all have positions."""
    found = shares(step, world=world)
    found[0].objects["m"]["sharded_tensors"] = {"weight": ["uint8", [world, 4]]}
    for share in found:
        share.own["$positions"] = {"train": {"epoch": 1, "check": 7 * share.rank}}
    return found


@pytest.fixture
def store() -> JointStore:
    store = JointStore(ROOT, ops=CrashingFileOps(), is_tree=True)
    store.open()
    return store


def begun(store: JointStore, found: list[Share]) -> Pending:
    """What the leader can commit: all parts are written."""
    pending = leader_begins(store, found[0])
    for share in found[1:]:
        write_part(store, share)
    return pending


def commit(store: JointStore, found: list[Share]) -> None:
    leader_commits(store, begun(store, found), found[0])


def read(store: JointStore, name: str, step: int = 5) -> bytes:
    return store.ops.read_bytes(store.path(step) / name)


def overwrite(store: JointStore, name: str, data: bytes, step: int = 5) -> None:
    store.ops.write_file(store.path(step) / name, data)


def tree_of(store: JointStore, step: int = 5) -> Tree:
    head = store.head(step)
    assert isinstance(head, Tree)
    return head


# What is in it.


@pytest.mark.parametrize("found", [listed(), shares(world=WORLD)], ids=["listed", "not listed"])
def test_the_records_joined_are_what_merging_makes(store: JointStore, found: list[Share]) -> None:
    commit(store, found)
    leader, *others = (share.manifest() for share in found)
    assert store.manifest(5) == merge(leader, others)
    assert store.inspect(5) == store.manifest(5)


def test_the_root_has_what_a_manifest_has_but_for_the_ranks_files(store: JointStore) -> None:
    commit(store, listed())
    tree, whole = tree_of(store), store.manifest(5)
    for name in ("step", "attempt", "world", "created_unix_s", "versions", "objects", "num_bytes"):
        assert getattr(tree, name) == getattr(whole, name)
    assert [file.name for file in tree.files] == [part_name(rank) for rank in range(WORLD)]
    assert [leaf.whole for leaf in tree.leaves.values()] == [("rng",)] * WORLD
    assert decode_record(tree.encode(), path="m") == tree


def test_some_ranks_alone_come_with_names_and_positions_of_the_others(store: JointStore) -> None:
    commit(store, listed())
    tree = tree_of(store)
    parts = list(store.parts(tree, {0, 3}))
    assert [list(part.ranks) for part in parts] == [[0], [3]]
    manifest = tree.with_others(tree.joined(parts))
    assert {file.name for file in manifest.files} == {
        "m.safetensors",
        *(f"{name}.rank-{rank:05d}.safetensors" for name in ("m", "rng") for rank in (0, 3)),
    }
    whole = store.manifest(5)
    assert [*manifest.ranks] == [*whole.ranks]
    assert manifest.ranks[3] == whole.ranks[3]
    positions = whole.ranks[1]["$positions"]
    assert manifest.ranks[1] == {"m": {}, "rng": {"kind": None}, "$positions": positions}
    assert tree.only_positions().ranks[4] == {"$positions": whole.ranks[4]["$positions"]}


def test_a_record_that_is_no_tree_is_its_own_only_part(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    commit_bytes(store, 5, {"m": b"state"})
    head = store.head(5)
    assert list(store.parts(head)) == [head] == [store.whole(head)]
    assert store.attempt(5) == head.attempt


def test_a_reader_keeps_the_root_and_joins_it_once(store: JointStore) -> None:
    commit(store, listed())
    records = Records(store)
    assert records.head(5) is records.head(5)
    assert records.manifest(5) is records.manifest(5)
    assert records.summary(5).num_bytes == tree_of(store).num_bytes
    commit(store, listed(step=6))
    assert records.manifest(6).step == 6


# What is not committed.


def shifted(share: Share) -> None:
    share.own["m"]["shards"]["weight"] = [[WORLD, 4], [0, 0]]


def other_shape(share: Share) -> None:
    share.own["m"]["shards"]["weight"] = [[WORLD + 1, 4], [share.rank, 0]]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (shifted, "expected each element once, found"),
        (other_shape, "shape: expected"),
        (lambda share: share.own.pop("m"), "expected 20 elements of"),
        (lambda share: setattr(share, "world", 9), "rank 2 says world 9, expected 5"),
        (lambda share: share.files.update({"m": {"bias": ([1], b"x")}}), "that is not its own"),
    ],
)
def test_what_does_not_fit_together_is_refused_by_name(
    store: JointStore, change: Callable[[Share], object], said: str
) -> None:
    found = listed()
    change(found[2])
    pending = begun(store, found)
    store.wait_for_parts(pending, range(1, WORLD), timeout_s=0.0)
    with pytest.raises(PersistError, match=said):
        store.merge_parts(pending, found[0].manifest(), range(1, WORLD))


def test_a_shard_of_what_the_leader_has_whole_is_refused(store: JointStore) -> None:
    found = listed()
    found[0].files["m.safetensors"] = {"weight": ([WORLD, 4], bytes(4 * WORLD))}
    with pytest.raises(PersistError, match="expected whole or in shards, found both"):
        commit(store, found)


def test_a_member_refuses_to_tell_of_a_shard_that_it_has_not(store: JointStore) -> None:
    share = listed()[1]
    share.own["m"]["shards"]["lost"] = [[2], [0]]
    with pytest.raises(PersistError, match="rank 1 says that it has a shard"):
        write_part(store, share)


def test_a_damaged_record_and_a_missing_file_are_refused(store: JointStore) -> None:
    found = listed()
    pending = begun(store, found)
    store.ops.unlink(pending.path / "rng.rank-00003.safetensors")
    with pytest.raises(PersistError, match="rank 3's rng.rank-00003.safetensors: .* no such file"):
        leader_commits(store, pending, found[0])
    store.ops.write_file(pending.path / part_name(1), encode_part(found[1].manifest())[:-3])
    with pytest.raises(PersistError, match="the part of rank 1 cannot be read"):
        leader_commits(store, pending, found[0])
    store.ops.write_file(pending.path / part_name(1), encode_part(found[2].manifest()))
    with pytest.raises(PersistError, match="the part of rank 1 says rank 2, expected 1"):
        leader_commits(store, pending, found[0])


# Damage.


def test_a_record_that_is_gone_or_of_another_attempt_is_damage(store: JointStore) -> None:
    found = listed()
    commit(store, found)
    overwrite(store, part_name(2), encode_part(replace(found[2].manifest(), attempt="b5")))
    with pytest.raises(CorruptCheckpointError, match="part-00002.json: record"):
        store.manifest(5)
    store.ops.unlink(store.path(5) / part_name(2))
    for look in (store.manifest, store.verify, store.glance):
        with pytest.raises(CorruptCheckpointError, match="part-00002.json"):
            look(5)
    assert [*store.parts(tree_of(store), {1})]


def test_no_changed_byte_of_a_record_or_of_the_root_passes(store: JointStore) -> None:
    commit(store, listed())
    for name in ("manifest.json", part_name(0), part_name(3)):
        whole = read(store, name)
        for at in range(0, len(whole), 7):
            overwrite(store, name, whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            with pytest.raises(CorruptCheckpointError):
                store.manifest(5)
        overwrite(store, name, whole)
    store.verify(5)


# Records that somebody made up, with correct digests.


ENTRY = json.loads(shares()[1].manifest().encode())["files"][0]


def forged(store: JointStore, name: str, change: Callable[[dict[str, Any]], object]) -> bytes:
    fields = json.loads(read(store, name))
    version = fields.pop("format_version")
    del fields["digest"]
    change(fields)
    return sealed(version, json.dumps(fields)[1:-1])


@pytest.mark.parametrize(
    "change",
    [
        lambda root: root.pop("leader"),
        lambda root: root.update(leader="0"),
        lambda root: root.update(world=2),
        lambda root: root.update(parts=3),
        lambda root: root["parts"].pop(),
        lambda root: root["parts"].append(root["parts"][-1]),
        lambda root: root["parts"][0].pop(),
        lambda root: root["parts"][0].__setitem__(2, "00"),
        lambda root: root.update(is_split=0),
        lambda root: root.update(own=None),
        lambda root: root["own"][0].update(form=[[1], [], {}]),
        lambda root: root["own"][0].update(form=[["m"], [], 1]),
        lambda root: root.update(cuts=[[[[0, 5]], [[0, 1, 9, [0], [1], [1]]]]]),
        lambda root: root["files"].append(ENTRY),
        lambda root: root.update(ranks={}),
        lambda root: root.update(more=1),
    ],
)
def test_a_root_that_cannot_be_is_damage(
    store: JointStore, change: Callable[[dict[str, Any]], object]
) -> None:
    commit(store, listed())
    overwrite(store, "manifest.json", forged(store, "manifest.json", change))
    with pytest.raises(CorruptCheckpointError):
        store.head(5)


@pytest.mark.parametrize(
    "change",
    [
        lambda part: part.pop("outline"),
        lambda part: part["outline"].update(rank=-1),
        lambda part: part["outline"].update(files={"m": 1.5}),
        lambda part: part["outline"].update(names=[1]),
        lambda part: part["outline"].update(is_split=None),
        lambda part: part["outline"].update(measure="0x"),
        lambda part: part["outline"].update(cuts=[[[[0, 5]], [9], [1]]]),
        lambda part: part["outline"].update(positions={}),
    ],
)
def test_a_record_that_cannot_be_is_damage(change: Callable[[dict[str, Any]], object]) -> None:
    text = encode_part(listed()[1].manifest()).decode()
    lines = text.split("\n", 3)
    fields = {"outline": json.loads(lines[1].removeprefix('"outline": ').removesuffix(","))}
    change(fields)
    head = "".join(f'"{name}": {json.dumps(value)},\n' for name, value in fields.items())
    data = sealed(4, f"{head}{lines[2]}\n{lines[3].removesuffix('}' + chr(10))}")
    with pytest.raises(CorruptCheckpointError):
        decode_part(data, path="p")


@pytest.mark.parametrize("what", ["several ranks", "none", "shards it has not", "no record"])
def test_a_record_of_anything_but_one_rank_and_its_shards_is_damage(what: str) -> None:
    found = listed()
    share, manifest = found[1], found[1].manifest()
    outline = json.dumps(Outline.of(manifest).to_json())
    if what == "several ranks":
        manifest = merge(found[0].manifest(), [one.manifest() for one in found[1:]])
    elif what == "none":
        manifest = replace(manifest, ranks={})
    elif what == "shards it has not":
        share.own["m"]["shards"]["lost"] = [[2], [0]]
        manifest = share.manifest()
    data = sealed(4, f'"outline": {outline},\n"record":\n{manifest.encode().decode()}')
    if what == "no record":
        data = manifest.encode()
        with pytest.raises(CorruptCheckpointError):
            RankRecord.read(sealed(4, '"outline": {}'), path="p")
        with pytest.raises(CorruptCheckpointError):
            RankRecord.read(data, path="p")
    with pytest.raises(CorruptCheckpointError):
        decode_part(data, path="p")
