"""Enumerations and small values that all layers share. No torch, no I/O."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

#: What ``json.loads`` can return.
Json: TypeAlias = Any

#: Stands for the contents of a file that is not expected to change: a series, within which no write
#: was seen, and which full copy of it in that series. Equal ids are equal bytes.
ContentId: TypeAlias = tuple[str, int]

#: Direct I/O needs addresses, offsets and lengths in multiples of this.
PAGE_BYTES = 4096


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def size_text(num_bytes: int) -> str:
    """A number of bytes for people: ``89.3 MiB``; whole bytes below 1 KiB."""
    value, unit = float(num_bytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{num_bytes} B" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"


def moment(unix_s: float, pattern: str = "%Y-%m-%d %H:%M:%S") -> str:
    """Local time, by default to the second; "?" for what is no date, such as 10 ** 400."""
    try:
        return time.strftime(pattern, time.localtime(unix_s))
    except (OverflowError, OSError, ValueError):
        return "?"


def round_up_to_page(num_bytes: int) -> int:
    """The smallest multiple of ``PAGE_BYTES`` that is not less than ``num_bytes``."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


class CFMode(Enum):
    """What sets the interval: the measured costs (AUTO), or the user's ``chk_freq`` (MANUAL)."""

    AUTO = "auto"
    MANUAL = "manual"


class SnapshotPlace(Enum):
    """Where a snapshot of device tensors is taken first; then weight updates may continue.

    HOST: in host memory. DEVICE: in a buffer on the same device, from which it is copied to host
    memory in the background. The buffer needs as much device memory as the state.
    """

    HOST = "host"
    DEVICE = "device"


class Objective(Enum):
    """What the interval is chosen for.

    BOUND: checkpoint as often as the overhead bound allows; with ``mtbf_s``, no more often than
    is worth it. GOODPUT: lose the least time to checkpoints and failures together, for a given
    ``mtbf_s``; exceeds the bound where failures are so frequent that it is worth it.
    """

    BOUND = "bound"
    GOODPUT = "goodput"


class Directory(Enum):
    """Where the checkpoint directory is, for runs of several ranks.

    SHARED: all ranks see the same directory. NODE_LOCAL: each node, or each rank, has its own, and
    a restore uses the newest step that is valid in every one of them.
    """

    SHARED = "shared"
    NODE_LOCAL = "node_local"


@dataclass(frozen=True, slots=True)
class Role:
    """Which part of a checkpoint this process writes.

    ``group``: the ranks, ascending, that commit into the same directory; in a shared directory
    these are all of ``world``. The first of them is the leader: its worker holds the lock, waits
    for the parts of the others, and commits. ``split``: whether state that is the same on all
    ranks is divided among the group; if not, the leader writes it.
    """

    rank: int = 0
    world: int = 1
    group: tuple[int, ...] = (0,)
    split: bool = False

    @property
    def leader(self) -> int:
        """The rank of this group that commits."""
        return self.group[0]

    @property
    def leads(self) -> bool:
        """Whether this rank is the leader."""
        return self.rank == self.group[0]

    @property
    def is_alone(self) -> bool:
        """Whether the run has a single rank."""
        return self.world == 1

    @property
    def shares_all(self) -> bool:
        """Whether all ranks commit into one directory."""
        return len(self.group) == self.world


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor in a file.

    ``name`` is its key in the safetensors header; ``dtype`` torch's name without the
    ``torch.`` ("bfloat16"); ``offset`` counts bytes from the start of the file; each
    ``piece_bytes`` have a digest of their own, or all bytes have one if it is 0.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int
    piece_bytes: int = 0


@dataclass(frozen=True, slots=True)
class FileSpec:
    """One safetensors file: where its bytes lie in an arena slot, and which tensors it holds.

    ``slot_offset`` is page aligned. The file is ``header_bytes`` of header (8-byte length, and
    JSON padded to a page) followed by the tensors without gaps. ``num_bytes`` is its exact length;
    the slot has room up to the next page boundary.
    """

    name: str
    slot_offset: int
    num_bytes: int
    header_bytes: int
    tensors: tuple[TensorSpec, ...]
