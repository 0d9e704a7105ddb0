"""The interface to an accelerator: streams, events, copies, pinning, memory and names.

The engine decides on every order and a ``Device`` only carries it out, so the order can be tested
without an accelerator, against a fake that delays and reorders whatever streams and events allow.
Streams and events are opaque and are passed only to the Device that made them. All methods belong
to the training thread unless they say otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

Stream: TypeAlias = Any
Event: TypeAlias = Any
#: (target, source), of the same shape and dtype.
Pair: TypeAlias = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class DriverError:
    """What a call of the driver's interface returned instead of success."""

    call: str
    code: int
    name: str

    def __str__(self) -> str:
        return f"{self.call} returned error {self.code} ({self.name})"


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What PyTorch's allocator has taken of one device for this process.

    reserved_bytes: what it got from the driver, cached memory included.
    peak_bytes: the most that it had reserved, since the peaks were last reset.
    limit_bytes: the most that it may reserve.
    num_shortages: how often the driver, or the limit, refused it memory. It then gives what it has
        cached back, for which it waits for the device, and tries again.
    """

    reserved_bytes: int
    peak_bytes: int
    limit_bytes: int
    num_shortages: int


class Device(Protocol):
    """All accelerators of one kind in this process, told apart by ``torch.device``.

    A class that has these methods, registered in backends.py, is all that a kind of accelerator
    needs to be supported.
    """

    def owner(self, tensor: Tensor) -> torch.device | None:
        """The accelerator that holds ``tensor``; None for host memory."""
        ...

    def current_stream(self, device: torch.device) -> Stream:
        """The stream that the calling thread queues its work for ``device`` on now."""
        ...

    def side_stream(self, device: torch.device) -> Stream:
        """A stream that nobody else uses and that waits for no other, not even for the default
        stream."""
        ...

    def return_stream(self, stream: Stream) -> None:
        """Take back a side stream on which no work is left."""
        ...

    def record(self, stream: Stream) -> Event:
        """An event that happens when all work queued on ``stream`` so far is done."""
        ...

    def wait(self, stream: Stream, event: Event) -> None:
        """Have work queued on ``stream`` from now on start after ``event``; does not block."""
        ...

    def is_done(self, event: Event) -> bool:
        """Whether the event has happened; does not block. Any thread."""
        ...

    def synchronize(self, event: Event) -> None:
        """Block the calling thread, without spinning, until the event has happened. Any thread."""
        ...

    def elapsed_s(self, start: Event, end: Event) -> float:
        """Device time between two events that have happened. Any thread."""
        ...

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        """Memory `[num_bytes] uint8` of the current stream; raises torch.OutOfMemoryError."""
        ...

    def allocate_host(self, num_bytes: int) -> Tensor:
        """Page-locked host memory `[num_bytes] uint8`; pageable where locking fails."""
        ...

    def copy(self, pairs: Sequence[Pair], *, stream: Stream) -> None:
        """Queue copies, in order, between a device and the host or within a device.

        Does not block if the host memory is page-locked, and keeps no tensor alive. A target in
        host memory is row-major; the source may have any strides.
        """
        ...

    def pack(self, targets: list[Tensor], sources: list[Tensor], *, stream: Stream) -> None:
        """``copy`` for many tensors within a device, in few kernel launches.

        All are of one integer dtype, float32 or float64 and dense; each target has the strides of
        its source.
        """
        ...

    def keep(self, tensors: Sequence[Tensor], *, stream: Stream) -> None:
        """Keep freed storage of ``tensors`` from being reused before ``stream`` gets here.

        A reference protects most sources; this also covers ``storage.resize_(0)``.
        """
        ...

    def free_bytes(self, device: torch.device) -> int | None:
        """What the driver can still give to this process; None if it cannot tell.

        Helper threads only: the driver may take its time. Raises RuntimeError.
        """
        ...

    def memory_use(self, device: torch.device) -> MemoryUse:
        """The allocator's own counts, without asking the driver. Any thread."""
        ...

    def segment_bytes(self, num_bytes: int) -> int:
        """The most that the allocator asks the driver for to serve ``num_bytes``. Any thread."""
        ...

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""
        ...

    def is_in_use(self) -> bool:
        """Whether this process has used an accelerator at all; never initialises one."""
        ...

    def devices(self) -> list[torch.device]:
        """The accelerators that this process uses, in order; initialises none."""
        ...

    def names(self) -> list[str]:
        """Their models."""
        ...

    def runtime_version(self) -> str | None:
        """Of the runtime that PyTorch was built for; None if it was built for none."""
        ...

    def prepare_thread(self) -> None:
        """Must be the first call in any thread but the training thread.

        Calls from the thread then neither break a graph capture in the training thread nor
        initialise a device that is not in use.
        """
        ...

    def register_host(self, address: int, num_bytes: int) -> DriverError | None:
        """Page-lock host memory for all devices; returns the error, or None.

        One copy must not span two registrations, nor leave one. Only in threads that called
        ``prepare_thread``.
        """
        ...

    def unregister_host(self, address: int) -> DriverError | None:
        """Undo ``register_host``; while it fails the memory must stay mapped. The same threads."""
        ...
