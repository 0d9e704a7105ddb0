"""Canonical names of a module's tensors, and which of them a forward pass may change.

Names are those of ``state_dict()`` without ``module.`` of DistributedDataParallel and DataParallel
and ``_orig_mod.`` of torch.compile, wherever those wrappers are. A submodule of the user's that is
called ``module`` keeps its name, as AveragedModel's does. The index is built once and checked at
every capture (one dict comparison per module); it holds no tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from checkfreq.state.sharding import is_fully_sharded, num_sharders, owners_of

EXTRA_STATE = "_extra_state"


@dataclass(slots=True)
class Node:
    """One module at one place in the tree.

    ``raw`` and ``canonical`` are its prefixes ("" or ending in a dot) in state_dict() and in the
    file. ``averaged``: it is inside an AveragedModel. ``per_rank_buffers``: nothing makes its
    buffers equal on all ranks.
    """

    module: nn.Module
    kind: type[nn.Module]
    raw: str
    canonical: str
    averaged: bool
    per_rank_buffers: bool
    children: dict[str, nn.Module | None]
    embeds: bool
    extra: bool
    names: dict[str, str] = field(default_factory=dict)

    def name(self, attribute: str) -> str:
        """Canonical name of the parameter or buffer that is this attribute of the module."""
        name = self.names.get(attribute)
        if name is None:
            name = self.names[attribute] = self.canonical + attribute
        return name

    @property
    def weights_settled(self) -> bool:
        """False if parameters here may change other than by an optimizer's step.

        An AveragedModel updates its own; an embedding with ``max_norm`` rescales the rows that a
        forward pass looks up.
        """
        return not (self.averaged or (self.embeds and self.module.max_norm is not None))


class ModuleIndex:
    """The modules of a tree in state_dict() order, with their canonical prefixes."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._rebuild()

    def _rebuild(self) -> None:
        self._num_sharders = num_sharders()
        owners = owners_of(self._root)
        self.nodes = tuple(_walk(self._root, "", "", _Context(sharded=bool(owners))))
        inside = [node.module for node in self.nodes if is_fully_sharded(node.module)]
        self._sharded: list[Any] = [*owners, *inside]
        self._custom = any(_saves_its_own_way(node.module) for node in self.nodes)

    def refresh(self) -> None:
        """Rebuild if a submodule has been added, removed, replaced or given a different class.

        Fully sharded modules free the parameters that they gathered, so that only shards are read;
        if a part of a model is tracked, the modules around it do so too.
        """
        if self._num_sharders != num_sharders() or any(map(_has_changed, self.nodes)):
            self._rebuild()
        for module in self._sharded:
            module.reshard()

    @property
    def saves_its_own_way(self) -> bool:
        """True if only ``state_dict()`` knows the state, because of hooks or an override."""
        return self._custom or any(
            _of_users(node.module._state_dict_hooks) or _of_users(node.module._state_dict_pre_hooks)
            for node in self.nodes
        )

    @property
    def loads_its_own_way(self) -> bool:
        """True if only ``load_state_dict()`` may set the state."""
        return any(_loads_its_own_way(node.module) for node in self.nodes)

    def may_resize(self, name: str) -> bool:
        """Whether this is a buffer, and its module or one around it has loading code of users."""
        around = [node for node in self.nodes if name.startswith(node.canonical)]
        is_buffer = any(name == node.name(one) for node in around for one in node.module._buffers)
        return is_buffer and any(_loads_its_own_way(node.module) for node in around)

    def per_rank_buffers(self) -> dict[str, torch.Tensor]:
        """By canonical name, the buffers that differ from rank to rank."""
        return {
            node.name(attribute): buffer
            for node in self.nodes
            if node.per_rank_buffers
            for attribute, buffer in node.module._buffers.items()
            if buffer is not None
        }

    def canonical_names(self, raw_names: Iterable[str]) -> dict[str, str]:
        """key of ``state_dict()`` -> canonical name."""
        prefixes = {node.raw: node.canonical for node in self.nodes}
        return {raw: _canonical(raw, prefixes) for raw in raw_names}


def _has_changed(node: Node) -> bool:
    return node.module._modules != node.children or type(node.module) is not node.kind


