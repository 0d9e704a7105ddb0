"""The private names of torch, DALI, NumPy and Python that checkfreq relies on: all are here.

``private_names.json`` says of each which file uses it, what breaks without it, and what to do when
a new version has it no longer. Here each is used as we do.
"""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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


# ---- torch: modules


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


def _module_has(name: str, *keys: str) -> Callable[[], bool]:
    """A dict with these keys, or with one entry that torch numbers."""

    def there() -> bool:
        found = getattr(Hooked(), name)
        return set(keys) <= set(found) if keys else len(found) == 1

    return there


def _is_a_method_of_modules(name: str) -> Callable[[], bool]:
    return lambda: getattr(nn.Linear, name).__module__.startswith("torch.nn.")


# ---- torch: optimizers, schedulers, scaler


def _optimizer_has(name: str) -> Callable[[], bool]:
    def there() -> bool:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
        optimizer.register_step_pre_hook(lambda *_: None)
        optimizer.register_state_dict_pre_hook(lambda *_: None)
        optimizer.register_state_dict_post_hook(lambda *_: None)
        optimizer.register_load_state_dict_pre_hook(lambda *_: None)
        optimizer.register_load_state_dict_post_hook(lambda *_: None)
        return len(vars(optimizer)[name]) == 1

    return there


def _scaler_has(name: str) -> Callable[[], bool]:
    return lambda: hasattr(torch.amp.GradScaler("cpu"), name)


def _sequential() -> SequentialLR:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    inner = [ConstantLR(optimizer), LambdaLR(optimizer, lambda _: 1.0)]
    return SequentialLR(optimizer, inner, milestones=[1])


# ---- torch: tensors and devices


def _copies_in_one_call() -> bool:
    targets = [torch.zeros(2), torch.zeros(1)]
    torch._foreach_copy_(targets, [torch.ones(2), torch.ones(1)], non_blocking=True)
    return all(bool((target == 1).all()) for target in targets)


def _counts_writes() -> bool:
    tensor = torch.zeros(1)
    before = tensor._version
    tensor.add_(1)
    return tensor._version > before


def _wraps_compiled_modules() -> bool:
    import torch._dynamo.eval_frame as frames

    compiled = torch.compile(nn.Identity())
    return isinstance(compiled, frames.OptimizedModule)


# ---- torch: ranks and shards


def _marks_flat_parameters() -> bool:
    from torch.distributed.fsdp._common_utils import FSDP_FLATTENED

    return bool(FSDP_FLATTENED == "_fsdp_flattened")


def _knows_its_shard() -> bool:
    from torch.distributed.tensor import Replicate, distribute_tensor

    with process_group():
        mesh = dist.init_device_mesh("cpu", (1,))
        tensor: Any = distribute_tensor(torch.ones(2), mesh, [Replicate()])
        (chunk,) = tensor.__create_chunk_list__()
        return tuple(chunk.sizes) == tuple(tensor._local_tensor.shape) == (2,)


def _mesh_has_a_layout() -> bool:
    with process_group():
        mesh: Any = dist.init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))["b"]
        return tuple(mesh._layout.remap_to_tensor(mesh._rank_map).shape[1:]) == (1,)


def _knows_who_shards() -> bool:
    from torch.distributed.fsdp import fully_shard

    with process_group():
        model = fully_shard(nn.Linear(2, 2), mesh=dist.init_device_mesh("cpu", (1,)))
        import torch.distributed._composable_state as states

        return model in states._module_state_mapping


def _hooks_of_fully_shard_are_known() -> bool:
    from torch.distributed.fsdp import fully_shard

    with process_group():
        model = fully_shard(nn.Linear(2, 2), mesh=dist.init_device_mesh("cpu", (1,)))
        model(torch.ones(1, 2))
        modules = [hook.__module__ for hook in model._state_dict_pre_hooks.values()]
    prefix = "torch.distributed.fsdp._fully_shard."
    return bool(modules) and all(module.startswith(prefix) for module in modules)


def _has_a_default_store() -> bool:
    with process_group():
        return isinstance(dist.distributed_c10d._get_default_store(), dist.Store)


# ---- torch: loaders


def _loader_has(name: str) -> Callable[[], bool]:
    return lambda: hasattr(DataLoader, name)


def _iterators_have_a_flag() -> bool:
    batches: Any = iter(DataLoader(range(2), num_workers=1))  # type: ignore[arg-type]
    was_on = batches._shutdown
    batches._shutdown_workers()
    return was_on is False and batches._shutdown is True


