"""Real ranks capture their parts, and restore them at a different world size or sharding.

What a number of ranks does, they do in one process group, one program after the other.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch

from checkfreq.errors import MismatchError, StateError
from checkfreq.restore.apply import materialise
from checkfreq.types import Role
from tests.state import sharded
from tests.state.ranks import Manifest, part, restored, run_ranks
from tests.state.sharded import Language, Run
from tests.state.support import bits

pytestmark = pytest.mark.dist

#: What each rank returned, by the name of the program.
Results = dict[str, list[Any]]
TWO_DIMENSIONS = ("2d", "hsdp", "tp")
MADE = {
    "others": sharded.others,
    "scaled": sharded.scaled,
    "parted": sharded.parted,
}


def results_of(factory: pytest.TempPathFactory, world: int, **programs: Any) -> Results:
    found = run_ranks(factory.mktemp("ranks"), world, sharded.each, programs)
    return {name: [one[name] for one in found] for name in programs}


def merged(results: list[Any]) -> Manifest:
    """A checkpoint of the parts that come first in what the ranks returned."""
    return Manifest.merged([taken for taken, *_ in results])


def back(saved: Results, name: str) -> Any:
    return partial(sharded.restore_made, manifest=merged(saved[name]), make=MADE[name])


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Checkpoints of two ranks, each with the state that is to come back."""
    return results_of(
        tmp_path_factory,
        2,
        trained=sharded.capture_trained,
        optimizer=sharded.capture_optimizer,
        **{name: partial(sharded.capture_made, make=make) for name, make in MADE.items()},
        digests=sharded.digests,
        refused=sharded.refused,
    )


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Results:
    two_dimensions = {
        kind: partial(sharded.capture_two_dimensions, kind=kind) for kind in TWO_DIMENSIONS
    }
    return results_of(
        tmp_path_factory,
        4,
        kinds=sharded.capture_kinds,
        nodes=sharded.capture_on_nodes,
        **two_dimensions,
    )


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, two: Results, four: Results) -> Results:
    """Restored by one rank."""
    return results_of(
        tmp_path_factory,
        1,
        kinds=partial(sharded.restore_kinds, manifest=merged(four["kinds"]), turned=False),
        scaled=back(two, "scaled"),
    )


@pytest.fixture(scope="module")
def plain() -> tuple[Manifest, Any]:
    """A checkpoint of one process that shards nothing."""
    run = Run(Language(), Role())
    run.step()
    taken = part(run.chk, Role())
    return Manifest(taken.objects, {}, taken.files), run.full()


@pytest.fixture(scope="module")
def back_at_two(
    tmp_path_factory: pytest.TempPathFactory,
    two: Results,
    four: Results,
    plain: tuple[Manifest, Any],
) -> Results:
    trained, kinds = merged(two["trained"]), merged(four["kinds"])
    two_dimensions = {
        kind: partial(sharded.restore_tensor_parallel, manifest=merged(four[kind]))
        for kind in TWO_DIMENSIONS
    }
    return results_of(
        tmp_path_factory,
        2,
        plain=partial(sharded.restore_after_a_look, manifest=plain[0]),
        look=partial(sharded.restore_after_a_look, manifest=trained),
        kinds=partial(sharded.restore_kinds, manifest=kinds, turned=True),
        **two_dimensions,
    )


@pytest.fixture(scope="module")
def back_at_three(tmp_path_factory: pytest.TempPathFactory, two: Results) -> Results:
    return results_of(
        tmp_path_factory,
        3,
        optimizer=partial(sharded.restore_optimizer, manifest=merged(two["optimizer"])),
        **{name: back(two, name) for name in MADE},
    )


def test_a_plain_model_restores_what_was_sharded_and_shards_what_was_plain(
    two: Results, back_at_two: Results, plain: tuple[Manifest, Any]
) -> None:
    run = Run(Language(), Role())
    restored(run.chk, merged(two["trained"]), 0)
    assert run.full() == two["trained"][0][1]
    for found, *_ in back_at_two["plain"]:
        assert found == plain[1]
    wider = Run(Language(hidden=12), Role())
    has = r"blocks\.0\.up\.weight: checkpoint has float32\[9, 6\], live is float32\[12, 6\]"
    with pytest.raises(MismatchError, match=has):
        restored(wider.chk, merged(two["trained"]), 0)


def test_gathered_parameters_are_shards_again_before_they_are_read(
    two: Results, back_at_two: Results
) -> None:
    then = two["trained"][0][1]
    assert all(found == then for found, _ in back_at_two["look"])
    again = Manifest.merged([taken for _, taken in back_at_two["look"]])
    model = materialise(again.loaded(), path="p")["model"]
    assert {name: bits(tensor) for name, tensor in model.items()} == then["model"]