def _canonical(raw_name: str, prefixes: dict[str, str]) -> str:
    end = len(raw_name)
    while (end := raw_name.rfind(".", 0, end)) >= 0:
        if (canonical := prefixes.get(raw_name[: end + 1])) is not None:
            return canonical + raw_name[end + 1 :]
    return prefixes[""] + raw_name


@dataclass(frozen=True, slots=True)
class _Context:
    """What the modules around a module mean for it."""

    averaged: bool = False
    sharded: bool = False
    per_rank_buffers: bool = False

    def inside(self, module: nn.Module) -> _Context:
        """The context of the children of ``module``, and of its own tensors."""
        return _Context(
            self.averaged or isinstance(module, AveragedModel),
            self.sharded or is_fully_sharded(module),
            self.per_rank_buffers
            or (isinstance(module, DistributedDataParallel) and not module.broadcast_buffers),
        )

    def has_per_rank_buffers(self, module: nn.Module) -> bool:
        """Whether the buffers of ``module`` differ from rank to rank.

        Batch norms collect statistics of the batches of their rank. DistributedDataParallel
        broadcasts them unless told otherwise, ``fully_shard`` never does.
        """
        learns = isinstance(module, _NormBase) and not isinstance(module, nn.SyncBatchNorm)
        return self.per_rank_buffers or (self.sharded and learns)


def _of_users(hooks: Mapping[int, Any]) -> bool:
    """Whether any hook is not one of ``fully_shard``, which only do what ``refresh`` does."""
    return any(
        not getattr(hook, "__module__", "").startswith("torch.distributed.fsdp._fully_shard.")
        for hook in hooks.values()
    )


def _walk(module: nn.Module, raw: str, canonical: str, context: _Context) -> Iterator[Node]:
    context = context.inside(module)
    yield Node(
        module,
        type(module),
        raw,
        canonical,
        averaged=context.averaged,
        per_rank_buffers=context.has_per_rank_buffers(module),
        children=dict(module._modules),
        embeds=isinstance(module, nn.Embedding | nn.EmbeddingBag),
        extra=_has_extra(module),
    )
    hidden = _wrapped_child(module)
    for name, child in module._modules.items():
        if child is not None:
            below = canonical if name == hidden else f"{canonical}{name}."
            yield from _walk(child, f"{raw}{name}.", below, context)


def _wrapped_child(module: nn.Module) -> str | None:
    """The name under which a transparent wrapper holds the module that it wraps."""
    if isinstance(module, DistributedDataParallel | DataParallel):
        return "module"
    if isinstance(module, _compiled_module_type()):
        return "_orig_mod"
    return None


def _compiled_module_type() -> type | tuple[()]:
    """OptimizedModule; () if nothing was compiled, as importing the compiler takes seconds."""
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    kind: type | tuple[()] = frames.OptimizedModule if frames is not None else ()
    return kind


def _saves_its_own_way(module: nn.Module) -> bool:
    kind = type(module)
    return (
        isinstance(module, torch.jit.ScriptModule)
        or kind.state_dict is not nn.Module.state_dict
        or kind._save_to_state_dict is not nn.Module._save_to_state_dict
    )


def _loads_its_own_way(module: nn.Module) -> bool:
    kind = type(module)
    return bool(
        isinstance(module, torch.jit.ScriptModule)
        or _of_users(module._load_state_dict_pre_hooks)
        or module._load_state_dict_post_hooks
        or kind.load_state_dict is not nn.Module.load_state_dict
        # torch.nn's own overrides (BatchNorm's) only upgrade old formats
        or not kind._load_from_state_dict.__module__.startswith("torch.nn.")
    )


def persistent_tensors(node: Node) -> Iterator[tuple[str, torch.Tensor, bool]]:
    """(name, tensor, is a parameter) of one module's own tensors in ``state_dict()``."""
    module = node.module
    for attribute, parameter in module._parameters.items():
        if parameter is not None:
            yield node.name(attribute), parameter, True
    for attribute, buffer in module._buffers.items():
        if buffer is not None and attribute not in module._non_persistent_buffers_set:
            yield node.name(attribute), buffer, False


def _has_extra(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state
