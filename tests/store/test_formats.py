"""Format version 2 stays readable: a fixture as two ranks' workers would write it."""

from __future__ import annotations

from pathlib import Path

from checkfreq.store.joint import JointStore
from checkfreq.store.parts import check_shards
from checkfreq.store.store import CheckpointStore
from tests.fixtures import make_format_2

STORE = CheckpointStore(make_format_2.FOLDER)


def test_the_fixture_of_format_2_verifies_with_everything_in_it() -> None:
    manifest = STORE.verify(2)

    assert (manifest.format_version, manifest.world) == (2, 2)
    assert sorted(manifest.objects) == ["extra", "model", "optimizer", "scheduler"]
    assert [sorted(own) for own in manifest.ranks.values()] == [["model", "optimizer", "rng"]] * 2
    assert manifest.ranks[1]["model"]["shards"] == {
        "tied": [[3, 4], [2, 0]],
        "2.weight": [[4, 3], [2, 0]],
    }
    shards = manifest.file("model.rank-00001.safetensors").tensors
    assert {tensor.name: tensor.shape for tensor in shards} == {
        "tied": (1, 4),
        "1.running_mean": (3,),
        "2.weight": (2, 3),
    }
    check_shards(manifest)


def test_the_fixture_is_what_its_maker_makes_to_the_byte(tmp_path: Path) -> None:
    store = JointStore(tmp_path / "chk")
    store.open()
    make_format_2.commit(store)

    made = {path.name: path.read_bytes() for path in store.path(2).iterdir()}
    assert made == {path.name: path.read_bytes() for path in STORE.path(2).iterdir()}


def test_the_manifest_of_format_1_comes_out_as_it_was_written() -> None:
    store = CheckpointStore(make_format_2.SOURCE)
    data = (store.path(2) / "manifest.json").read_bytes()
    assert store.manifest(2).encode() == data
