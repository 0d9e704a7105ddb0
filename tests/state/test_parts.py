"""Parts of the state, as computed in one process for every role."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from checkfreq.errors import ConfigError, CorruptCheckpointError
from checkfreq.restore.apply import materialise
from checkfreq.restore.load import load
from checkfreq.restore.needed_files import needed_files
from checkfreq.snapshot.digests import structure_digest, structure_listing
from checkfreq.state.capture import capture
from checkfreq.state.checkpoint import CFCheckpoint
from checkfreq.types import Role
from tests.fixtures.format_2 import FOLDER
from tests.state.ranks import Manifest, everyone, part, restored
from tests.state.support import bits, state_bits


class Net(nn.Module):
    """A parameter of many rows, tied ones, a scalar, buffers, a channels-last convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(40, 300)
        self.one = nn.Linear(8, 8, bias=False)
        self.other = nn.Linear(8, 8, bias=False)
        self.other.weight = self.one.weight
        self.conv = nn.Conv2d(3, 70, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.none = nn.Parameter(torch.empty(0, 3))


def run(seed: int, **options: Any) -> CFCheckpoint:
    torch.manual_seed(seed)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    for parameter in net.parameters():
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    return CFCheckpoint(model=net, optimizer=optimizer, run={"best": 0.1 * seed}, **options)


def parts_of(chk: CFCheckpoint, roles: list[Role]) -> Manifest:
    return Manifest.merged([part(chk, role) for role in roles])


def test_a_split_state_is_balanced_and_comes_back_bit_for_bit() -> None:
    chk, world = run(1), 3
    manifest = parts_of(chk, everyone(world, split=True))
    loads = [0] * world
    for file in manifest.files:
        rank = int(file.name.split("rank-")[1][:5]) if "rank-" in file.name else 0
        loads[rank] += sum(record.num_bytes for record in file.tensors)
    assert max(loads) < 1.25 * min(loads)
    for rank in (0, world - 1):
        other = run(2)
        restored(other, manifest, rank)
        assert state_bits(other) == state_bits(chk)
    whole = materialise(manifest.loaded(), path="p")
    assert {n: bits(t) for n, t in whole["model"].items()} == bits(
        dict(chk.tracked["model"].state_dict())
    )


def tuned(seed: int) -> CFCheckpoint:
    """A frozen base, tied to a head, beside what is trained; large enough for a file of its own."""
    torch.manual_seed(seed)
    net = nn.ModuleDict({"base": nn.Linear(600, 600), "head": nn.Linear(600, 600, bias=False)})
    net["base"].requires_grad_(False)
    net["head"].weight = net["base"].weight
    net["adapter"] = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(net["adapter"].parameters(), momentum=0.9)
    return CFCheckpoint(model=net, optimizer=optimizer)


def test_the_leader_writes_what_is_frozen_into_a_file_of_its_own_unless_it_is_divided() -> None:
    chk = tuned(1)
    manifest = parts_of(chk, everyone(2))
    found = {file.name: [record.name for record in file.tensors] for file in manifest.files}
    assert found["model.safetensors"] == ["adapter.weight", "adapter.bias"]
    assert found["model.frozen.safetensors"] == ["base.weight", "base.bias"]
    assert {name for name in found if "rank-" in name} == {
        f"rng.rank-{rank:05d}.safetensors" for rank in range(2)
    }
    for rank in (0, 1):
        other = tuned(2)
        restored(other, manifest, rank)
        assert state_bits(other) == state_bits(chk)
    whole = materialise(manifest.loaded(), path="p")
    assert bits(whole["model"]) == bits(dict(chk.tracked["model"].state_dict()))
    divided = parts_of(chk, everyone(2, split=True))
    assert not any("frozen" in file.name for file in divided.files)


def test_a_rank_with_nothing_but_positions_counts_as_new(
    caplog: pytest.LogCaptureFixture,
) -> None:
    chk = run(1, per_rank=("run", "model.norm"))
    places = {"train": {"at": 3}}
    one = part(chk, Role(0, 2, (0,)), positions=places)
    manifest = Manifest(one.objects, {0: one.own, 1: {"$positions": places}}, one.files)
    other = run(2, per_rank=("run", "model.norm"))
    torch.manual_seed(5)
    before = torch.get_rng_state()
    plan = restored(other, manifest, 1)
    assert plan.positions == places
    assert torch.equal(torch.get_rng_state(), before)
    assert other.tracked["run"] == {"best": 0.2}
    for text in ("model.norm.weight: each rank", "run (each rank", "rng (each rank"):
        assert text in caplog.text
    with pytest.raises(ConfigError, match="nothing of rank 1"):
        materialise(manifest.loaded(), path="p", rank=1)


def test_a_rank_needs_the_replicated_files_and_its_own() -> None:
    chk = run(1, per_rank="model.norm")
    manifest = parts_of(chk, everyone(2))
    for rank, role in enumerate(everyone(2)):
        other = {f"{name}.rank-{1 - rank:05d}.safetensors" for name in ("rng", "model")}
        assert needed_files(chk, manifest, role) == {f.name for f in manifest.files} - other
    alone = CFCheckpoint(model=chk.tracked["model"])
    assert "optimizer.rank-00001.safetensors" not in needed_files(alone, manifest, Role())


def test_structures_differ_by_names_dtypes_shapes_ties_and_classes() -> None:
    assert structure_digest(capture(run(1))) == "", "one rank has none to compare"
    x = torch.zeros(3)
    chk = CFCheckpoint(rng=False, d={"x": x, "y": x, "z": x.int()})
    assert structure_listing(capture(chk, role=Role(1, 2, (0, 1)))) == {
        "d": "builtins.dict",
        "d.x": "float32[3]",
        "d.y": "the same as x",
        "d.z": "int32[3]",
    }


@pytest.mark.parametrize(
    ("place", "check"),
    [("x", "box of"), ([[1], [9]], "box of"), ([[5000, 40], [0, 0]], "shards of")],
)
def test_malformed_shards_are_corruption(place: Any, check: str) -> None:
    manifest = parts_of(run(1), everyone(2, split=True))
    shards = manifest.ranks[1]["optimizer"]["shards"]
    shards[next(iter(shards))] = place
    with pytest.raises(CorruptCheckpointError, match=check):
        restored(run(2), manifest, 0)


def test_load_into_live_objects_uses_the_rank_that_is_asked_for() -> None:
    found = {}
    for rank in (0, 1):
        norm = nn.ModuleDict({"1": nn.BatchNorm1d(3)})
        loaded = load(FOLDER, only=("model",), into={"model": norm}, strict=False, rank=rank)
        found[rank] = bits(norm["1"].running_mean)
        assert found[rank] == bits(loaded["model"]["1.running_mean"])
    assert found[0] != found[1]
    before = bits(norm.state_dict())
    with pytest.raises(ConfigError, match=r"nothing of rank 2; expected one of 0, 1"):
        load(FOLDER, only=("model",), into={"model": norm}, strict=False, rank=2)
    assert bits(norm.state_dict()) == before


def test_whatever_decides_who_writes_a_tensor_is_part_of_the_structure() -> None:
    def digest(*, split: bool, **options: Any) -> str:
        role = Role(0, 2, (0, 1), split)
        return structure_digest(capture(run(1, **options), role=role))

    volatile = {"volatile": "model.wide"}
    assert digest(split=True) == digest(split=True)
    assert digest(split=True) != digest(split=True, **volatile)
    assert digest(split=False) == digest(split=False, **volatile)


@pytest.mark.more
def test_one_rank_needs_nothing_of_torch_distributed() -> None:
    """A second of imports is spared, and a torch that was built without it is enough."""
    code = (
        "import sys, torch\n"
        "before = {name for name in sys.modules if name.startswith('torch.distributed')}\n"
        "sys.modules.update({f'torch.distributed.{n}': None for n in ('tensor', 'checkpoint')})\n"
        "from checkfreq.state.checkpoint import CFCheckpoint\n"
        "from checkfreq.state.capture import capture\n"
        "import checkfreq.manager, checkfreq.restore.load\n"
        "chk = CFCheckpoint(model=torch.nn.Linear(2, 2), d={'x': torch.ones(1)})\n"
        "assert len(capture(chk).tensors) >= 3\n"
        "after = {name for name in sys.modules if name.startswith('torch.distributed')}\n"
        "assert {n for n in after - before if sys.modules[n] is not None} == set()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