def _workers_are_forgotten() -> bool:
    batches: Any = iter(DataLoader(range(2), num_workers=1))  # type: ignore[arg-type]
    was_watched = batches._worker_pids_set
    signal_handling._remove_worker_pids(id(batches))
    batches._worker_pids_set = False
    (worker,) = batches._workers
    worker.kill()
    worker.join()
    batches._shutdown_workers()
    return was_watched is True


# ---- torch: tensors that are made of others, and files of DCP


def _quantized() -> bool:
    made = torch._empty_affine_quantized([2], scale=1.0, zero_point=0, dtype=torch.qint8)
    scales, zeros = torch.ones(2), torch.zeros(2, dtype=torch.int64)
    rows = torch._empty_per_channel_affine_quantized(
        [2], scales=scales, zero_points=zeros, axis=0, dtype=torch.qint8
    )
    return made.is_quantized and rows.is_quantized


def _nested() -> bool:
    made = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    described = (made._nested_tensor_size(), made._nested_tensor_strides())
    values, offsets = torch.ones(3), made._nested_tensor_storage_offsets()
    again = torch._nested_view_from_buffer(values, *described, offsets)
    return bool(again.is_nested and again.size(0) == 2)


def _jagged() -> bool:
    rows = [torch.ones(1), torch.ones(2)]
    made: Any = torch.nested.nested_tensor(rows, layout=torch.jagged)
    lengths = (made._maybe_min_seqlen, made._maybe_max_seqlen)
    return len(lengths) == 2 and made._ragged_idx == 1 and isinstance(made._metadata_cache, dict)


def _sparse() -> bool:
    made = torch.ones(2).to_sparse()
    return made._indices().shape == (1, 2) and made._coalesced_(False) is made


def _dcp_says_where() -> bool:
    from torch.distributed.checkpoint import filesystem

    return hasattr(filesystem, "_StorageInfo")


def _layouts_have_names() -> bool:
    from torch.serialization import _get_layout

    return _get_layout("torch.strided") is torch.strided


# ---- NumPy and Python


def _machine_is_in_python() -> bool:
    from pickle import BUILD, _Unpickler

    return callable(_Unpickler.dispatch[BUILD[0]]) and callable(_Unpickler.pop_mark)


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


def _base_of_iterators(made: Made) -> bool:
    from nvidia.dali.plugin import base_iterator

    return isinstance(made.iterator, base_iterator._DaliBaseIterator)


