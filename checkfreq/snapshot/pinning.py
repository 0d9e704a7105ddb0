"""Page-locks slots for an accelerator, in pieces and without keeping others from the driver.

A copy to memory that is not page-locked blocks the host and is slower. But a driver holds locks
that concern the whole node while it pins or unpins, for about 0.1 s per GB, and some kernels and
drivers refuse to pin much at once (pin_failures.py). So a slot is pinned and unpinned in pieces,
after each of which the driver is left alone for as long as the piece took, and the processes of a
node take turns. All of a slot is pinned, or none of it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from checkfreq.snapshot.arena import Pinner
from checkfreq.snapshot.device import Device, DriverError
from checkfreq.snapshot.node_turns import NodeTurns
from checkfreq.snapshot.pin_failures import Machine, advice
from checkfreq.types import PAGE_BYTES, size_text

logger = logging.getLogger(__name__)

#: Below every known limit on one call, and about 0.1 s of the driver's time.
PIECE_BYTES = 1 << 30
#: Longer than a driver needs to unpin a piece.
_UNPIN_TIMEOUT_S = 120.0

_Problem: TypeAlias = DriverError | str


class PinnedPieces:
    """The pieces of one slot that are registered with the driver; see Pins."""

    def __init__(
        self,
        device: Device,
        *,
        turns: NodeTurns | None = None,
        clock: Callable[[], float] = time.perf_counter,
        timeout_s: float = _UNPIN_TIMEOUT_S,
    ) -> None:
        self.num_bytes = 0
        self.seconds = 0.0
        self._device = device
        self._turns = turns or NodeTurns()
        self._clock = clock
        self._timeout_s = timeout_s
        self._pieces: dict[int, int] = {}  # address -> bytes

    def add(self, address: int, num_bytes: int, *, seconds: float) -> None:
        """Note that a piece was registered."""
        self._pieces[address] = num_bytes
        self.num_bytes += num_bytes
        self.seconds += seconds

    def release(self, *, hurry: threading.Event | None = None) -> bool:
        """See Pins."""
        if hurry is None:
            hurry = threading.Event()
            hurry.set()
        problems: list[_Problem] = []
        for address in list(self._pieces):
            with self._turns.turn(hurry):
                start_s = self._clock()
                problem = _in_thread(partial(self._unregister, address), timeout_s=self._timeout_s)
                if problem is None:
                    self.num_bytes -= self._pieces.pop(address)
                else:
                    problems.append(problem)
                if isinstance(problem, str):  # it hangs, or is not there: for all pieces
                    break
                if self._pieces:
                    hurry.wait(self._clock() - start_s)
        if problems:
            logger.error(
                "cannot unpin %s of host memory: %s. It stays allocated until the process ends, "
                "since the device might still write to it",
                size_text(sum(self._pieces.values())),
                problems[0],
            )
        return not problems

    def _unregister(self, address: int) -> _Problem | None:
        self._device.prepare_thread()
        return self._device.unregister_host(address)


class DevicePinner(Pinner):
    """Pins slots once the device is in use; after a failure, which is logged, never again.

    ``piece_bytes`` is a multiple of the page. ``clock`` counts seconds.
    """

    def __init__(
        self,
        device: Device,
        *,
        piece_bytes: int = PIECE_BYTES,
        turns: NodeTurns | None = None,
        machine: Machine | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        assert piece_bytes % PAGE_BYTES == 0
        self.piece_bytes = piece_bytes
        self._device = device
        self._turns = turns or NodeTurns()
        self._machine = machine
        self._clock = clock
        self._failed = False

    def is_wanted(self) -> bool:
        """See Pinner."""
        return not self._failed and self._device.is_in_use()

    def pin(
        self, address: int, num_bytes: int, *, hurry: threading.Event, stop: threading.Event
    ) -> PinnedPieces | None:
        """See Pinner. Pieces that could be neither kept nor undone are returned."""
        if not self.is_wanted():
            return None
        pieces = PinnedPieces(self._device, turns=self._turns, clock=self._clock)
        problem = _in_thread(lambda: self._register(pieces, address, num_bytes, hurry, stop))
        if pieces.num_bytes == num_bytes:
            return pieces
        if problem is not None:
            self._failed = True
            self._warn(problem, num_bytes, done=pieces.num_bytes)
        return None if pieces.release(hurry=hurry) else pieces

    def _register(
        self,
        pieces: PinnedPieces,
        address: int,
        num_bytes: int,
        hurry: threading.Event,
        stop: threading.Event,
    ) -> _Problem | None:
        self._device.prepare_thread()
        for done in range(0, num_bytes, self.piece_bytes):
            size = min(self.piece_bytes, num_bytes - done)
            with self._turns.turn(hurry):
                if stop.is_set():
                    return None
                start_s = self._clock()
                problem = self._device.register_host(address + done, size)
                if problem is not None:
                    return problem
                seconds = self._clock() - start_s
                pieces.add(address + done, size, seconds=seconds)
                if done + size < num_bytes:
                    hurry.wait(seconds)  # within the turn: the driver is free, not another rank's
        return None

    def _warn(self, problem: _Problem, num_bytes: int, *, done: int) -> None:
        machine = self._machine or Machine.here()
        logger.warning(
            "cannot pin %s of host memory for snapshots: %s, after %s. This is %s. %s. Copies from "
            "the device go on unpinned: they are slower, and step() waits for them",
            size_text(num_bytes),
            problem,
            size_text(done),
            machine,
            advice(
                problem.code if isinstance(problem, DriverError) else None,
                machine,
                num_bytes=min(num_bytes, self.piece_bytes),
            ),
        )


def pin_range(device: Device, address: int, num_bytes: int) -> PinnedPieces:
    """Pin a range that is small, and not for long, at once: neither in pieces nor in turns.

    Where that fails nothing is pinned, which is only slower: there is no warning.
    """
    pieces = PinnedPieces(device)

    def register() -> _Problem | None:
        device.prepare_thread()
        problem = device.register_host(address, num_bytes)
        if problem is None:
            pieces.add(address, num_bytes, seconds=0.0)
        return problem

    problem = _in_thread(register, timeout_s=_UNPIN_TIMEOUT_S)
    if problem is not None:
        logger.debug("cannot pin %s of host memory: %s", size_text(num_bytes), problem)
    return pieces


def _in_thread(
    call: Callable[[], _Problem | None], *, timeout_s: float | None = None
) -> _Problem | None:
    """Run ``call`` in a new thread and return its problem, if any.

    A CUDA call that fails leaves its error in the thread; the training thread would raise it at
    its next kernel launch.
    """
    results: list[_Problem | None] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:
            results.append(f"{type(error).__name__}: {error}")

    thread = threading.Thread(target=run, name="checkfreq-pin", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is ending: no kernel will be launched here
        run()
    else:
        thread.join(timeout_s)
    return results[0] if results else f"the driver did not answer within {timeout_s} s"
