"""Old format versions stay readable: fixtures as two ranks' workers would write them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from checkfreq.errors import CorruptCheckpointError
from checkfreq.store.parts import check_shards
from checkfreq.store.store import CheckpointStore
from tests.fixtures import format_2, format_3

STORE = CheckpointStore(format_2.FOLDER)


def test_the_fixture_of_format_2_verifies_with_everything_in_it() -> None:
    manifest = STORE.verify(2)

    assert (manifest.format_version, manifest.world) == (2, 2)
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


def test_the_fixture_of_format_3_has_the_payloads_of_format_2_with_a_digest_per_row() -> None:
    store = CheckpointStore(format_3.FOLDER)
    manifest = store.verify(2)
    assert (manifest.format_version, manifest.world) == (3, 2)
    check_shards(manifest)
    weight = {t.name: t for t in manifest.file("model.rank-00001.safetensors").tensors}["2.weight"]
    assert (weight.shape, weight.piece_bytes, len(weight.digest)) == ((2, 3), 12, 32)
    for file in manifest.files:
        there = (store.path(2) / file.name).read_bytes()
        assert there == (STORE.path(2) / file.name).read_bytes()
    before = STORE.manifest(2)
    assert (manifest.objects, manifest.ranks) == (before.objects, before.ranks)


def test_a_changed_byte_of_format_3_names_the_piece(tmp_path: Path) -> None:
    at = 4180  # of 28 rows of 4 bytes in `optimizer.rank-00000`
    shutil.copytree(format_3.FOLDER, tmp_path / "chk")
    store = CheckpointStore(tmp_path / "chk")
    path = store.path(2) / "optimizer.rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    tensors = store.manifest(2).file(path.name).tensors
    (hit,) = (t for t in tensors if t.offset <= at < t.offset + t.num_bytes)
    begin = (at - hit.offset) // hit.piece_bytes * hit.piece_bytes
    with pytest.raises(CorruptCheckpointError) as caught:
        store.verify(2)
    end = begin + hit.piece_bytes
    assert caught.value.check == f"digest of tensor {hit.name!r}, bytes {begin} to {end}"


def test_the_manifest_of_format_1_comes_out_as_it_was_written() -> None:
    store = CheckpointStore(format_2.SOURCE)
    data = (store.path(2) / "manifest.json").read_bytes()
    assert store.manifest(2).encode() == data