def test_dtensors_of_every_kind_come_back_with_a_different_sharding(
    one: Results, four: Results, back_at_two: Results
) -> None:
    expected = four["kinds"][0][1]
    for state, held, needed in (*one["kinds"], *back_at_two["kinds"]):
        assert state == held == expected
        assert "state.rank-00000.safetensors" in needed
        assert len([name for name in needed if name.startswith("rng.")]) == 1, "one rank's"


def test_every_box_is_written_once_whatever_its_replicas(four: Results) -> None:
    manifest = merged(four["kinds"])
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


@pytest.mark.parametrize("kind", TWO_DIMENSIONS)
def test_two_dimensions_come_back_on_one_and_on_none(
    four: Results, back_at_two: Results, kind: str
) -> None:
    expected = four[kind][0][1]
    run = Run(Language(hidden=8), Role())
    restored(run.chk, merged(four[kind]), 0)
    assert run.full() == expected
    assert back_at_two[kind] == [expected] * 2


def test_shards_in_a_different_nodes_directory_are_named(two: Results) -> None:
    manifest = merged(two["trained"])
    half = Manifest(
        manifest.objects,
        {0: manifest.ranks[0]},
        tuple(f for f in manifest.files if "rank-00001" not in f.name),
    )
    for only in ("model", "optimizer"):
        run = Run(Language(), Role())
        before = run.full()
        with pytest.raises(StateError, match=r"\.[a-z0-9_.]+: of its shape \[.*lacks \[.*nodes"):
            restored(run.chk, half, 0, only=only)
        assert run.full() == before
        with pytest.raises(StateError, match="directories of the other nodes"):
            materialise(half.loaded(), path="p", only=only)


def test_structures_are_equal_on_all_ranks_or_differ_by_name(two: Results) -> None:
    (first, one), (second, other) = two["digests"]
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, False, True]
    assert {name for name in one if one[name] != other[name]} == {"d.x"}
    assert one["d.x"] == "float32[8, 3]"
    assert one["d.s"] == other["d.s"]
    assert "float32[5, 2] (Shard(dim=0),) on a mesh of (2,)" in one["d.s"]


def test_state_is_not_cast_and_hooks_of_users_are_obeyed(
    two: Results, back_at_three: Results
) -> None:
    assert [after for _, after, _ in back_at_three["others"]] == [two["others"][0][1]] * 3


def test_what_cannot_be_kept_is_refused_by_name(two: Results) -> None:
    """Sums that are not reduced, own shards, a run that seems alone, shards without a record."""
    expected = (
        r"d\.sum: a DTensor .*Partial.*redistribute\(\)",
        r"per_rank= names m\.embed\.weight, which is a DTensor",
        r"d\.s: a DTensor of shape \[4\].* \[[02]:[24]\].*all ranks",
        r"m: .*FullyShardedDataParallel.*use fully_shard",
        r"m: .*FullyShardedDataParallel.*use fully_shard",
        r"o: .*FullyShardedDataParallel.*use fully_shard",
        r"o: a ZeroRedundancyOptimizer.*use fully_shard",
        r"o: a ZeroRedundancyOptimizer",
    )
    for found in two["refused"]:
        for text, pattern in zip(found, expected, strict=True):
            assert re.match(pattern, text, re.DOTALL)


def test_each_nodes_directory_holds_all_shards_if_each_node_does(four: Results) -> None:
    for node in (four["nodes"][:2], four["nodes"][2:]):
        run = Run(Language(), Role())
        restored(run.chk, merged(node), node[0][0].rank)
        assert run.full() == four["nodes"][0][1]


def test_parameters_that_only_an_optimizer_has_come_back_at_a_different_world_size(
    two: Results, back_at_three: Results
) -> None:
    """Those of a tracked module are left to it."""
    for _, beside_its_model, _ in two["optimizer"]:
        assert "parameters" not in beside_its_model.objects.get("optimizer", {})
    for whole in (expected := two["optimizer"][0][2], *back_at_three["optimizer"]):
        del whole["model"]["seen"]  # a buffer
    assert back_at_three["optimizer"] == [expected] * 3


def test_state_that_was_a_dtensor_is_one_again_but_a_step_never_is(
    two: Results, one: Results, back_at_three: Results
) -> None:
    expected = two["scaled"][0][1]
    for before, after, _ in (*one["scaled"], *back_at_three["scaled"]):
        assert before != after == expected


def test_sharded_plain_and_per_rank_tensors_come_back_at_a_different_world_size(
    two: Results, back_at_three: Results
) -> None:
    """A new rank keeps what was declared, and takes the first rank's statistics and position."""
    for rank, (_, (common, own, statistics), positions) in enumerate(back_at_three["parted"]):
        is_new = rank == 2
        assert common == two["parted"][0][1][0]
        assert own == [20.0 + rank if is_new else 10.0 + rank] * len(own)
        assert statistics == (10.0 if is_new else 10.0 + rank)
        assert positions == {"train": {"at": 0 if is_new else rank}}