#: By name: whether it is here, and still means the same when it is used as we do.
THERE: dict[str, Callable[[], object]] = {
    "_modules": _module_has("_modules", "inner"),
    "_parameters": _module_has("_parameters", "weight"),
    "_buffers": _module_has("_buffers", "kept"),
    "_non_persistent_buffers_set": _module_has("_non_persistent_buffers_set", "left_out"),
    "_state_dict_hooks": _module_has("_state_dict_hooks"),
    "_state_dict_pre_hooks": _module_has("_state_dict_pre_hooks"),
    "_load_state_dict_pre_hooks": _module_has("_load_state_dict_pre_hooks"),
    "_load_state_dict_post_hooks": _module_has("_load_state_dict_post_hooks"),
    "_save_to_state_dict": _is_a_method_of_modules("_save_to_state_dict"),
    "_load_from_state_dict": _is_a_method_of_modules("_load_from_state_dict"),
    "_extra_state": lambda: "_extra_state" in Hooked().state_dict(),
    "_NormBase": lambda: issubclass(nn.BatchNorm3d, nn.modules.batchnorm._NormBase),
    **{
        f"_optimizer_{what}_hooks": _optimizer_has(f"_optimizer_{what}_hooks")
        for what in ("state_dict_pre", "state_dict_post", "load_state_dict_pre")
    },
    "_optimizer_load_state_dict_post_hooks": _optimizer_has(
        "_optimizer_load_state_dict_post_hooks"
    ),
    "_optimizer_step_pre_hooks": _optimizer_has("_optimizer_step_pre_hooks"),
    "_schedulers": lambda: (
        len(_sequential().state_dict()["_schedulers"]) == len(_sequential()._schedulers)
    ),
    **{
        name: _scaler_has(name)
        for name in ("_scale", "_init_scale", "_growth_tracker", "_init_growth_tracker")
    },
    "_growth_factor": lambda: all(
        hasattr(torch.amp.GradScaler("cpu"), f"_{key}")
        for key in ("growth_factor", "backoff_factor", "growth_interval")
    ),
    "_foreach_copy_": _copies_in_one_call,
    "_version": _counts_writes,
    "_cdata": lambda: torch.zeros(2)[1:].untyped_storage()._cdata != 0,
    "_python_dispatch": lambda: (
        not torch.utils._python_dispatch.is_traceable_wrapper_subclass(torch.zeros(1))
    ),
    "_C": lambda: torch._C,
    "_get_privateuse1_backend_name": lambda: isinstance(
        torch._C._get_privateuse1_backend_name(), str
    ),
    "_cuda_hasPrimaryContext": lambda: (
        torch.version.cuda is None or callable(torch._C._cuda_hasPrimaryContext)
    ),
    "torch._dynamo": lambda: __import__("torch._dynamo"),
    "torch._dynamo.eval_frame": _wraps_compiled_modules,
    "_orig_mod": lambda: "_orig_mod" in torch.compile(nn.Identity())._modules,
    "_use_new_zipfile_serialization": lambda: (
        "_use_new_zipfile_serialization" in inspect.signature(torch.save).parameters
    ),
    "_disable_byteorder_record": lambda: (
        "_disable_byteorder_record" in inspect.signature(torch.save).parameters
    ),
    "_get_default_store": _has_a_default_store,
    "_local_tensor": _knows_its_shard,
    "_layout": _mesh_has_a_layout,
    "_rank_map": _mesh_has_a_layout,
    "torch.distributed._composable_state": _knows_who_shards,
    "_module_state_mapping": _knows_who_shards,
    "torch.distributed.fsdp._fully_shard.": _hooks_of_fully_shard_are_known,
    "_fsdp_flattened": _marks_flat_parameters,
    **{name: _loader_has(name) for name in ("_get_iterator", "_index_sampler", "_auto_collation")},
    "_shutdown": _iterators_have_a_flag,
    **dict.fromkeys(
        ("_workers", "_worker_pids_set", "_remove_worker_pids"), _workers_are_forgotten
    ),
    **dict.fromkeys(("_empty_affine_quantized", "_empty_per_channel_affine_quantized"), _quantized),
    **dict.fromkeys(("_nested_tensor_size", "_nested_tensor_strides"), _nested),
    **dict.fromkeys(("_nested_tensor_storage_offsets", "_nested_view_from_buffer"), _nested),
    **dict.fromkeys(("_maybe_max_seqlen", "_maybe_min_seqlen"), _jagged),
    **dict.fromkeys(("_metadata_cache", "_ragged_idx"), _jagged),
    **dict.fromkeys(("_coalesced_", "_indices"), _sparse),
    "_StorageInfo": _dcp_says_where,
    "torch.serialization._get_layout": _layouts_have_names,
    "_rand": lambda: isinstance(np.random.mtrand._rand, np.random.RandomState),
    "_bit_generator": lambda: callable(type(np.random.mtrand._rand._bit_generator)),
    "_run_module_as_main": lambda: callable(__import__("runpy")._run_module_as_main),
    "_Unpickler": _machine_is_in_python,
}

#: Those of DALI, tried on what is ``Made``.
THERE_IN_DALI: dict[str, Callable[[Made], object]] = {
    "_DaliBaseIterator": _base_of_iterators,
    "_pipes": lambda made: list(made.iterator._pipes) == [made.pipeline],
    "_ops": lambda made: made.reader,
    "_op": lambda made: made.reader._op.schema.Name() == "readers__File",
    "_init_args": lambda made: made.reader._op._init_args["pad_last_batch"] is True,
    "_call_args": lambda made: isinstance(made.reader._op._call_args, dict),
    "_group": lambda made: (
        callable(made.source._group.callback) and made.source._group.source_desc.kind
    ),
    "_enable_checkpointing": lambda made: made.pipeline._enable_checkpointing is True,
    "_reader_name": lambda made: made.iterator._reader_name == "Reader",
    "_last_batch_policy": lambda made: made.iterator._last_batch_policy.name == "PARTIAL",
    "_first_batch": lambda made: hasattr(made.fed_iterator, "_first_batch"),
    "_batches_to_consume": lambda made: isinstance(made.fed._batches_to_consume, int),
    "_consumer_iter": lambda made: isinstance(made.pipeline._consumer_iter, int),
    "_counter": lambda made: isinstance(made.iterator._counter, int),
    "_graph_outputs": lambda made: len(made.pipeline._graph_outputs) == 2,
    "_output_index": lambda made: hasattr(made.fed._graph_outputs[0].source, "_output_index"),
}


@dataclass(frozen=True)
class PrivateName:
    """One name of ``owner``. ``used``: a file of ours; ``breaks``: what goes wrong without it."""

    owner: str
    name: str
    used: str
    breaks: str
    instead: str


def listed() -> list[PrivateName]:
    """All of ``private_names.json``."""
    groups = json.loads(Path(__file__).with_suffix(".json").read_text())
    return [
        PrivateName(name=name, **{key: text for key, text in group.items() if key != "names"})
        for group in groups
        for name in group["names"]
    ]
