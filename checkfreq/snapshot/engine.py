"""Phase one on the host: copies the state from CPU tensors into a slot of the arena.

Volatile tensors are copied before ``start`` returns. Settled ones are copied by one thread while
the next forward and backward passes run; ``fence`` holds the next weight update back until it is
done. Copies release the GIL and use one core: a second core gains little (20 against 18 GB/s,
measured) and would be taken from training.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import torch
from xxhash import xxh3_64_hexdigest

from checkfreq import faults
from checkfreq.errors import SnapshotError
from checkfreq.snapshot.arena import Slot
from checkfreq.snapshot.watch import HostWatch, require_unchanged
from checkfreq.types import SnapshotPlace

_CLOSE_TIMEOUT_S = 60.0

OnCopied = Callable[[BaseException | None], None]


class Copy(NamedTuple):
    """One tensor and where its bytes go: ``num_bytes`` at ``offset`` of the slot, row-major.

    ``watched``: a settled tensor of which a few elements tell whether it changed meanwhile.
    A NamedTuple for the reason that TensorRef is one: it is cheaper to make than a dataclass.
    """

    name: str
    source: torch.Tensor
    offset: int
    num_bytes: int
    settled: bool
    watched: bool = False


make_copy = tuple.__new__  # what Copy() calls; made per tensor while training waits


class SnapshotEngine(Protocol):
    """Phase one as the pipeline sees it, whatever the device."""

    fence_on_device: bool
    #: Where snapshots of device tensors go; may be changed between snapshots.
    place: SnapshotPlace
    #: Durations of the latest complete snapshot by the device's clock: of the copy to the host, and
    #: of the copy within the device. None without such a copy. Host tensors beside those of a
    #: device are copied meanwhile, and may take longer.
    last_copy_s: float | None
    last_device_copy_s: float | None

    @property
    def device_wait_s(self) -> float:
        """How long devices have waited at fences, as far as known now."""
        ...

    def look_at(self, devices: Iterable[torch.device]) -> None:
        """Find out, in a helper thread, how much memory is free on devices that hold state."""
        ...

    def spare_bytes(self, device: torch.device) -> int | None:
        """Bytes that a snapshot on ``device`` may use there, as of the latest look; None: unknown.

        Does not ask the driver.
        """
        ...

    def start(self, copies: Sequence[Copy], slot: Slot, *, on_copied: OnCopied) -> None:
        """Begin a snapshot of the state as it is now, after ``fence``.

        When this returns the training thread may go on with the next forward and backward.
        ``on_copied(error)`` is called once, from any thread, when the slot is complete. The error
        is UnannouncedWrite if a settled tensor that is watched changed before that.
        """
        ...

    def fence(self, *, timeout_s: float) -> float:
        """Have the next weight update come after the copy; returns the host's wait in seconds."""
        ...

    def wait_copied(self, *, timeout_s: float) -> bool:
        """Block until no copy is running; False at the deadline."""
        ...

    def close(self) -> None:
        """Finish and end the helper threads; idempotent."""
        ...


class HostEngine:
    """Snapshots of tensors in host memory."""

    fence_on_device = False
    device_wait_s = 0.0
    last_copy_s: float | None = None
    last_device_copy_s: float | None = None

    def __init__(self) -> None:
        self.place = SnapshotPlace.HOST
        self._idle = threading.Event()
        self._idle.set()
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def look_at(self, devices: Iterable[torch.device]) -> None:
        """See SnapshotEngine. All state is in host memory."""

    def spare_bytes(self, device: torch.device) -> int | None:
        """See SnapshotEngine."""
        return None

    def start(self, copies: Sequence[Copy], slot: Slot, *, on_copied: OnCopied) -> None:
        """See SnapshotEngine."""
        assert self._idle.is_set(), "a copy is still active"
        settled = [copy for copy in copies if copy.settled]
        watch = HostWatch(settled)
        error = attempted(lambda: self._copy_volatile(copies, slot))
        if error is not None or not settled:
            on_copied(error)
            return
        self._ensure_thread()  # may fail, and nothing is active then
        self._idle.clear()
        self._tasks.put(lambda: self._copy_settled(settled, slot, on_copied, watch))

    def fence(self, *, timeout_s: float) -> float:
        """See SnapshotEngine. Here the calling thread waits."""
        if self._idle.is_set():
            return 0.0
        start_s = time.perf_counter()
        if not self._idle.wait(timeout_s):
            raise SnapshotError(
                f"the snapshot was not finished {timeout_s:.0f} s after the weight update asked "
                "for it (CFConfig.barrier_timeout_s); the copy thread is stuck or starved"
            )
        return time.perf_counter() - start_s

    def wait_copied(self, *, timeout_s: float) -> bool:
        """See SnapshotEngine."""
        return self._idle.wait(timeout_s)

    def close(self) -> None:
        """See SnapshotEngine."""
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join(_CLOSE_TIMEOUT_S)  # a daemon: one that is stuck ends with us
            self._thread = None

    def _ensure_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="checkfreq-copy", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()

    def _copy_volatile(self, copies: Sequence[Copy], slot: Slot) -> None:
        faults.reach("snapshot.copy_start")
        for copy in copies:
            if not copy.settled:
                copy_to_slot(copy, slot)
        if not any(copy.settled for copy in copies):
            faults.reach("snapshot.copy_end")

    def _copy_settled(
        self, copies: Sequence[Copy], slot: Slot, on_copied: OnCopied, watch: HostWatch
    ) -> None:
        def copy_all() -> None:
            faults.reach("snapshot.copy_settled")
            for copy in copies:
                copy_to_slot(copy, slot)
            faults.reach("snapshot.copy_end")
            require_unchanged(watch.changed(slot))

        error = attempted(copy_all)
        self._idle.set()  # before the callback: a weight update waits for the copy only
        on_copied(error)


def attempted(work: Callable[[], None]) -> Exception | None:
    """Do ``work`` and return its error, if any, instead of raising it."""
    try:
        work()
    except Exception as error:
        return error
    return None


def copy_to_slot(copy: Copy, slot: Slot) -> None:
    """Copy one host tensor into the slot, row-major whatever its strides."""
    source = copy.source
    if copy.num_bytes == 0:
        return
    if source.is_contiguous() and not source.is_conj() and not source.is_neg():
        ctypes.memmove(slot.address + copy.offset, source.data_ptr(), copy.num_bytes)
    else:
        view_in_slot(copy, slot).copy_(source)


def view_in_slot(copy: Copy, slot: Slot) -> torch.Tensor:
    """This tensor's bytes in the slot, as a contiguous host tensor of its dtype and shape."""
    source = copy.source
    flat = torch.frombuffer(
        slot.memory, dtype=source.dtype, count=source.numel(), offset=copy.offset
    )
    return flat.view(source.shape)


def fingerprint(copy: Copy) -> str:
    """Digest of a tensor's current bytes, row-major; NaNs with different bits differ."""
    if not copy.num_bytes:
        return ""
    live = copy.source.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return xxh3_64_hexdigest(live.reshape(-1).view(torch.uint8).numpy().data)


def slot_fingerprint(copy: Copy, slot: Slot) -> str:
    """Digest of this tensor's bytes in the slot."""
    if not copy.num_bytes:
        return ""
    with memoryview(slot.memory) as memory:
        return xxh3_64_hexdigest(memory[copy.offset : copy.offset + copy.num_bytes])
