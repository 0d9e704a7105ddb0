"""A device whose streams run only when a schedule says so.

Work is queued per stream and runs in any order that streams and events allow. A ``Chooser`` decides
which: a seeded one, or one that ``every_schedule`` drives through all orders. The schedule includes
the helper thread. Like a real device, this one keeps no tensor alive: a copy that runs after its
memory was freed fails the test. Copies are split in two, so that every write that may come in
between does. Streams, events and captures are in fake_streams.py, device memory in
fake_allocator.py.
"""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch
from torch import Tensor

from checkfreq.snapshot.device import DriverError, MemoryUse, Pair
from tests.snapshot.fake_allocator import FakeAllocator
from tests.snapshot.fake_registrations import Registrations
from tests.snapshot.fake_streams import Capture, FakeEvent, FakeStream, Kind, Op, ScheduledHelper


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


_Find: TypeAlias = Callable[[], Tensor]


class _Block(bytearray):
    """Memory that can be referred to weakly."""


@dataclass(eq=False)
class _Allocation:
    block: weakref.ref[_Block]
    num_bytes: int
    index: torch.device | None  # None: page-locked host memory
    kept_by: set[FakeStream] = field(default_factory=set)


class FakeDevice:
    """See Device; ``training_*`` and the attributes are the test's."""

    def __init__(self, chooser: Chooser, *, eager_events: bool = False) -> None:
        #: Events and waits happen as soon as they can, which leaves fewer schedules and no
        #: fewer results: one that happens later is what follows it happening later.
        self.eager_events = eager_events
        self.helper = ScheduledHelper(prepare=self.prepare_thread)
        self.in_use = True
        self.fail_at: int | None = None
        self.num_calls = 0
        self.num_copies = 0
        self.num_packs = 0
        self.registrations = Registrations()
        self.returned: list[FakeStream] = []
        self._chooser = chooser
        self._clock = 0
        self._streams: list[FakeStream] = []
        self._current: dict[torch.device, FakeStream] = {}
        self._allocations: dict[int, _Allocation] = {}
        self._memories: dict[torch.device, FakeAllocator] = {}
        self._capture: Capture | None = None
        self._relaxed: set[object] = set()  # threads that a capture forbids nothing
        self._training_thread = threading.current_thread()

    # ---- what the test does

    def tensor(self, values: Tensor, index: int = 0) -> Tensor:
        """A device tensor with the values and strides of a dense host tensor."""
        flat = self._new(values.untyped_storage().nbytes(), torch.device("cuda", index))
        flat.copy_(torch.tensor([], dtype=torch.uint8).set_(values.untyped_storage()))
        return flat.view(values.dtype).as_strided(
            values.shape, values.stride(), values.storage_offset()
        )

    def training_writes(
        self, tensor: Tensor, value: float, *, stream: FakeStream | None = None
    ) -> None:
        """Queue a kernel of training that fills a device tensor; None: the current stream."""
        device = self.owner(tensor)
        assert device is not None
        self._queue(stream or self.current_stream(device), lambda: tensor.fill_(value))

    def training_frees_storage(self, tensor: Tensor) -> None:
        """Free memory that is still referenced; the next owner writes to it."""
        allocation = self._allocation(tensor)
        assert allocation is not None
        assert allocation.index is not None
        if not allocation.kept_by:
            self.training_writes(tensor, 77)

    def use_new_stream(
        self,
        index: int = 0,
        *,
        after_the_old_one: bool = True,
        kind: Kind = Kind.INDEPENDENT,
    ) -> None:
        """Make a different stream the current one."""
        device = torch.device("cuda", index)
        done = self.record(self.current_stream(device))
        self._current[device] = self._new_stream(device, kind)
        if after_the_old_one:
            self.wait(self._current[device], done)

    def users_stream(self, index: int = 0, *, kind: Kind = Kind.INDEPENDENT) -> FakeStream:
        """A stream of the user's own, which is not made the current one."""
        return self._new_stream(torch.device("cuda", index), kind)

    @contextmanager
    def on(self, stream: FakeStream) -> Iterator[None]:
        """Make a stream the current one of its device, as ``torch.cuda.stream`` does."""
        before = self.current_stream(stream.index)
        self._current[stream.index] = stream
        yield
        self._current[stream.index] = before

    def order(self, first: FakeStream, then: FakeStream) -> None:
        """What is queued on ``then`` from now on comes after what is on ``first`` now."""
        self.wait(then, self.record(first))

    def begin_capture(self, *, mode: str = "global") -> None:
        """Training begins to capture its current stream into a graph."""
        self._capture = Capture(mode=mode)

    def end_capture(self) -> None:
        """Fails if a call has broken the capture, even one whose error was caught."""
        assert self._capture is not None
        capture, self._capture = self._capture, None
        assert capture.broken_by is None, f"{capture.broken_by} broke the capture"

    def run_some(self) -> None:
        """Run streams and the helper for as long as the schedule says."""
        while (actors := [*self._runnable(), *self.helper.actors()]) and (
            choice := self._chooser.choose(len(actors) + 1)
        ) > 0:
            actors[choice - 1]()

    def run_streams(self) -> None:
        """Run all queued work, but not the helper."""
        while actors := self._runnable():
            actors[self._chooser.choose(len(actors))]()

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

    def memory(self, index: int = 0) -> FakeAllocator:
        """The memory of one device."""
        return self._memories.setdefault(torch.device("cuda", index), FakeAllocator())

    @property
    def is_idle(self) -> bool:
        return not any(stream.ops for stream in self._streams)

    @property
    def capturing(self) -> bool:
        return self._capture is not None

    # ---- Device

    def owner(self, tensor: Tensor) -> torch.device | None:
        allocation = self._allocation(tensor)
        return None if allocation is None else allocation.index

    def current_stream(self, device: torch.device) -> FakeStream:
        if device not in self._current:
            self._current[device] = self._new_stream(device, Kind.DEFAULT)
        return self._current[device]

    def side_stream(self, device: torch.device) -> FakeStream:
        return self._new_stream(device, Kind.INDEPENDENT)

    def return_stream(self, stream: FakeStream) -> None:
        assert not stream.ops, "a stream given back with work on it"
        assert stream not in self.returned, "a stream given back twice"
        self.returned.append(stream)

    def record(self, stream: FakeStream) -> FakeEvent:
        self._call("record")
        event = FakeEvent(stream.index)

        def happen() -> None:
            event.is_done, event.time = True, self._clock

        self._append(stream, Op(happen, is_event=True))
        return event

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        self._call("wait")
        self._append(stream, Op(lambda: None, [event], is_event=True))

    def is_done(self, event: FakeEvent) -> bool:
        self._unsafe_in_a_capture("query")
        self.run_some()
        return event.is_done

    def synchronize(self, event: FakeEvent) -> None:
        self._unsafe_in_a_capture("synchronize")
        assert not self._in_training(), "the training thread must not wait"
        while (actors := self._runnable()) or not event.is_done:
            if event.is_done:
                return
            assert actors, "an event that never happens"
            actors[self._chooser.choose(len(actors))]()

    def elapsed_s(self, start: FakeEvent, end: FakeEvent) -> float:
        if start.index != end.index:
            raise RuntimeError("elapsed time between events of two devices")
        if not (start.is_done and end.is_done):
            raise RuntimeError("elapsed time of an event that has not happened")
        return float(end.time - start.time)

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        self._call("allocate")
        tensor = self._new(num_bytes, device)
        find = self._place(tensor, alive=False)
        # The memory belongs to the current stream, whose earlier work on it may still be queued.
        self._queue(self.current_stream(device), lambda: find().fill_(0xAB))
        return tensor

    def allocate_host(self, num_bytes: int) -> Tensor:
        self._call("allocate_host")
        return self._new(num_bytes, None)

    def copy(self, pairs: Sequence[Pair], *, stream: FakeStream) -> None:
        self._call("copy")
        self.num_copies += 1
        for target, source in pairs:
            assert target.shape == source.shape
            owners = [self.owner(target), self.owner(source)]
            assert target.dtype is source.dtype or None not in owners
            assert {*owners} - {None} == {stream.index}, "a copy from or to another device"
            for one, owner in zip((target, source), owners, strict=True):
                if owner is None and self._allocation(one) is None:
                    self.registrations.check_copy(one)
            self._queue_copy(target, source, stream)

    def pack(self, targets: list[Tensor], sources: list[Tensor], *, stream: FakeStream) -> None:
        self._call("pack")
        self.num_packs += 1
        assert len({one.dtype for one in (*targets, *sources)}) == 1
        for target, source in zip(targets, sources, strict=True):
            assert self.owner(target) == self.owner(source) == stream.index
            assert (target.shape, target.stride()) == (source.shape, source.stride())
            assert source.is_contiguous()
            assert not source.is_neg()
            assert not source.dtype.is_floating_point or source.element_size() > 2
            self._queue_copy(target, source, stream)

    def keep(self, tensors: Sequence[Tensor], *, stream: FakeStream) -> None:
        self._call("keep")
        for tensor in tensors:
            allocation = self._allocation(tensor)
            assert allocation is not None
            allocation.kept_by.add(stream)

    def free_bytes(self, device: torch.device) -> int | None:
        assert not self._in_training(), "the training thread must not ask the driver"
        return self.memory(device.index).free

    def memory_use(self, device: torch.device) -> MemoryUse:
        return self.memory(device.index).use()

    def segment_bytes(self, num_bytes: int) -> int:
        return num_bytes

    def names(self) -> list[str]:
        return ["fake"]

    def runtime_version(self) -> str:
        return "1"

    def is_capturing(self) -> bool:
        return self._capture is not None and self._in_training()

    def is_in_use(self) -> bool:
        return self.in_use

    def devices(self) -> list[torch.device]:
        used = {one.index for one in self._allocations.values() if one.index is not None}
        return sorted(used | self._current.keys(), key=str)

    def prepare_thread(self) -> None:
        self._relaxed.add(self._thread())
        self.registrations.prepare_thread()

    def register_host(self, address: int, num_bytes: int) -> DriverError | None:
        self._unsafe_in_a_capture("register")
        return self.registrations.register(address, num_bytes)

    def unregister_host(self, address: int) -> DriverError | None:
        return self.registrations.unregister(address)

    # ---- inside

    def _call(self, name: str) -> None:
        self.num_calls += 1
        if self.num_calls == self.fail_at:
            raise RuntimeError("the device refuses")
        if self._capture is not None and self._in_training():
            self._capture.refuse(name)  # it would become a part of the graph

    def _unsafe_in_a_capture(self, name: str) -> None:
        if self._capture is not None:
            self._capture.refuse_unsafe(
                name,
                in_training=self._in_training(),
                is_relaxed=self._thread() in self._relaxed,
            )

    def _thread(self) -> object:
        return self.helper if self.helper.is_running else threading.current_thread()

    def _in_training(self) -> bool:
        return self._thread() == self._training_thread

    def _new_stream(self, device: torch.device, kind: Kind) -> FakeStream:
        stream = FakeStream(device, kind)
        self._streams.append(stream)
        return stream

    def _queue(self, stream: FakeStream, run: Callable[[], object]) -> None:
        self._append(stream, Op(run))

    def _append(self, stream: FakeStream, op: Op) -> None:
        op.after += [s.ops[-1] for s in self._streams if s.ops and s.is_ordered_with(stream)]
        stream.ops.append(op)

    def _queue_copy(self, target: Tensor, source: Tensor, stream: FakeStream) -> None:
        for part_of_target, part_of_source in _torn(target, source):
            to, of = self._place(part_of_target), self._place(part_of_source)
            held = [self.registrations.holder_of(part) for part in (target, source)]

            def run(to: _Find = to, of: _Find = of, held: list[int | None] = held) -> None:
                assert all(one in (None, *self.registrations.ranges) for one in held), "unpinned"
                to().copy_(of())

            self._queue(stream, run)

    def _runnable(self) -> list[Callable[[], None]]:
        while self.eager_events and (
            bookkeeping := [s for s in self._streams if (op := s.runnable()) and op.is_event]
        ):
            for stream in bookkeeping:
                self._run(stream)
        return [
            lambda stream=stream: self._run(stream)  # type: ignore[misc]
            for stream in self._streams
            if stream.runnable()
        ]

    def _run(self, stream: FakeStream) -> None:
        self._clock += 1
        op = stream.ops.popleft()
        op.run()
        op.is_done = True

    def _new(self, num_bytes: int, index: torch.device | None) -> Tensor:
        release = self._take_memory(num_bytes, index)
        block = _Block(b"\xee" * max(num_bytes, 1))
        tensor = torch.frombuffer(block, dtype=torch.uint8)
        address = tensor.data_ptr()

        def freed(_: object) -> None:
            self._allocations.pop(address, None)
            release()

        self._allocations[address] = _Allocation(weakref.ref(block, freed), num_bytes, index)
        return tensor[:num_bytes]

    def _take_memory(self, num_bytes: int, index: torch.device | None) -> Callable[[], None]:
        if index is None:
            return lambda: None
        memory = self.memory(index.index)
        piece = memory.allocate(num_bytes)
        return lambda: memory.release(piece)

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
