"""DTensors: the local tensor behind one, and which box of the whole it is.

``torch.distributed.tensor`` is not imported here: whoever holds a DTensor has imported it, and
everybody else is spared the second that it takes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

from checkfreq.errors import StateError
from checkfreq.store.boxes import Box

_MODULE = "torch.distributed.tensor"

#: Structures met are few; a run that makes new meshes for ever must not grow for ever.
_MOST_SHARDS = 200_000


def is_dtensor(value: object) -> TypeGuard[Tensor]:
    """True for DTensors, also as parameters."""
    module: Any = sys.modules.get(_MODULE)
    return module is not None and isinstance(value, module.DTensor)


def tensor_types() -> frozenset[type]:
    """The types of tensor that state may be made of as they are."""
    module: Any = sys.modules.get(_MODULE)
    kind = getattr(module, "DTensor", None)
    return frozenset((Tensor,) if kind is None else (Tensor, kind))


def local_of(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor; any other tensor as it is.

    ``to_local()`` would make a node of a graph, or want ``no_grad``: 5 us for each tensor of
    each capture (2026-11).
    """
    local: Any = getattr(tensor, "_local_tensor", None)
    if local is None or not is_dtensor(tensor):
        return tensor
    if type(local) is not Tensor and hasattr(local, "wait"):  # a collective may still fill it
        local = local.wait()
    found: Tensor = local
    return found


@dataclass(frozen=True, slots=True)
class LocalShard:
    """What part of a DTensor of ``shape`` a rank holds, and who holds what.

    ``replicas`` are the ranks that hold the same box, ``ranks`` all of the mesh and its like;
    ``text`` says placements and mesh, and is the same on all of them.
    """

    shape: tuple[int, ...]
    box: Box
    replicas: tuple[int, ...]
    ranks: frozenset[int]
    is_replicated: bool
    text: str

    def is_replicated_in(self, group: tuple[int, ...]) -> bool:
        """Whether every rank of the group holds all of it."""
        return self.is_replicated and self.ranks.issuperset(group)

    def writer(self, group: tuple[int, ...]) -> int | None:
        """Who of the group writes this box."""
        return next((rank for rank in self.replicas if rank in group), None)


#: By mesh, placements and shape: computing one takes 50 us, and a capture asks for them all.
_known_shards: dict[object, LocalShard] = {}


def shard_of(tensor: Any, path: str) -> LocalShard:
    """How a DTensor is cut; StateError, naming ``path``, for one that has no box."""
    key = (tensor.device_mesh, tensor.placements, tensor.shape)
    shard = _known_shards.get(key)
    if shard is None:
        if len(_known_shards) >= _MOST_SHARDS:
            _known_shards.clear()
        shard = _known_shards[key] = _local_shard(tensor, path)
    return shard


def _local_shard(tensor: Any, path: str) -> LocalShard:
    placements, mesh = tensor.placements, tensor.device_mesh
    if any(placement.is_partial() for placement in placements):
        raise StateError(
            f"{path}: a DTensor with placements {placements} holds partial sums that are yet to be "
            "reduced; redistribute() it to Shard or Replicate before it is checkpointed"
        )
    shape = tuple(tensor.shape)
    split = [not p.is_replicate() for p in placements]
    text = f"{placements} on a mesh of {tuple(mesh.shape)}"
    is_replicated = all(
        size == 1 for size, is_split in zip(mesh.shape, split, strict=True) if is_split
    )
    where = mesh.get_coordinate()
    everywhere = _all_like(mesh)
    ranks = frozenset(everywhere.flatten().tolist())
    if where is None:
        nothing = Box((0,) * len(shape), (0,) * len(shape))
        return LocalShard(shape, nothing, (), ranks, False, text)
    place = tuple(c if is_split else slice(None) for c, is_split in zip(where, split, strict=True))
    replicas = tuple(everywhere[(slice(None), *place)].flatten().tolist())
    return LocalShard(shape, _box(tensor, path), replicas, ranks, is_replicated, text)


def _all_like(mesh: Any) -> Tensor:
    """Ranks of the mesh and of its likes: all slices of one larger mesh along the same dimensions.

    What lies on one of them, under one name, lies on the others too (tensor parallel within data
    parallel). One that was not sliced out of another has no like. Shape `[likes, *mesh]`.
    """
    layout, rank_map = getattr(mesh, "_layout", None), getattr(mesh, "_rank_map", None)
    if layout is not None and rank_map is not None:
        likes: Tensor = layout.remap_to_tensor(rank_map)
        if likes.shape[1:] == mesh.mesh.shape:
            return likes
    found: Tensor = mesh.mesh.unsqueeze(0)
    return found


def _box(tensor: Any, path: str) -> Box:
    chunks = tensor.__create_chunk_list__()
    local = tuple(local_of(tensor).shape)
    if len(chunks) != 1 or tuple(chunks[0].sizes) != local:
        raise StateError(
            f"{path}: a DTensor with placements {tensor.placements} holds no single box of "
            f"{list(tensor.shape)} (its local tensor is {list(local)}); redistribute() it to Shard"
        )
    return Box(tuple(chunks[0].offsets), local)


def split_dims(tensor: Any) -> list[int | None]:
    """Along each dimension of its mesh, the dimension that a DTensor is split along."""
    return [getattr(placement, "dim", None) for placement in tensor.placements]


def empty_split(
    shape: tuple[int, ...], dims: list[int | None], parameter: Any, dtype: torch.dtype
) -> Any:
    """A new DTensor on the parameter's mesh, split along ``dims`` and as the parameter is."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, empty

    mesh = parameter.device_mesh
    placements = [
        like if dim == getattr(like, "dim", None) else Replicate() if dim is None else Shard(dim)
        for dim, like in zip(dims, parameter.placements, strict=True)
    ]
    pattern = empty(shape, dtype=dtype, device_mesh=mesh, placements=placements)
    local = torch.empty_like(local_of(pattern), device=local_of(parameter).device)
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=pattern.shape, stride=pattern.stride()
    )


def empty_like(live: Any, dtype: torch.dtype) -> Any:
    """A new DTensor on the same mesh, with the same placements, without values in it."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        torch.empty_like(local_of(live), dtype=dtype, requires_grad=False),
        live.device_mesh,
        live.placements,
        run_check=False,
        shape=live.shape,
        stride=live.stride(),
    )
