"""Groups of real ranks (gloo), each a forked process that runs one action of this module."""

from __future__ import annotations

import gc
import os
import pickle
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from checkfreq import CFCheckpoint, CFConfig, CFManager, CFMode, Directory
from checkfreq.integrations.dcp import CFStorageReader, CFStorageWriter
from tests.acceptance.ranks import Life, Rank, run_well
from tests.integrations.support import same

LIMIT_S = 240.0


def run(world: int, action: Callable[..., Any], *args: Any) -> list[Any]:
    """What ``action(*args)`` returned on each of ``world`` ranks; raises if one failed."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {"action": action, "args": args}
        heard = run_well(Life(_act, Path(folder), world, settings=settings))
    return [pickle.loads(one.last("returned")) for one in heard]


def _act(rank: Rank) -> None:
    warnings.simplefilter("ignore")
    os.environ["MASTER_ADDR"] = "localhost"  # async_save's process makes a group of its own
    if rank.world == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    found = rank.settings["action"](*rank.settings["args"])
    rank.send("returned", pickle.dumps(found))  # tensors by value


# State: the same numbers at every world size, divided in every way.


#: Content, and how it is divided in two ways.
TENSORS: dict[str, tuple[Tensor, Any, Any]] = {
    "rows": (torch.arange(35.0).reshape(7, 5), Shard(0), Shard(1)),  # no multiple of any world
    "few": (torch.arange(3, dtype=torch.bfloat16), Shard(0), Replicate()),  # fewer than ranks
    "copied": (torch.arange(6.0), Replicate(), Shard(0)),
    "scalar": (torch.tensor(4.5), Replicate(), Replicate()),
    "none": (torch.empty(0, 3), Shard(0), Shard(0)),
}


def state(*, ways: int = 0) -> dict[str, Any]:
    """DTensors beside what every rank has; ``ways`` picks how they are divided."""
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    found: dict[str, Any] = {
        "sharded": {
            name: distribute_tensor(whole, mesh, [places[ways]], src_data_rank=None)
            for name, (whole, *places) in TENSORS.items()
        },
        "plain": {"weight": torch.arange(12.0).reshape(3, 4), "number": 3, "list": [1, "two"]},
    }
    how: list[Any] = [Shard(0)]
    if world == 4:
        mesh = init_device_mesh("cpu", (2, 2))
        how = [Shard(0), Shard(1)] if ways else [Replicate(), Shard(0)]
    grid = torch.arange(48.0).reshape(8, 6)
    return {**found, "grid": distribute_tensor(grid, mesh, how, src_data_rank=None)}


def emptied(value: Any) -> Any:
    """The same tree with zeros and without values."""
    if isinstance(value, Tensor):
        return torch.zeros_like(value)
    return {key: emptied(item) for key, item in value.items()} if isinstance(value, dict) else None


def whole(value: Any) -> Any:
    """The same tree with whole tensors in the places of DTensors."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    return {key: whole(item) for key, item in value.items()} if isinstance(value, dict) else value


def save_state(chk_dir: Path) -> None:
    """One checkpoint of `state`."""
    dcp.save(state(), storage_writer=CFStorageWriter(chk_dir, step=1))


def load_state(chk_dir: Path, ways: int) -> bool:
    """Whether the state comes back, divided in other ways."""
    wanted = state(ways=ways)
    found = emptied(wanted)
    dcp.load(found, storage_reader=CFStorageReader(chk_dir, trust_pickle=True))
    return same(whole(found), whole(wanted))


def load_both_ways(chk_dir: Path) -> bool:
    """`load_state`, twice."""
    return load_state(chk_dir, ways=0) and load_state(chk_dir, ways=1)


# Training, sharded by FSDP2.


def layers() -> nn.Sequential:
    """Linear ones, and one with buffers."""
    return nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, 3))


def sharded_model(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and its AdamW after one update."""
    torch.manual_seed(seed)
    model = layers()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(4, 6)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def full_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The whole state by names, on every rank."""
    options = StateDictOptions(full_state_dict=True)
    return {
        "model": get_model_state_dict(model, options=options),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }


def save_training(chk_dir: Path) -> dict[str, Any]:
    """Save an FSDP2 model and its optimizer as torch's tutorial does; the whole state."""
    model, optimizer = sharded_model(0)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save(
        {"model": model_state, "optimizer": optimizer_state},
        storage_writer=CFStorageWriter(chk_dir, step=1),
    )
    return full_state(model, optimizer)


def load_training(
    chk_dir: Path, parameter_names: dict[str, list[str]] | None = None
) -> dict[str, Any]:
    """Load it into another one, sharded over this world; the whole state."""
    model, optimizer = sharded_model(1)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    found = {"model": model_state, "optimizer": optimizer_state}
    reader = CFStorageReader(chk_dir, parameter_names=parameter_names, trust_pickle=True)
    dcp.load(found, storage_reader=reader)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=found["model"],
        optim_state_dict=found["optimizer"],
    )
    return full_state(model, optimizer)


def save_as_manager(chk_dir: Path) -> dict[str, Any]:
    """The same by a manager of these ranks; the whole state."""
    model, optimizer = sharded_model(0)
    note = {"rank": dist.get_rank()}
    chk = CFCheckpoint(model=model, optimizer=optimizer, note=note, per_rank=("note",))
    config = CFConfig(split_replicated=True, directory=Directory.SHARED)
    with CFManager(chk_dir, chk, mode=CFMode.MANUAL, chk_freq=0, config=config) as manager:
        manager.step()
        manager.save(wait=True)
    return full_state(model, optimizer)


def load_note(chk_dir: Path) -> Any:
    """What this rank gets of an object that differs from rank to rank."""
    found = {"note": {"rank": None}}
    dcp.load(found, storage_reader=CFStorageReader(chk_dir, trust_pickle=True))
    return found["note"]["rank"]


# Other ways to call, and what goes wrong.


def save_in_background(chk_dir: Path, kind: str) -> bool:
    """async_save, and whether what it wrote is right."""
    future: Any = dcp.async_save(
        state(),
        storage_writer=CFStorageWriter(chk_dir, step=1),
        async_checkpointer_type=AsyncCheckpointerType[kind],
    )
    future.result(timeout=LIMIT_S)
    dist.barrier()
    found = emptied(state())
    dcp.load(found, storage_reader=CFStorageReader(chk_dir, trust_pickle=True))
    return same(whole(found), whole(state()))


def save_different_steps(chk_dir: Path) -> dict[int, str]:
    """Errors by rank of a save that cannot succeed."""
    writer = CFStorageWriter(chk_dir, step=1 + dist.get_rank())
    return failures_of(lambda: dcp.save(state(), storage_writer=writer))


def save_after_a_failure(chk_dir: Path) -> list[dict[int, str]]:
    """A save that fails on rank 1 alone, then one that succeeds, whenever garbage is collected."""
    gc.disable()
    wrong = {"a": torch.ones(2), "b": torch.ones(2)}
    if dist.get_rank():
        wrong["b"] = wrong["b"].to_sparse()
    first = failures_of(lambda: dcp.save(wrong, storage_writer=CFStorageWriter(chk_dir, step=1)))
    return [first, failures_of(lambda: save_state(chk_dir))]


def failures_of(do: Callable[[], Any]) -> dict[int, str]:
    """Errors by rank."""
    try:
        do()
    except CheckpointException as error:
        return {r: f"{type(e).__name__}: {e}" for r, (e, _) in error.failures.items()}
    return {}
