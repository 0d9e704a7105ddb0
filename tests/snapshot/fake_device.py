"""A device whose streams run only when a schedule says so.

Work is queued per stream and runs in any order that streams and events allow. A ``Chooser`` decides
which: a seeded one, or one that ``every_schedule`` drives through all orders. The schedule includes
the helper thread. Like a real device, this one keeps no tensor alive: a copy that runs after its
memory was freed fails the test. Copies are split in two, so that every write that may come in
between does.
"""

from __future__ import annotations

import random
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from checkfreq.snapshot.device import DriverError, Pair
from tests.snapshot.fake_registrations import Registrations


class Chooser(Protocol):
    def choose(self, count: int) -> int:
        """A number below ``count``."""
        ...


class Seeded:
    """Random choices from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, count: int) -> int:
        return self._random.randrange(count)


class Scripted:
    """Given choices, then always the first; records how many options each choice had."""

    def __init__(self, script: Sequence[int] = ()) -> None:
        self.taken: list[int] = []
        self.counts: list[int] = []
        self._script = script

    def choose(self, count: int) -> int:
        index = len(self.taken)
        choice = self._script[index] if index < len(self._script) else 0
        self.taken.append(choice)
        self.counts.append(count)
        return choice


def every_schedule(scenario: Callable[[Chooser], None], *, limit: int = 50_000) -> int:
    """Run a deterministic scenario under every schedule; returns how many there are."""
    script: list[int] | None = []
    for number in range(limit):
        chooser = Scripted(script or ())
        scenario(chooser)
        script = _next_script(chooser)
        if script is None:
            return number + 1
    raise AssertionError(f"more than {limit} schedules: make the scenario smaller")


def _next_script(chooser: Scripted) -> list[int] | None:
    for index in reversed(range(len(chooser.taken))):
        if chooser.taken[index] + 1 < chooser.counts[index]:
            return [*chooser.taken[:index], chooser.taken[index] + 1]
    return None


class _Block(bytearray):
    """Memory that can be referred to weakly."""


@dataclass(eq=False)
class _Allocation:
    block: weakref.ref[_Block]
    num_bytes: int
    index: torch.device | None  # None: page-locked host memory
    kept_by: set[FakeStream] = field(default_factory=set)


@dataclass(eq=False)
class FakeEvent:
    is_done: bool = False
    time: int = 0


@dataclass(eq=False)
class _Op:
    run: Callable[[], object]
    after: FakeEvent | None = None
    is_event: bool = False

    def is_ready_event(self) -> bool:
        return self.is_event and (self.after is None or self.after.is_done)


@dataclass(eq=False)
class FakeStream:
    index: torch.device
    ops: deque[_Op] = field(default_factory=deque)


class FakeDevice:
    """See Device; ``training_*`` and the attributes are the test's."""

    def __init__(self, chooser: Chooser, *, eager_events: bool = False) -> None:
        #: Events and waits happen as soon as they can, which leaves fewer schedules and no
        #: fewer results: one that happens later is what follows it happening later.
        self.eager_events = eager_events
        self.helper = ScheduledHelper()
        self.free = 1 << 40
        self.capturing = False
        self.in_use = True
        self.fail_at: int | None = None
        self.num_calls = 0
        self.num_copies = 0
        self.num_packs = 0
        self.registrations = Registrations()
        self._chooser = chooser
        self._clock = 0
        self._streams: list[FakeStream] = []
        self._current: dict[torch.device, FakeStream] = {}
        self._allocations: dict[int, _Allocation] = {}

    # ---- what the test does

    def tensor(self, values: Tensor, index: int = 0) -> Tensor:
        """A device tensor with the values and strides of a dense host tensor."""
        flat = self._new(values.untyped_storage().nbytes(), torch.device("cuda", index))
        flat.copy_(torch.tensor([], dtype=torch.uint8).set_(values.untyped_storage()))
        return flat.view(values.dtype).as_strided(
            values.shape, values.stride(), values.storage_offset()
        )

    def training_writes(self, tensor: Tensor, value: float) -> None:
        """Queue a kernel of training that fills a device tensor."""
        device = self.owner(tensor)
        assert device is not None
        self._queue(self.current_stream(device), lambda: tensor.fill_(value))

    def training_frees_storage(self, tensor: Tensor) -> None:
        """Free memory that is still referenced; the next owner writes to it."""
        allocation = self._allocation(tensor)
        assert allocation is not None
        assert allocation.index is not None
        if not allocation.kept_by:
            self.training_writes(tensor, 77)

    def use_new_stream(self, index: int = 0, *, after_the_old_one: bool = True) -> None:
        """Make a different stream the current one."""
        device = torch.device("cuda", index)
        done = self.record(self.current_stream(device))
        self._current[device] = self.side_stream(device)
        if after_the_old_one:
            self.wait(self._current[device], done)

    def run_some(self) -> None:
        """Run streams and the helper for as long as the schedule says."""
        while (actors := [*self._runnable(), *self.helper.actors()]) and (
            choice := self._chooser.choose(len(actors) + 1)
        ) > 0:
            actors[choice - 1]()

    def run_one(self) -> None:
        """Run one thing that can run."""
        actors = [*self._runnable(), *self.helper.actors()]
        actors[self._chooser.choose(len(actors))]()

    def run_all(self) -> None:
        """Run all work to its end, in an order that the schedule says."""
        while actors := [*self._runnable(), *self.helper.actors()]:
            actors[self._chooser.choose(len(actors))]()
        assert not any(stream.ops for stream in self._streams), "streams wait for each other"

    @property
    def num_allocated(self) -> int:
        """Bytes of device memory that are not freed."""
        return sum(a.num_bytes for a in self._allocations.values() if a.index is not None)

    @property
    def is_idle(self) -> bool:
        return not any(stream.ops for stream in self._streams)

    # ---- Device

    def owner(self, tensor: Tensor) -> torch.device | None:
        allocation = self._allocation(tensor)
        return None if allocation is None else allocation.index

    def current_stream(self, device: torch.device) -> FakeStream:
        if device not in self._current:
            self._current[device] = self.side_stream(device)
        return self._current[device]

    def side_stream(self, device: torch.device) -> FakeStream:
        stream = FakeStream(device)
        self._streams.append(stream)
        return stream

    def record(self, stream: FakeStream) -> FakeEvent:
        self._call()
        event = FakeEvent()

        def happen() -> None:
            event.is_done, event.time = True, self._clock

        stream.ops.append(_Op(happen, is_event=True))
        return event

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        self._call()
        stream.ops.append(_Op(lambda: None, after=event, is_event=True))

    def is_done(self, event: FakeEvent) -> bool:
        assert not self.capturing, "a query breaks the capture"
        self.run_some()
        return event.is_done

    def synchronize(self, event: FakeEvent) -> None:
        assert self.helper.is_running, "the training thread must not wait"
        while (actors := self._runnable()) or not event.is_done:
            if event.is_done:
                return
            assert actors, "an event that never happens"
            actors[self._chooser.choose(len(actors))]()

    def elapsed_s(self, start: FakeEvent, end: FakeEvent) -> float:
        assert start.is_done
        assert end.is_done
        return float(end.time - start.time)

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        self._call()
        if num_bytes > self.free:
            raise torch.OutOfMemoryError("fake")
        tensor = self._new(num_bytes, device)
        find = self._place(tensor, alive=False)
        # The memory belongs to the current stream, whose earlier work on it may still be queued.
        self._queue(self.current_stream(device), lambda: find().fill_(0xAB))
        return tensor

    def allocate_host(self, num_bytes: int) -> Tensor:
        self._call()
        return self._new(num_bytes, None)

    def copy(self, pairs: Sequence[Pair], *, stream: FakeStream) -> None:
        self._call()
        self.num_copies += 1
        for target, source in pairs:
            assert target.shape == source.shape
            assert target.dtype is source.dtype
            assert self.owner(source) == stream.index, "a copy from another device"
            assert self.owner(target) in (None, stream.index)
            if self._allocation(target) is None:
                self.registrations.check_copy(target)
            self._queue_copy(target, source, stream)

    def pack(self, pairs: Sequence[Pair], *, stream: FakeStream) -> None:
        self._call()
        self.num_packs += 1
        assert pairs
        for target, source in pairs:
            assert self.owner(target) == self.owner(source) == stream.index
            self._queue_copy(target, source, stream)

    def keep(self, tensors: Sequence[Tensor], *, stream: FakeStream) -> None:
        self._call()
        for tensor in tensors:
            allocation = self._allocation(tensor)
            assert allocation is not None
            allocation.kept_by.add(stream)

    def free_bytes(self, device: torch.device) -> int:
        return self.free

    def is_capturing(self) -> bool:
        return self.capturing

    def is_in_use(self) -> bool:
        return self.in_use

    def prepare_thread(self) -> None:
        self.registrations.prepare_thread()

    def register_host(self, address: int, num_bytes: int) -> DriverError | None:
        return self.registrations.register(address, num_bytes)

    def unregister_host(self, address: int) -> DriverError | None:
        return self.registrations.unregister(address)

    # ---- inside

    def _call(self) -> None:
        self.num_calls += 1
        if self.num_calls == self.fail_at:
            raise RuntimeError("the device refuses")
        assert not self.capturing, "queued into a graph"

    def _queue(self, stream: FakeStream, run: Callable[[], object]) -> None:
        stream.ops.append(_Op(run))

    def _queue_copy(self, target: Tensor, source: Tensor, stream: FakeStream) -> None:
        for part_of_target, part_of_source in _torn(target, source):
            to, of = self._place(part_of_target), self._place(part_of_source)
            self._queue(stream, lambda to=to, of=of: to().copy_(of()))

    def _runnable(self) -> list[Callable[[], None]]:
        while self.eager_events and (
            bookkeeping := [s for s in self._streams if s.ops and s.ops[0].is_ready_event()]
        ):
            for stream in bookkeeping:
                self._run(stream)
        return [
            lambda stream=stream: self._run(stream)  # type: ignore[misc]
            for stream in self._streams
            if stream.ops and (stream.ops[0].after is None or stream.ops[0].after.is_done)
        ]

    def _run(self, stream: FakeStream) -> None:
        self._clock += 1
        stream.ops.popleft().run()

    def _new(self, num_bytes: int, index: torch.device | None) -> Tensor:
        block = _Block(b"\xee" * max(num_bytes, 1))
        tensor = torch.frombuffer(block, dtype=torch.uint8)
        address = tensor.data_ptr()
        self._allocations[address] = _Allocation(
            weakref.ref(block, lambda _: self._allocations.pop(address, None)), num_bytes, index
        )
        return tensor[:num_bytes]

    def _allocation(self, tensor: Tensor) -> _Allocation | None:
        return self._allocations.get(tensor.untyped_storage().data_ptr())

    def _place(self, tensor: Tensor, *, alive: bool = True) -> Callable[[], Tensor]:
        """Finds the tensor again without keeping its memory alive."""
        allocation = self._allocation(tensor)
        if allocation is None:
            return lambda: tensor  # the arena's
        shape, strides, dtype = tensor.shape, tensor.stride(), tensor.dtype
        offset, conj, neg = tensor.storage_offset(), tensor.is_conj(), tensor.is_neg()

        def find() -> Tensor:
            block = allocation.block()
            if block is None and not alive:
                return torch.empty(0, dtype=dtype)
            assert block is not None, "a copy reads or writes freed memory"
            count = len(block) // dtype.itemsize
            found = torch.frombuffer(block, dtype=dtype, count=count).as_strided(
                shape, strides, offset
            )
            found = found.conj() if conj else found
            return torch._neg_view(found) if neg else found

        return find


def _torn(target: Tensor, source: Tensor) -> Iterator[Pair]:
    if source.dim() == 0 or source.shape[0] < 2:
        yield target, source
        return
    middle = source.shape[0] // 2
    yield target[:middle], source[:middle]
    yield target[middle:], source[middle:]


class ScheduledHelper:
    """Tasks that run when the schedule says so; see Helper."""

    def __init__(self) -> None:
        self.is_running = False
        self._jobs: deque[Callable[[], None]] = deque()

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.append(job)

    def close(self, *, timeout_s: float) -> bool:
        while self._jobs:
            self._run()
        return True

    def actors(self) -> list[Callable[[], None]]:
        return [self._run] if self._jobs and not self.is_running else []

    def _run(self) -> None:
        self.is_running = True
        try:
            self._jobs.popleft()()
        finally:
            self.is_running = False
