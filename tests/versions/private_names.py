"""The private names of torch, DALI, NumPy and Python that checkfreq relies on: all are here.

Each entry says which file uses the name, what breaks without it, and what to do when a new version
has it no longer. ``there`` uses the name as we do, and returns whether it still means the same.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import ConstantLR, LambdaLR, SequentialLR
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling


@dataclass(frozen=True)
class PrivateName:
    """One name of ``owner``. ``used``: a file of ours; ``breaks``: what goes wrong without it."""

    owner: str
    name: str
    used: str
    there: Callable[[], object]
    breaks: str
    instead: str


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


_HOOKS = "a module with such hooks would be saved or loaded without calling them"
_READ_HOOKS = "find where nn.Module keeps the hooks of its register_... method, and read them there"
MODULES = [
    PrivateName(
        "torch",
        "_modules",
        "checkfreq/state/names.py",
        _module_has("_modules", "inner"),
        "no module can be captured",
        "named_children() without duplicates is no replacement for a shared child: find the dict",
    ),
    PrivateName(
        "torch",
        "_parameters",
        "checkfreq/state/names.py",
        _module_has("_parameters", "weight"),
        "no module can be captured",
        "named_parameters(recurse=False, remove_duplicate=False), which is slower",
    ),
    PrivateName(
        "torch",
        "_buffers",
        "checkfreq/state/names.py",
        _module_has("_buffers", "kept"),
        "no module can be captured",
        "named_buffers(recurse=False, remove_duplicate=False), which is slower",
    ),
    PrivateName(
        "torch",
        "_non_persistent_buffers_set",
        "checkfreq/state/names.py",
        _module_has("_non_persistent_buffers_set", "left_out"),
        "buffers that state_dict() leaves out would be saved",
        "compare with the keys of state_dict() when the index of a module is made",
    ),
    PrivateName(
        "torch",
        "_state_dict_hooks",
        "checkfreq/state/names.py",
        _module_has("_state_dict_hooks"),
        _HOOKS,
        _READ_HOOKS,
    ),
    PrivateName(
        "torch",
        "_state_dict_pre_hooks",
        "checkfreq/state/names.py",
        _module_has("_state_dict_pre_hooks"),
        _HOOKS,
        _READ_HOOKS,
    ),
    PrivateName(
        "torch",
        "_load_state_dict_pre_hooks",
        "checkfreq/state/names.py",
        _module_has("_load_state_dict_pre_hooks"),
        _HOOKS,
        _READ_HOOKS,
    ),
    PrivateName(
        "torch",
        "_load_state_dict_post_hooks",
        "checkfreq/state/names.py",
        _module_has("_load_state_dict_post_hooks"),
        _HOOKS,
        _READ_HOOKS,
    ),
    PrivateName(
        "torch",
        "_save_to_state_dict",
        "checkfreq/state/names.py",
        _is_a_method_of_modules("_save_to_state_dict"),
        "a module that overrides it would be saved without it",
        "find what modules of torch.nn override now to save their own way",
    ),
    PrivateName(
        "torch",
        "_load_from_state_dict",
        "checkfreq/state/names.py",
        _is_a_method_of_modules("_load_from_state_dict"),
        "a module that overrides it would be loaded without it",
        "find what modules of torch.nn override now to load their own way",
    ),
    PrivateName(
        "torch",
        "_extra_state",
        "checkfreq/state/names.py",
        lambda: "_extra_state" in Hooked().state_dict(),
        "extra state would be read under another name than state_dict() gives it",
        "rename EXTRA_STATE for what is written, and read both",
    ),
    PrivateName(
        "torch",
        "_NormBase",
        "checkfreq/state/names.py",
        lambda: issubclass(nn.BatchNorm3d, nn.modules.batchnorm._NormBase),
        "checkfreq.state cannot be imported",
        "name the classes of torch.nn.modules.batchnorm and instancenorm one by one",
    ),
]

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


OPTIMIZERS = [
    *(
        PrivateName(
            "torch",
            f"_optimizer_{what}_hooks",
            "checkfreq/state/adapters/optimizer.py",
            _optimizer_has(f"_optimizer_{what}_hooks"),
            "an optimizer with such hooks would be saved or loaded without calling them",
            "find where Optimizer keeps the hooks of its register_... method, and read them there",
        )
        for what in ("state_dict_pre", "state_dict_post", "load_state_dict_pre")
    ),
    PrivateName(
        "torch",
        "_optimizer_load_state_dict_post_hooks",
        "checkfreq/state/adapters/optimizer.py",
        _optimizer_has("_optimizer_load_state_dict_post_hooks"),
        "an optimizer with such hooks would be loaded without calling them",
        "find where Optimizer keeps the hooks of its register_... method, and read them there",
    ),
    PrivateName(
        "torch",
        "_optimizer_step_pre_hooks",
        "checkfreq/state/wrappers.py",
        _optimizer_has("_optimizer_step_pre_hooks"),
        "every optimizer would be taken for a wrapper that was never initialised",
        "take another attribute that only Optimizer.__init__ sets",
    ),
    PrivateName(
        "torch",
        "_schedulers",
        "checkfreq/state/adapters/fitting.py",
        lambda: len(_sequential().state_dict()["_schedulers"]) == len(_sequential()._schedulers),
        "the schedulers inside a SequentialLR or ChainedScheduler would not be checked",
        "follow SequentialLR.state_dict() to the new name, and read both",
    ),
    *(
        PrivateName(
            "torch",
            name,
            "checkfreq/state/adapters/scaler.py",
            _scaler_has(name),
            "no GradScaler can be captured",
            "read get_scale() and state_dict(), which wait for the device",
        )
        for name in ("_scale", "_init_scale", "_growth_tracker", "_init_growth_tracker")
    ),
    PrivateName(
        "torch",
        "_growth_factor",
        "checkfreq/state/adapters/scaler.py",
        lambda: all(
            hasattr(torch.amp.GradScaler("cpu"), f"_{key}")
            for key in ("growth_factor", "backoff_factor", "growth_interval")
        ),
        "no GradScaler can be captured",
        "get_growth_factor(), get_backoff_factor() and get_growth_interval()",
    ),
]

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


TENSORS = [
    PrivateName(
        "torch",
        "_foreach_copy_",
        "checkfreq/snapshot/cuda.py",
        _copies_in_one_call,
        "snapshots on a GPU fail",
        "in pack(), copy each pair by itself",
    ),
    PrivateName(
        "torch",
        "_version",
        "checkfreq/state/gradients.py",
        _counts_writes,
        "writes under a copy, and gradients that were added to, would go unseen",
        "there is no public counter: compare bytes, as CFConfig(verify_settled=True) does",
    ),
    PrivateName(
        "torch",
        "_cdata",
        "checkfreq/state/collector.py",
        lambda: torch.zeros(2)[1:].untyped_storage()._cdata != 0,
        "empty shards cannot be told apart",
        "keep the storages themselves while a state is read, and compare their identity",
    ),
    PrivateName(
        "torch",
        "_python_dispatch",
        "checkfreq/state/tensors.py",
        lambda: not torch.utils._python_dispatch.is_traceable_wrapper_subclass(torch.zeros(1)),
        "tensors that wrap others would be captured as if they had memory",
        "look for __tensor_flatten__ and __tensor_unflatten__ on the class",
    ),
    PrivateName(
        "torch",
        "_C",
        "checkfreq/state/tensors.py",
        lambda: torch._C,
        "names of devices, and contexts on them, cannot be asked for",
        "see the two names of it that are used, which follow",
    ),
    PrivateName(
        "torch",
        "_get_privateuse1_backend_name",
        "checkfreq/state/tensors.py",
        lambda: isinstance(torch._C._get_privateuse1_backend_name(), str),
        "no checkpoint with a device that is not one of torch's can be read",
        "torch.utils.backend_registration tells the name if it was imported; or drop the case",
    ),
    PrivateName(
        "torch",
        "_cuda_hasPrimaryContext",
        "checkfreq/snapshot/cuda.py",
        lambda: torch.version.cuda is None or callable(torch._C._cuda_hasPrimaryContext),
        "on a machine with several GPUs only the current one is taken to be in use",
        "ask the driver (cuDevicePrimaryCtxGetState), through ctypes",
    ),
    PrivateName(
        "torch",
        "torch._dynamo",
        "checkfreq/supervisor/becoming.py",
        lambda: __import__("torch._dynamo"),
        "a standby imports less than it could, so a restart takes seconds longer",
        "import what the first optimizer of a script imports now",
    ),
    PrivateName(
        "torch",
        "torch._dynamo.eval_frame",
        "checkfreq/state/names.py",
        _wraps_compiled_modules,
        "names of compiled models begin with _orig_mod, and fit no uncompiled one",
        "find the class that torch.compile(module) returns now",
    ),
    PrivateName(
        "torch",
        "_orig_mod",
        "checkfreq/state/names.py",
        lambda: "_orig_mod" in torch.compile(nn.Identity())._modules,
        "names of compiled models fit no uncompiled one",
        "find the name under which the compiled module holds the other one",
    ),
    PrivateName(
        "torch",
        "_use_new_zipfile_serialization",
        "checkfreq/helpers/saving.py",
        lambda: "_use_new_zipfile_serialization" in inspect.signature(torch.save).parameters,
        "atomic_save() fails",
        "pass the argument on only if it was given",
    ),
    PrivateName(
        "torch",
        "_disable_byteorder_record",
        "checkfreq/helpers/saving.py",
        lambda: "_disable_byteorder_record" in inspect.signature(torch.save).parameters,
        "atomic_save() fails",
        "pass the argument on only if it was given",
    ),
]

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


RANKS = [
    PrivateName(
        "torch",
        "_get_default_store",
        "checkfreq/ranks/meetings.py",
        _has_a_default_store,
        "nothing works on more than one rank",
        "make a TCPStore at MASTER_ADDR and MASTER_PORT, as torchrun's env:// does",
    ),
    PrivateName(
        "torch",
        "_local_tensor",
        "checkfreq/state/dtensors.py",
        _knows_its_shard,
        "DTensors are taken for plain tensors",
        "to_local() under no_grad, which takes 5 us longer for each tensor and capture",
    ),
    PrivateName(
        "torch",
        "_layout",
        "checkfreq/state/dtensors.py",
        _mesh_has_a_layout,
        "meshes cut from a larger one (tensor parallel under data parallel) do not know each other",
        "derive the parallel meshes from the root mesh and the names of its dimensions",
    ),
    PrivateName(
        "torch",
        "_rank_map",
        "checkfreq/state/dtensors.py",
        _mesh_has_a_layout,
        "meshes cut from a larger one (tensor parallel under data parallel) do not know each other",
        "derive the parallel meshes from the root mesh and the names of its dimensions",
    ),
    PrivateName(
        "torch",
        "torch.distributed._composable_state",
        "checkfreq/state/sharding.py",
        _knows_who_shards,
        "a part of a sharded model that is tracked by itself may be read while it is gathered",
        "find where fully_shard keeps the state of a module",
    ),
    PrivateName(
        "torch",
        "_module_state_mapping",
        "checkfreq/state/sharding.py",
        _knows_who_shards,
        "a part of a sharded model that is tracked by itself may be read while it is gathered",
        "find where fully_shard keeps the state of a module",
    ),
    PrivateName(
        "torch",
        "torch.distributed.fsdp._fully_shard.",
        "checkfreq/state/names.py",
        _hooks_of_fully_shard_are_known,
        "fully_shard's own hooks are taken for the user's: captures gather the whole model",
        "compare with the new place of fully_shard",
    ),
    PrivateName(
        "torch",
        "_fsdp_flattened",
        "checkfreq/state/sharding.py",
        _marks_flat_parameters,
        "FSDP1 would not be refused where only a part of it is tracked, and state would be lost",
        "find how FSDP1 marks its flat parameters",
    ),
]

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


LOADERS = [
    *(
        PrivateName(
            "torch",
            name,
            "iterators/torch/sampling.py",
            _loader_has(name),
            "a DataLoader that serves something else than its sampler says would be taken",
            "find what a subclass of DataLoader overrides now to change what it serves",
        )
        for name in ("_get_iterator", "_index_sampler", "_auto_collation")
    ),
    PrivateName(
        "torch",
        "_shutdown",
        "iterators/torch/common.py",
        _iterators_have_a_flag,
        "a fork of the training process may end its loader workers",
        "find what keeps __del__ of torch's iterator from ending workers a second time",
    ),
    *(
        PrivateName(
            "torch",
            name,
            "iterators/torch/common.py",
            _workers_are_forgotten,
            "a process that leaves a loader open never ends, or says that a worker died",
            "find how torch's loader knows its workers, and what reports one that is killed",
        )
        for name in ("_workers", "_worker_pids_set", "_remove_worker_pids")
    ),
]

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


_COMPOSED = "checkfreq/state/composed.py"
COMPOSED = [
    *(
        PrivateName(
            "torch",
            name,
            _COMPOSED,
            there,
            f"{kind} tensors can be neither captured nor restored",
            "find how torch's own pickling of them (torch._utils) makes them now, or refuse them",
        )
        for kind, there, names in (
            (
                "quantised",
                _quantized,
                ("_empty_affine_quantized", "_empty_per_channel_affine_quantized"),
            ),
            (
                "nested",
                _nested,
                (
                    *("_nested_tensor_size", "_nested_tensor_strides"),
                    *("_nested_tensor_storage_offsets", "_nested_view_from_buffer"),
                ),
            ),
            (
                "jagged",
                _jagged,
                ("_maybe_max_seqlen", "_maybe_min_seqlen", "_metadata_cache", "_ragged_idx"),
            ),
            ("sparse", _sparse, ("_coalesced_", "_indices")),
        )
        for name in names
    ),
    PrivateName(
        "torch",
        "_StorageInfo",
        "checkfreq/formats/dcp_metadata.py",
        _dcp_says_where,
        "checkpoints of DCP cannot be converted",
        "find the class that DCP writes into .metadata for the place of a tensor",
    ),
    PrivateName(
        "torch",
        "torch.serialization._get_layout",
        "checkfreq/formats/dcp_metadata.py",
        _layouts_have_names,
        "checkpoints of DCP cannot be converted",
        "find the function that DCP pickles a layout with",
    ),
]

# ---- NumPy and Python


def _machine_is_in_python() -> bool:
    from pickle import BUILD, _Unpickler

    return callable(_Unpickler.dispatch[BUILD[0]]) and callable(_Unpickler.pop_mark)


OTHERS = [
    PrivateName(
        "NumPy",
        "_rand",
        "checkfreq/state/adapters/rng.py",
        lambda: isinstance(np.random.mtrand._rand, np.random.RandomState),
        "a saved state of NumPy's generator cannot be tried before it is set",
        "numpy.random.get_state(legacy=False) names the kind of generator too",
    ),
    PrivateName(
        "NumPy",
        "_bit_generator",
        "checkfreq/state/adapters/rng.py",
        lambda: callable(type(np.random.mtrand._rand._bit_generator)),  # type: ignore[attr-defined]
        "a saved state of NumPy's generator cannot be tried before it is set",
        "numpy.random.get_state(legacy=False) names the kind of generator too",
    ),
    PrivateName(
        "Python",
        "_run_module_as_main",
        "checkfreq/supervisor/becoming.py",
        lambda: callable(__import__("runpy")._run_module_as_main),
        "a standby cannot become python -m MODULE",
        "have _run_of() return None for modules: a new interpreter is started then",
    ),
    PrivateName(
        "Python",
        "_Unpickler",
        "checkfreq/formats/dcp_metadata.py",
        _machine_is_in_python,
        "checkpoints of DCP cannot be converted",
        "run the opcodes of pickletools.genops(), of which DCP writes two dozen",
    ),
]


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
class DaliName:
    """As ``PrivateName``, tried on what is ``Made``."""

    name: str
    used: str
    there: Callable[[Made], object]
    breaks: str
    instead: str


def _base_of_iterators(made: Made) -> bool:
    from nvidia.dali.plugin import base_iterator

    return isinstance(made.iterator, base_iterator._DaliBaseIterator)


_NATIVE, _GRAPH = "iterators/dali/native_facts.py", "iterators/dali/graph.py"
_NO_DALI = "no pipeline of DALI can be used"
_NO_NATIVE = "NativeDALILoader refuses every iterator, or fails"
DALI = [
    DaliName(
        "_DaliBaseIterator",
        _NATIVE,
        _base_of_iterators,
        "iterators of DALI are not known as such",
        "compare with DALIGenericIterator of each plugin",
    ),
    DaliName(
        "_pipes",
        "iterators/dali/operators.py",
        lambda made: list(made.iterator._pipes) == [made.pipeline],
        _NO_DALI,
        "have the user pass the pipeline beside the iterator",
    ),
    DaliName(
        "_ops",
        _GRAPH,
        lambda made: made.reader,
        _NO_DALI,
        "walk from the outputs of the pipeline to what they come from",
    ),
    DaliName(
        "_op",
        "iterators/dali/operators.py",
        lambda made: made.reader._op.schema.Name() == "readers__File",
        "operators of a pipeline cannot be told apart",
        "find the object that has the operator's schema",
    ),
    DaliName(
        "_init_args",
        _NATIVE,
        lambda made: made.reader._op._init_args["pad_last_batch"] is True,
        _NO_NATIVE,
        "read the arguments from the operator's spec",
    ),
    DaliName(
        "_call_args",
        _NATIVE,
        lambda made: isinstance(made.reader._op._call_args, dict),
        _NO_NATIVE,
        "read the arguments from the operator's spec",
    ),
    DaliName(
        "_group",
        _GRAPH,
        lambda made: callable(made.source._group.callback) and made.source._group.source_desc.kind,
        "our reader is not found in a pipeline, and sources without a place are not refused",
        "find where an external source keeps its callback",
    ),
    DaliName(
        "_enable_checkpointing",
        _NATIVE,
        lambda made: made.pipeline._enable_checkpointing is True,
        _NO_NATIVE,
        "try pipeline.checkpoint(), which fails without it",
    ),
    DaliName(
        "_reader_name",
        _NATIVE,
        lambda made: made.iterator._reader_name == "Reader",
        _NO_NATIVE,
        "compare the length of the iterator with the reader's",
    ),
    DaliName(
        "_last_batch_policy",
        _NATIVE,
        lambda made: made.iterator._last_batch_policy.name == "PARTIAL",
        "iterators that lose or repeat samples are not refused",
        "have the user say it to NativeDALILoader",
    ),
    DaliName(
        "_first_batch",
        _GRAPH,
        lambda made: hasattr(made.fed_iterator, "_first_batch"),
        "batches that were prefetched are counted wrongly",
        "find where the iterator keeps the batch that it fetches when it is made",
    ),
    DaliName(
        "_batches_to_consume",
        _GRAPH,
        lambda made: isinstance(made.fed._batches_to_consume, int),
        "batches that were prefetched are counted wrongly",
        "count what the source was asked for and what the iterator handed out",
    ),
    DaliName(
        "_consumer_iter",
        _NATIVE,
        lambda made: isinstance(made.pipeline._consumer_iter, int),
        "a pipeline that was run elsewhere before is not refused",
        "find how a pipeline counts the batches that were taken",
    ),
    DaliName(
        "_counter",
        "iterators/dali/native.py",
        lambda made: isinstance(made.iterator._counter, int),
        "the end of an epoch is not known to the native mode",
        "find how the iterator counts the samples of an epoch",
    ),
    DaliName(
        "_graph_outputs",
        _GRAPH,
        lambda made: len(made.pipeline._graph_outputs) == 2,
        "outputs that come directly from our reader are not known",
        "find the nodes that define_graph returned",
    ),
    DaliName(
        "_output_index",
        _GRAPH,
        lambda made: hasattr(made.fed._graph_outputs[0].source, "_output_index"),
        "outputs that come directly from our reader are not known",
        "find which output of its operator a node is",
    ),
]

NAMES = [*MODULES, *OPTIMIZERS, *TENSORS, *RANKS, *LOADERS, *COMPOSED, *OTHERS]
