"""The interface to an accelerator: streams, events, copies and pinning, nothing else.

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


class Device(Protocol):
    """All accelerators of one kind in this process, told apart by ``torch.device``."""

    def owner(self, tensor: Tensor) -> torch.device | None:
        """The accelerator that holds ``tensor``; None for host memory."""
        ...

    def current_stream(self, device: torch.device) -> Stream:
        """The stream that the calling thread queues its work for ``device`` on now."""
        ...

    def side_stream(self, device: torch.device) -> Stream:
        """A new stream that waits for no other, not even for the default stream."""
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
        """Queue copies, in order, from the device to the host or within a device.

        Does not block and keeps no tensor alive.
        """
        ...

    def pack(self, pairs: Sequence[Pair], *, stream: Stream) -> None:
        """``copy`` for many tensors within a device, in few kernel launches."""
        ...

    def keep(self, tensors: Sequence[Tensor], *, stream: Stream) -> None:
        """Keep freed storage of ``tensors`` from being reused before ``stream`` gets here.

        A reference protects most sources; this also covers ``storage.resize_(0)``.
        """
        ...

    def free_bytes(self, device: torch.device) -> int:
        """Device memory that can still be allocated. Any thread."""
        ...

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured into a graph."""
        ...

    def is_in_use(self) -> bool:
        """Whether this process has used an accelerator at all; never initialises one."""
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
