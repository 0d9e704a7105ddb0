"""DTensors: the local tensor of one, and which box of the whole tensor it is.

``torch.distributed.tensor`` is not imported before a DTensor is met: code that made one has
imported it, and other processes save the second that the import takes.
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

#: A run has few structures; one that keeps making new meshes must not grow without bound.
_MOST_SHARDS = 200_000


def is_dtensor(value: object) -> TypeGuard[Tensor]:
    """True for DTensors, also as parameters."""
    module: Any = sys.modules.get(_MODULE)
    return module is not None and isinstance(value, module.DTensor)


def tensor_types() -> frozenset[type]:
    """The tensor types that need no conversion to be kept."""
    module: Any = sys.modules.get(_MODULE)
    kind = getattr(module, "DTensor", None)
    return frozenset((Tensor,) if kind is None else (Tensor, kind))


def local_of(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor; any other tensor is returned as it is.

    Not ``to_local()``: it records an autograd node, or needs ``no_grad``, and takes 5 us per tensor
    and capture (2026-11).
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
    """Which box of a DTensor of ``shape`` this rank holds, and which ranks hold the same.

    ``replicas`` are the ranks that hold this box, ``ranks`` all of the mesh and of parallel meshes.
    ``text`` describes placements and mesh, and is the same on all of those ranks.
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
        """The rank of the group that writes this box; None if none of them holds it."""
        return next((rank for rank in self.replicas if rank in group), None)


#: By mesh, placements and shape. Computing one takes 50 us, and a capture needs them all.
_known_shards: dict[object, LocalShard] = {}


def shard_of(tensor: Any, path: str) -> LocalShard:
    """Which shard of a DTensor this rank holds; StateError with ``path`` if it is no single box."""
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
    everywhere = _parallel_ranks(mesh)
    ranks = frozenset(everywhere.flatten().tolist())
    if where is None:
        nothing = Box((0,) * len(shape), (0,) * len(shape))
        return LocalShard(shape, nothing, (), ranks, False, text)
    place = tuple(c if is_split else slice(None) for c, is_split in zip(where, split, strict=True))
    replicas = tuple(everywhere[(slice(None), *place)].flatten().tolist())
    return LocalShard(shape, _box(tensor, path), replicas, ranks, is_replicated, text)


def _parallel_ranks(mesh: Any) -> Tensor:
    """Ranks of the mesh and of all meshes parallel to it, shape `[meshes, *mesh]`.

    Parallel meshes are slices of one larger mesh along the same dimensions, such as the tensor
    parallel meshes under data parallelism: a tensor of one name lies on all of them. A mesh that
    is no slice has no parallel ones.
    """
    layout, rank_map = getattr(mesh, "_layout", None), getattr(mesh, "_rank_map", None)
    if layout is not None and rank_map is not None:
        parallel: Tensor = layout.remap_to_tensor(rank_map)
        if parallel.shape[1:] == mesh.mesh.shape:
            return parallel
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
    """For each dimension of the mesh, the dimension that the DTensor is split along, or None."""
    return [getattr(placement, "dim", None) for placement in tensor.placements]


def empty_split(
    shape: tuple[int, ...],
    dims: list[int | None],
    parameter: Any,
    dtype: torch.dtype,
    strides: tuple[int, ...] | None,
) -> Any:
    """A new DTensor on the parameter's mesh, split along ``dims`` in the way the parameter is."""
    from torch.distributed.tensor import Replicate, Shard, empty

    mesh = parameter.device_mesh
    placements = [
        like if dim == getattr(like, "dim", None) else Replicate() if dim is None else Shard(dim)
        for dim, like in zip(dims, parameter.placements, strict=True)
    ]
    pattern = empty(shape, dtype=dtype, device_mesh=mesh, placements=placements)
    return empty_like(pattern, dtype, strides, device=local_of(parameter).device)


def empty_like(
    live: Any,
    dtype: torch.dtype,
    strides: tuple[int, ...] | None,
    *,
    device: torch.device | None = None,
) -> Any:
    """A new DTensor on the same mesh with the same placements; its values are undefined.

    Its dimensions lie in memory in the order that ``strides`` give them; None is row-major. It
    lies where ``live`` does, which with CPU offload is not the device of the mesh.
    """
    from torch.distributed.tensor import DTensor

    local = local_of(live)
    # Stable, so that what has one stride keeps its order.
    order = sorted(range(live.ndim), key=lambda dim: -(strides[dim] if strides else 0))
    whole = torch.empty_permuted(live.shape, order, device="meta")
    # from_local() moves what lies elsewhere to the mesh's device, but for meta tensors.
    pattern = DTensor.from_local(
        torch.empty_permuted(local.shape, order, dtype=dtype, device="meta"),
        live.device_mesh,
        live.placements,
        run_check=False,
        shape=live.shape,
        stride=whole.stride(),
    )
    return torch.empty_like(pattern, device=device or local.device)
