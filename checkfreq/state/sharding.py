"""Recognises sharded modules and optimizers: ``fully_shard`` is supported, other ways are refused.

Nothing of ``torch.distributed`` is imported here: code that shards has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from checkfreq.errors import StateError


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was applied to it."""
    return _is_a(module, "torch.distributed.fsdp", "FSDPModule")


def num_sharders() -> int:
    """How many modules ``fully_shard`` or the like was applied to, in the whole process."""
    return len(_sharders())


def owners_of(module: nn.Module) -> list[nn.Module]:
    """The fully sharded modules around ``module``, which shard and gather its parameters."""
    return [
        owner
        for owner in list(_sharders())
        if owner is not module
        and is_fully_sharded(owner)
        and any(inner is module for inner in owner.modules())
    ]


def _sharders() -> Any:
    states: Any = sys.modules.get("torch.distributed._composable_state")
    return getattr(states, "_module_state_mapping", ())


def require_shards_that_are_known(path: str, modules: Iterable[nn.Module]) -> None:
    """Raise StateError for modules whose parameters are parts of flattened ones (FSDP1)."""
    if not _may_be_flat():
        return
    for module in modules:
        if _is_a(module, "torch.distributed.fsdp", "FullyShardedDataParallel") or any(
            map(_is_flat, module._parameters.values())
        ):
            raise StateError(f"{path}: {_FLAT}")


def require_optimizer_that_is_known(
    path: str, optimizer: Optimizer, parameters: Iterable[Tensor]
) -> None:
    """Raise StateError for an optimizer that is divided among ranks without a record of how."""
    where = "torch.distributed.optim.zero_redundancy_optimizer"
    if _is_a(optimizer, where, "ZeroRedundancyOptimizer"):
        raise StateError(
            f"{path}: a ZeroRedundancyOptimizer keeps a different part of the state on each rank, "
            "without a record of which; use fully_shard, which shards the optimizer's state too"
        )
    if _may_be_flat() and any(map(_is_flat, parameters)):
        raise StateError(f"{path}: {_FLAT}")


_FLAT = (
    "FullyShardedDataParallel keeps a different part of flattened parameters on each rank, without "
    "a record of which; use fully_shard of torch.distributed.fsdp instead"
)


def _may_be_flat() -> bool:
    return "torch.distributed.fsdp" in sys.modules and _is_one_of_many()


def _is_flat(parameter: object) -> bool:
    return getattr(parameter, "_fsdp_flattened", False) is True


def _is_one_of_many() -> bool:
    dist: Any = sys.modules.get("torch.distributed")
    return bool(
        dist is not None
        and dist.is_available()
        and dist.is_initialized()
        and dist.get_world_size() > 1
    )


def _is_a(value: object, module: str, name: str) -> bool:
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)
