"""Real ranks capture their parts, and restore them at a different world size or sharding."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from checkfreq.errors import StateError
from checkfreq.restore.apply import materialise
from checkfreq.types import Role
from tests.state import sharded
from tests.state.ranks import Manifest, part, restored, run_ranks
from tests.state.sharded import Language, Run
from tests.state.support import bits

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """By world: a checkpoint of a fully sharded run, its state then, and two updates later."""
    found = {}
    for world in (2, 4):
        results = run_ranks(tmp_path_factory.mktemp("trained"), world, sharded.train_and_capture)
        parts, thens, laters = zip(*results, strict=True)
        assert all(then == thens[0] for then in thens)
        found[world] = (Manifest.merged(parts), thens[0], laters[0])
    return found


@pytest.mark.parametrize("fresh", [True, False])
def test_two_ranks_continue_bit_for_bit_where_two_ranks_were(
    trained: dict[int, Any], tmp_path: Path, fresh: bool
) -> None:
    manifest, then, later = trained[2]
    results = run_ranks(tmp_path, 2, _restore(fresh), manifest)
    for rank, (restored_, continued, needed) in enumerate(results):
        assert restored_ == then
        assert continued == later
        others = {n for n in needed if ".rank-" in n and f".rank-{rank:05d}" not in n}
        assert not others


def _restore(fresh: bool) -> Any:
    return _restore_fresh if fresh else _restore_used


def _restore_fresh(role: Role, manifest: Manifest) -> Any:
    return sharded.restore_and_train(role, manifest, fresh=True)


def _restore_used(role: Role, manifest: Manifest) -> Any:
    return sharded.restore_and_train(role, manifest, fresh=False)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 4), (4, 2)])
def test_a_different_world_size_restores_the_same_whole_state(
    trained: dict[int, Any], tmp_path: Path, before: int, after: int
) -> None:
    manifest, then, _ = trained[before]
    for restored_, _, _ in run_ranks(tmp_path, after, _restore_fresh, manifest):
        assert restored_ == then


def test_a_plain_model_restores_what_was_sharded(trained: dict[int, Any]) -> None:
    manifest, then, _ = trained[4]
    run = Run(Language(), Role())
    restored(run.chk, manifest, 0)
    assert run.full() == then


def test_whole_tensors_are_assembled_without_training_code(
    trained: dict[int, Any],
) -> None:
    manifest, then, _ = trained[4]
    found = materialise(manifest.loaded(), path="p")
    assert found["model"]["head.weight"] is found["model"]["embed.weight"]
    assert {n: bits(t) for n, t in found["model"].items()} == then["model"]
    plain = Run(Language(), Role())
    plain.optimizer.load_state_dict(found["optimizer"])
    plain.model.load_state_dict(found["model"])
    assert plain.full() == then


def test_ranks_restore_what_one_process_wrote(tmp_path: Path) -> None:
    run = Run(Language(), Role())
    run.step()
    one = part(run.chk, Role())
    manifest = Manifest(one.objects, {}, one.files)
    for then, _, _ in run_ranks(tmp_path, 2, _restore_fresh, manifest):
        assert then == run.full()


def test_gathered_parameters_are_shards_again_before_they_are_read(
    trained: dict[int, Any], tmp_path: Path
) -> None:
    manifest, then, _ = trained[2]
    results = run_ranks(tmp_path, 2, sharded.restore_after_a_look, manifest)
    assert all(found == then for found, _ in results)
    again = Manifest.merged([taken for _, taken in results])
    model = materialise(again.loaded(), path="p")["model"]
    assert {name: bits(tensor) for name, tensor in model.items()} == then["model"]


def test_a_model_made_on_the_meta_device_is_restored(
    trained: dict[int, Any], tmp_path: Path
) -> None:
    manifest, then, _ = trained[4]
    for found in run_ranks(tmp_path, 2, sharded.restore_into_meta, manifest):
        assert found == then


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> tuple[Manifest, Any]:
    """A dict and an object with DTensors of every kind, of four ranks."""
    folder = tmp_path_factory.mktemp("kinds")
    parts, wholes = zip(*run_ranks(folder, 4, sharded.capture_kinds), strict=True)
    return Manifest.merged(parts), wholes[0]


@pytest.mark.parametrize(("world", "turned"), [(4, False), (4, True), (2, True), (1, False)])
def test_dtensors_of_every_kind_come_back_with_a_different_sharding(
    kinds: tuple[Manifest, Any], tmp_path: Path, world: int, turned: bool
) -> None:
    manifest, expected = kinds
    program = _restore_turned if turned else _restore_straight
    for rank, (state, held, needed) in enumerate(run_ranks(tmp_path, world, program, manifest)):
        assert state == expected
        assert held == expected
        if (world, turned, rank) == (4, False, 0):
            assert "state.rank-00000.safetensors" in needed
            assert "rng.rank-00001.safetensors" not in needed


def _restore_straight(role: Role, manifest: Manifest) -> Any:
    return sharded.restore_kinds(role, manifest, turned=False)


def _restore_turned(role: Role, manifest: Manifest) -> Any:
    return sharded.restore_kinds(role, manifest, turned=True)


def test_dtensors_of_every_kind_come_back_whole(kinds: tuple[Manifest, Any]) -> None:
    manifest, expected = kinds
    state = materialise(manifest.loaded(), path="p")["state"]
    assert bits(state) == expected
    assert state["tied"] is state["twin"]


def test_every_box_is_written_once_whatever_its_replicas(
    kinds: tuple[Manifest, Any],
) -> None:
    manifest, _ = kinds
    covered: dict[str, int] = {}
    shapes: dict[str, list[int]] = {}
    for rank, own in manifest.ranks.items():
        (file,) = [f for f in manifest.files if f.name == f"state.rank-{rank:05d}.safetensors"]
        assert {record.name for record in file.tensors} == {*own["state"]["shards"]}
        for record in file.tensors:
            shapes[record.name] = own["state"]["shards"][record.name][0]
            covered[record.name] = covered.get(record.name, 0) + torch.Size(record.shape).numel()
    assert covered == {key: torch.Size(shape).numel() for key, shape in shapes.items()}
    (whole,) = [f for f in manifest.files if f.name == "state.safetensors"]
    assert {record.name for record in whole.tensors} == {"plain", "replicated", "scalar", "nothing"}
    assert "twin" not in covered


@pytest.mark.parametrize("kind", ["2d", "hsdp", "tp"])
def test_two_dimensions_come_back_on_one_and_on_none(tmp_path: Path, kind: str) -> None:
    results = run_ranks(tmp_path, 4, sharded.capture_two_dimensions, kind)
    manifest, expected = Manifest.merged([taken for taken, _ in results]), results[0][1]
    run = Run(Language(hidden=8), Role())
    restored(run.chk, manifest, 0)
    assert run.full() == expected
    for found in run_ranks(tmp_path, 2, sharded.restore_tensor_parallel, manifest):
        assert found == expected


@pytest.fixture(scope="module")
def distributed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Manifest, list[Any]]:
    """A data parallel run of two ranks without broadcast buffers, and what each had."""
    results = run_ranks(tmp_path_factory.mktemp("ddp"), 2, sharded.capture_ddp)
    return Manifest.merged([taken for taken, _ in results]), [state for _, state in results]


def test_buffers_that_are_not_broadcast_and_declared_objects_are_kept_for_each_rank(
    distributed: tuple[Manifest, list[Any]], tmp_path: Path
) -> None:
    manifest, expected = distributed
    assert expected[0] != expected[1]
    for rank, (before, after, (mine, alls)) in enumerate(
        run_ranks(tmp_path, 2, sharded.restore_ddp, manifest)
    ):
        assert before != expected[rank]
        assert after == expected[rank]
        assert mine == {"train": {"at": rank}}
        assert alls == {0: {"train": {"at": 0}}, 1: {"train": {"at": 1}}}


def test_a_new_rank_keeps_its_per_rank_state_and_takes_the_first_ranks_buffers(
    distributed: tuple[Manifest, list[Any]], tmp_path: Path
) -> None:
    manifest, expected = distributed
    results = run_ranks(tmp_path, 3, sharded.restore_ddp, manifest)
    assert [after for _, after, _ in results[:2]] == expected
    before, after, (mine, _) = results[2]
    assert mine == {"train": {"at": 0}}
    for name in ("meters", "rng"):
        assert after[name] == before[name]
    for name, value in after["model"].items():
        assert value == expected[0]["model"][name]


def test_one_process_restores_the_first_ranks_state(
    distributed: tuple[Manifest, list[Any]],
) -> None:
    manifest, expected = distributed
    for rank in (0, 1):
        found = materialise(manifest.loaded(), path="p", rank=rank)
        assert bits(found["meters"]) == expected[rank]["meters"]
        assert bits(found["rng"]["torch"]) == expected[rank]["rng"]
        assert found["model"].keys() == {
            n.replace("net.module.", "net.") for n in expected[0]["model"]
        }
        for name, value in expected[rank]["model"].items():
            assert bits(found["model"][name.replace("net.module.", "net.")]) == value


def test_batch_norms_under_fully_shard_keep_each_ranks_statistics(tmp_path: Path) -> None:
    results = run_ranks(tmp_path, 2, sharded.capture_fsdp_batch_norm)
    manifest = Manifest.merged([taken for taken, _ in results])
    for rank, (_, expected) in enumerate(results):
        found = materialise(manifest.loaded(), path="p", rank=rank)
        assert bits(found["model"]["layers.1.running_mean"]) == expected


def test_shards_in_a_different_nodes_directory_are_named(trained: dict[int, Any]) -> None:
    manifest, _, _ = trained[4]
    half = Manifest(
        manifest.objects,
        {rank: manifest.ranks[rank] for rank in (0, 1)},
        tuple(f for f in manifest.files if not re.search("rank-0000[23]", f.name)),
    )
    for only in ("model", "optimizer"):
        run = Run(Language(), Role())
        before = run.full()
        with pytest.raises(StateError, match=r"\.[a-z0-9_.]+: of its shape \[.*lacks \[.*nodes"):
            restored(run.chk, half, 0, only=only)
        assert run.full() == before
        with pytest.raises(StateError, match="directories of the other nodes"):
            materialise(half.loaded(), path="p", only=only)


def test_structures_are_equal_on_all_ranks_or_differ_by_name(tmp_path: Path) -> None:
    (first, one), (second, other) = run_ranks(tmp_path, 2, sharded.digests)
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, False, True]
    assert {name for name in one if one[name] != other[name]} == {"d.x"}
    assert one["d.x"] == "float32[8, 3]"
    assert one["d.s"] == other["d.s"]
    assert "float32[5, 2] (Shard(dim=0),) on a mesh of (2,)" in one["d.s"]


@pytest.mark.parametrize("world", [2, 3])
def test_state_is_not_cast_and_hooks_of_users_are_obeyed(tmp_path: Path, world: int) -> None:
    results = run_ranks(tmp_path, 2, sharded.capture_others)
    manifest = Manifest.merged([taken for taken, _ in results])
    for found in run_ranks(tmp_path, world, sharded.restore_others, manifest):
        assert found == results[0][1]


def test_what_cannot_be_kept_is_refused_by_name(tmp_path: Path) -> None:
    for partial, own, alone in run_ranks(tmp_path, 2, sharded.refused):
        assert re.match(r"d\.sum: a DTensor .*Partial.*redistribute\(\)", partial)
        assert re.match(r"per_rank= names m\.embed\.weight, which is a DTensor", own)
        assert re.match(r"d\.s: a DTensor of shape \[4\].* \[[02]:[24]\].*all ranks", alone)


def test_each_nodes_directory_holds_all_shards_if_each_node_does(tmp_path: Path) -> None:
    results = run_ranks(tmp_path, 4, sharded.capture_on_nodes)
    for node in (results[:2], results[2:]):
        run = Run(Language(), Role())
        restored(run.chk, Manifest.merged([taken for taken, _ in node]), node[0][0].rank)
        assert run.full() == results[0][1]


def test_shards_of_a_different_shape_are_a_mismatch_by_name(
    trained: dict[int, Any], tmp_path: Path
) -> None:
    manifest, _, _ = trained[4]
    for said in run_ranks(tmp_path, 2, sharded.restore_into_another_shape, manifest):
        expected = "blocks.0.up.weight: checkpoint has float32[9, 6], live is float32[12, 6]"
        assert expected in said


def test_parts_of_a_sharded_model_are_kept_as_shards_even_while_it_is_gathered(
    tmp_path: Path,
) -> None:
    results = run_ranks(tmp_path, 2, sharded.capture_inside_of_sharded)
    body, head = (Manifest.merged([result[i] for result in results]) for i in (0, 2))
    for rank, (_, expected, _) in enumerate(results):
        found = {
            f"{name}.{key}": tensor
            for name, manifest in (("body", body), ("head", head))
            for key, tensor in materialise(manifest.loaded(), path="p", rank=rank)[name].items()
        }
        for name in ("body.0.weight", "body.1.running_mean", "head.weight", "head.bias"):
            assert bits(found[name]) == expected[name]
        assert {*body.ranks[rank]["body"]["shards"]} >= {"0.weight", "1.weight"}
        assert "weight" in head.ranks[rank]["head"]["shards"]


def test_shards_without_a_record_are_refused(tmp_path: Path) -> None:
    for said in run_ranks(tmp_path, 2, sharded.foreign_shards):
        *flat, zero = said
        assert [text[:3] for text in said] == ["m: ", "m: ", "m: ", "o: ", "o: "]
        assert all(
            "FullyShardedDataParallel" in text and "use fully_shard" in text for text in flat
        )
        assert "ZeroRedundancyOptimizer" in zero
        assert "use fully_shard" in zero


def test_an_optimizer_that_is_divided_is_refused_on_a_single_rank_too(tmp_path: Path) -> None:
    ((said,),) = run_ranks(tmp_path, 1, sharded.foreign_shards)
    assert "o: a ZeroRedundancyOptimizer" in said


def test_per_rank_buffers_are_found_whatever_hooks_call_them(tmp_path: Path) -> None:
    sharded_, data = run_ranks(tmp_path, 2, sharded.capture_renamed)[0]
    own = ["num_batches_tracked", "running_mean", "running_var"]
    assert sharded_ == [f"0.1.{name}" for name in own]
    assert data == [f"renamed.1.{name}" for name in own]


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Manifest, Any]:
    """DTensors in extra state, as a scalar, and as state of another shape than its parameter."""
    results = run_ranks(tmp_path_factory.mktemp("scaled"), 2, sharded.capture_scaled)
    return Manifest.merged([taken for taken, _ in results]), results[0][1]


@pytest.mark.parametrize("world", [1, 2, 3])
def test_state_that_was_a_dtensor_is_one_again_but_a_step_never_is(
    scaled: tuple[Manifest, Any], tmp_path: Path, world: int
) -> None:
    manifest, expected = scaled
    for found in run_ranks(tmp_path, world, sharded.restore_scaled, manifest):
        assert found == expected


def test_state_split_on_a_different_kind_of_mesh_is_a_mismatch(
    scaled: tuple[Manifest, Any], tmp_path: Path
) -> None:
    for said in run_ranks(tmp_path, 4, sharded.restore_rows_on_a_square, scaled[0]):
        assert re.search(r"rows\.state\.0\.row: checkpoint has it on a mesh of 1 dim.*step", said)


def test_tied_shards_without_elements_are_tied_on_all_ranks(tmp_path: Path) -> None:
    (one, keys), (other, nothing) = run_ranks(tmp_path, 2, sharded.digest_of_tied)
    assert one == other
    assert (keys, nothing) == (["a.weight"], [])


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (3, 2)])
def test_sharded_plain_and_per_rank_tensors_come_back_at_a_different_world_size(
    tmp_path: Path, before: int, after: int
) -> None:
    parts, common = zip(*run_ranks(tmp_path, before, sharded.capture_parted), strict=True)
    merged = Manifest.merged(parts)
    manifest = merged if before > 1 else Manifest(merged.objects, {}, merged.files)
    results = run_ranks(tmp_path, after, sharded.restore_parted, manifest)
    for rank, (found, own) in enumerate(results):
        assert found == common[0]
        assert own == [10.0 + rank if rank < before else 20.0 + rank] * len(own)
