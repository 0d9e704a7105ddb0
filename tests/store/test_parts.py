"""Parts become one manifest, or an error that names the rank, what was expected and found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from checkfreq.errors import PersistError
from checkfreq.store.manifest import Manifest
from checkfreq.store.parts import (
    buffers_stem_of,
    decode_merged,
    file_name,
    frozen_stem_of,
    is_frozen_stem,
    is_stem_of_a_rank,
    merge,
    object_of,
    shared_files_of,
    stem_of,
    tied_names,
)
from tests.store.ranks import Share, shares


def manifests(world: int = 3, step: int = 5) -> list[Manifest]:
    return [share.manifest() for share in shares(step, world=world)]


def test_what_is_frozen_of_an_object_and_other_buffers_have_files_of_their_own() -> None:
    frozen, buffers = frozen_stem_of("model"), buffers_stem_of("model")
    assert file_name(frozen) == "model.frozen.safetensors"
    assert is_frozen_stem(frozen)
    assert not is_frozen_stem("model")
    assert file_name(buffers) == "model.buffers.safetensors"
    assert object_of(frozen) == object_of(buffers) == object_of("model") == "model"
    assert shared_files_of("model") == (file_name("model"), file_name(frozen), file_name(buffers))


def test_the_names_tied_to_a_key_come_from_what_is_shared_and_from_every_rank() -> None:
    shared = {"aliases": {"head": "embedding"}}
    owns = [{"m": {"aliases": {"tail": "embedding", "b": "a"}}}, {"other": {}}]
    assert tied_names(shared, "m", owns) == {"embedding": ["head", "tail"], "a": ["b"]}


def test_a_rank_that_comes_twice_or_has_a_file_of_another_is_refused() -> None:
    assert all(is_stem_of_a_rank(stem_of("model", rank)) for rank in (0, 7, 123456))
    assert not any(map(is_stem_of_a_rank, ("model", "model.rank-1", "model.rank-00001.x")))
    leader, one, two = manifests()
    with pytest.raises(PersistError, match="expected one part of rank 1, found two"):
        merge(leader, [one, one])
    with pytest.raises(PersistError, match="rank 2 wrote a file that is not its own"):
        merge(leader, [one, replace(two, files=one.files)])


def test_merging_puts_all_files_and_ranks_into_one_manifest() -> None:
    leader, *others = manifests()
    merged = merge(leader, others[::-1])
    assert list(merged.ranks) == [0, 1, 2]
    assert merged.objects == leader.objects
    assert [file.name for file in merged.files] == [
        "m.safetensors",
        *(f"{name}.rank-{rank:05d}.safetensors" for rank in (0, 2, 1) for name in ("m", "rng")),
    ]
    assert Manifest.decode(merged.encode(), path="m") == merged


@pytest.mark.parametrize(
    ("part", "said"),
    [
        (replace(manifests()[1], step=6), "rank 1 says step 6, expected 5"),
        (manifests()[2], r"rank 1 says ranks \[2\], expected \[1\]"),
        (replace(manifests()[1], objects={"m": 1}), r"rank 1 says objects \['m'\], expected \[\]"),
    ],
)
def test_a_part_of_something_else_is_refused(part: Manifest, said: str) -> None:
    leader = manifests()[0]
    with pytest.raises(PersistError, match=said) as caught:
        decode_merged(part.encode(), path="p", of=leader, rank=1)
    assert (caught.value.step, caught.value.phase) == (5, "parts")


def test_a_damaged_part_is_refused() -> None:
    leader, part, _ = manifests()
    assert decode_merged(part.encode(), path="p", of=leader, rank=1) == part
    damaged = part.encode().replace(b"seed", b"sead")
    with pytest.raises(PersistError, match="the part of rank 1 cannot be read: p: own digest"):
        decode_merged(damaged, path="p", of=leader, rank=1)


def set_shards(value: Any) -> Callable[[Share], None]:
    def change(share: Share) -> None:
        share.own["m"]["shards"] = value

    return change


def set_weight(*place: Any) -> Callable[[Share], None]:
    return set_shards({"weight": list(place)})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (set_shards({}), "'weight' of 'm': expected 12 elements .* found 8 from rank.* 0, 1"),
        (set_shards([]), "rank 2's 'm': shards: expected an object"),
        (set_shards({"other": [[3, 4], [0, 0]]}), "'other' of 'm': rank 2 .* found no such tensor"),
        (set_weight([3, 4], [1, 0]), r"once, found \[1, 4\] at \[1, 0\] of rank 1 and"),
        (set_weight([3, 4], [3, 0]), r"a box within \[3, 4\], found \[1, 4\] at \[3, 0\]"),
        (set_weight([4, 4], [2, 0]), r"as rank 0 says, found \[4, 4\] of rank 2"),
        (set_weight([3, 4]), r"'weight': expected \[\[global shape\], \[offsets\]\], found"),
        (set_weight([3, 4], [True, 0]), "expected .*global shape"),
        (set_weight([3, 4], "ab"), "expected .*global shape"),
        (set_shards({"weight": 5}), "rank 2's 'm': shard 'weight'"),
    ],
)
def test_shards_that_do_not_cover_are_refused(change: Callable[[Share], None], said: str) -> None:
    leader, one, two = shares()
    change(two)
    with pytest.raises(PersistError, match=said):
        merge(leader.manifest(), [one.manifest(), two.manifest()])


@pytest.mark.parametrize("file", shared_files_of("m"))
def test_a_tensor_that_is_there_whole_and_in_shards_is_refused(file: str) -> None:
    leader, one, two = shares()
    leader.files[file] = {"weight": ([1], b"x")}
    with pytest.raises(PersistError, match="'weight' of 'm': expected whole or in shards"):
        merge(leader.manifest(), [one.manifest(), two.manifest()])


def test_a_sharded_tensor_of_which_no_rank_has_anything_is_refused() -> None:
    leader, one, two = shares()
    sharded = {"weight": ["uint8", [3, 4]], "lost": ["uint8", [2]]}
    leader.objects = {"odd": 5, "m": {"sharded_tensors": sharded}}
    parts = [one.manifest(), two.manifest()]
    with pytest.raises(PersistError, match="'lost' of 'm': expected shards, found none from any"):
        merge(leader.manifest(), parts)
    assert merge(leader.manifest(), parts[:1]).objects == leader.objects  # the rest is elsewhere


def test_shards_of_different_dtypes_are_refused() -> None:
    leader, one, two = manifests()
    name = "m.rank-00002.safetensors"
    entry = two.file(name)
    signed = replace(entry, tensors=tuple(replace(t, dtype="int8") for t in entry.tensors))
    two = replace(two, files=(signed,))
    with pytest.raises(PersistError, match="dtype: expected uint8, as rank 0 says, found int8 of"):
        merge(leader, [one, two])


def test_shards_without_elements_and_tensors_without_dimensions_are_fine() -> None:
    leader, one, two = shares()
    two.files["m.rank-00002.safetensors"] = {"weight": ([0, 4], b"")}
    set_weight([2, 4], [2, 0])(two)
    for share in (leader, one):
        share.own["m"]["shards"]["weight"][0] = [2, 4]
    own = one.files["m.rank-00001.safetensors"]
    one.files["m.rank-00001.safetensors"] = {**own, "scale": ([], b"\1")}
    one.own["m"]["shards"]["scale"] = [[], []]
    assert merge(leader.manifest(), [one.manifest(), two.manifest()]).world == 3
