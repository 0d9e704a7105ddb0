"""The private names of torch, DALI, NumPy and Python that checkfreq relies on: all are here.

``private_names.json`` says of each which file uses it, what breaks without it, what to do when
a new version has it no longer, and how to see whether it is there: an expression over what is here,
which uses it as we do.
"""

from __future__ import annotations

import inspect  # noqa: F401, as others below: for the expressions
import itertools
import json
import pickle  # noqa: F401
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module  # noqa: F401
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, LambdaLR, SequentialLR
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling


@contextmanager
def process_group() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


# ---- torch: modules, optimizers, schedulers


class Hooked(nn.Module):
    """A module with one of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.inner = nn.Identity()
        self.register_buffer("kept", torch.zeros(1))
        self.register_buffer("left_out", torch.zeros(1), persistent=False)
        self.register_state_dict_post_hook(lambda *_: None)
        self.register_state_dict_pre_hook(lambda *_: None)
        self.register_load_state_dict_pre_hook(lambda *_: None)
        self.register_load_state_dict_post_hook(lambda *_: None)

    def get_extra_state(self) -> object:
        return 1


def hooked_optimizer() -> torch.optim.Optimizer:
    """An optimizer with one hook of each kind."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    optimizer.register_step_pre_hook(lambda *_: None)
    optimizer.register_state_dict_pre_hook(lambda *_: None)
    optimizer.register_state_dict_post_hook(lambda *_: None)
    optimizer.register_load_state_dict_pre_hook(lambda *_: None)
    optimizer.register_load_state_dict_post_hook(lambda *_: None)
    return optimizer


def sequential() -> SequentialLR:
    """A scheduler of two others."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    inner = [ConstantLR(optimizer), LambdaLR(optimizer, lambda _: 1.0)]
    return SequentialLR(optimizer, inner, milestones=[1])


# ---- torch: tensors


def copies_in_one_call() -> bool:
    targets = [torch.zeros(2), torch.zeros(1)]
    torch._foreach_copy_(targets, [torch.ones(2), torch.ones(1)], non_blocking=True)
    return all(bool((target == 1).all()) for target in targets)


# ---- torch: ranks and shards


def knows_its_shard() -> bool:
    from torch.distributed.tensor import Replicate, distribute_tensor

    with process_group():
        mesh = dist.init_device_mesh("cpu", (1,))
        tensor: Any = distribute_tensor(torch.ones(2), mesh, [Replicate()])
        (chunk,) = tensor.__create_chunk_list__()
        return tuple(chunk.sizes) == tuple(tensor._local_tensor.shape) == (2,)


def mesh_has_a_layout() -> bool:
    with process_group():
        mesh: Any = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))["b"]
        return tuple(mesh._layout.remap_to_tensor(mesh._rank_map).shape[1:]) == (1,)


def knows_who_shards() -> bool:
    from torch.distributed.fsdp import fully_shard

    with process_group():
        model = fully_shard(nn.Linear(2, 2), mesh=dist.init_device_mesh("cpu", (1,)))
        import torch.distributed._composable_state as states

        return model in states._module_state_mapping


def hooks_of_fully_shard_are_known() -> bool:
    from torch.distributed.fsdp import fully_shard

    with process_group():
        model = fully_shard(nn.Linear(2, 2), mesh=dist.init_device_mesh("cpu", (1,)))
        model(torch.ones(1, 2))
        modules = [hook.__module__ for hook in model._state_dict_pre_hooks.values()]
    prefix = "torch.distributed.fsdp._fully_shard."
    return bool(modules) and all(module.startswith(prefix) for module in modules)


def has_a_default_store() -> bool:
    with process_group():
        return isinstance(dist.distributed_c10d._get_default_store(), dist.Store)


# ---- torch: loaders


def iterators_have_a_flag() -> bool:
    batches: Any = iter(DataLoader(range(2), num_workers=1))  # type: ignore[arg-type]
    was_on = batches._shutdown
    batches._shutdown_workers()
    return was_on is False and batches._shutdown is True


def workers_are_forgotten() -> bool:
    batches: Any = iter(DataLoader(range(2), num_workers=1))  # type: ignore[arg-type]
    was_watched = batches._worker_pids_set
    signal_handling._remove_worker_pids(id(batches))
    batches._worker_pids_set = False
    (worker,) = batches._workers
    worker.kill()
    worker.join()
    batches._shutdown_workers()
    return was_watched is True


# ---- torch: tensors that are made of others


def quantized() -> bool:
    made = torch._empty_affine_quantized([2], scale=1.0, zero_point=0, dtype=torch.qint8)
    scales, zeros = torch.ones(2), torch.zeros(2, dtype=torch.int64)
    rows = torch._empty_per_channel_affine_quantized(
        [2], scales=scales, zero_points=zeros, axis=0, dtype=torch.qint8
    )
    return made.is_quantized and rows.is_quantized


def nested() -> bool:
    made = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    described = (made._nested_tensor_size(), made._nested_tensor_strides())
    values, offsets = torch.ones(3), made._nested_tensor_storage_offsets()
    again = torch._nested_view_from_buffer(values, *described, offsets)
    return bool(again.is_nested and again.size(0) == 2)


def jagged() -> bool:
    rows = [torch.ones(1), torch.ones(2)]
    made: Any = torch.nested.nested_tensor(rows, layout=torch.jagged)
    lengths = (made._maybe_min_seqlen, made._maybe_max_seqlen)
    return len(lengths) == 2 and made._ragged_idx == 1 and isinstance(made._metadata_cache, dict)


def sparse() -> bool:
    made = torch.ones(2).to_sparse()
    return made._indices().shape == (1, 2) and made._coalesced_(False) is made


# ---- DALI: made where it is installed


class Made:
    """A pipeline that checkpoints itself, one that is fed by a callable, and their iterators."""

    def __init__(self, files: list[str]) -> None:
        from nvidia.dali import fn, pipeline_def
        from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

        how = {"batch_size": 2, "num_threads": 1, "device_id": None}

        def read() -> Any:
            content, label = fn.readers.file(files=files, name="Reader", pad_last_batch=True)
            return content, label

        def fed() -> Any:
            count = itertools.count()
            return fn.external_source(lambda: np.full((2, 1), next(count)))

        self.pipeline = pipeline_def(read, enable_checkpointing=True, **how)()
        self.iterator: Any = DALIGenericIterator(
            self.pipeline,
            ["data", "label"],
            reader_name="Reader",
            last_batch_policy=LastBatchPolicy.PARTIAL,
        )
        self.fed = pipeline_def(fed, **how)()
        self.fed_iterator: Any = DALIGenericIterator(self.fed, ["data"])

    @property
    def reader(self) -> Any:
        (found,) = [op for op in self.pipeline._ops if op.name == "Reader"]
        return found

    @property
    def source(self) -> Any:
        (found,) = [op for op in self.fed._ops if hasattr(op, "_group")]
        return found


@dataclass(frozen=True)
class PrivateName:
    """One name of ``owner``. ``there``: an expression that says whether it is there and means what
    it did; ``used``: a file of ours; ``breaks``: what goes wrong without it.
    """

    owner: str
    name: str
    there: str
    used: str
    breaks: str
    instead: str

    def is_there(self, made: Made | None) -> bool:
        """Whether it is, with what of DALI was ``made``."""
        return bool(eval(self.there, {**globals(), "NAME": self.name, "made": made}))


def listed() -> list[PrivateName]:
    """All of ``private_names.json``."""
    groups = json.loads(Path(__file__).with_suffix(".json").read_text())
    return [PrivateName(name=name, **group) for group in groups for name in group.pop("names")]
