"""Small closed sets and values shared by every layer. No torch, no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

#: What ``json.loads`` can return.
Json: TypeAlias = Any

#: Direct I/O wants addresses, offsets and lengths in multiples of this, and so do file images.
PAGE_BYTES = 4096


def round_up_to_page(num_bytes: int) -> int:
    """The smallest multiple of ``PAGE_BYTES`` that is not less than ``num_bytes``."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


class CFMode(Enum):
    """Who chooses the interval: the profiler (AUTO) or the user's ``chk_freq`` (MANUAL)."""

    AUTO = "auto"
    MANUAL = "manual"


class SnapshotPlace(Enum):
    """Where a snapshot of device tensors is complete, so that updates may go on.

    HOST: in host memory. DEVICE: in a second place on the device, from where it goes to host
    memory unhurriedly; takes as much device memory as the state.
    """

    HOST = "host"
    DEVICE = "device"


class Objective(Enum):
    """What the interval is chosen for.

    BOUND: as often as the overhead bound allows (but no oftener than pays, where ``mtbf_s`` is
    given). GOODPUT: least time wasted in all, by checkpoints and by failures together, for a
    given ``mtbf_s``; pays more than the bound where failures are so frequent that it is worth it.
    """

    BOUND = "bound"
    GOODPUT = "goodput"


class Directory(Enum):
    """Where the checkpoint directory is, for runs of several ranks.

    SHARED: every rank sees the same one. NODE_LOCAL: each node, or each rank, has one of its own;
    restored is the newest step that is valid in all of them.
    """

    SHARED = "shared"
    NODE_LOCAL = "node_local"


@dataclass(frozen=True, slots=True)
class Role:
    """Which part of a checkpoint this process writes.

    ``group`` are the ranks, ascending, that commit into the same directory: all of ``world`` in
    a shared one. The first of them leads: its worker holds the lock, waits for the parts of the
    others, and commits. ``split``: state that is the same on all ranks is divided among the
    group; otherwise the leader writes it.
    """

    rank: int = 0
    world: int = 1
    group: tuple[int, ...] = (0,)
    split: bool = False

    @property
    def leader(self) -> int:
        """The rank that commits."""
        return self.group[0]

    @property
    def leads(self) -> bool:
        """Whether that is this one."""
        return self.rank == self.group[0]

    @property
    def is_alone(self) -> bool:
        """Whether no other rank takes part in the run."""
        return self.world == 1

    @property
    def shares_all(self) -> bool:
        """Whether all ranks commit into one directory."""
        return len(self.group) == self.world


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor in a file image.

    ``name`` is its key in the safetensors header; ``dtype`` torch's name without the
    ``torch.`` ("bfloat16"); ``offset`` counts bytes from the start of the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class FileSpec:
    """One safetensors file: where its image lies in an arena slot, and what it holds.

    ``slot_offset`` is page aligned. The image is ``header_bytes`` of header (8-byte length
    and JSON padded to a page) followed by the tensors without holes; ``num_bytes`` is its
    exact length, and the slot has room up to the next page boundary.
    """

    name: str
    slot_offset: int
    num_bytes: int
    header_bytes: int
    tensors: tuple[TensorSpec, ...]
