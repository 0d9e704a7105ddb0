"""The mirror's thread: what it uploads, holds, reports, and how it ends."""

from __future__ import annotations

import contextlib
import queue
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from checkfreq.errors import StorageError
from checkfreq.mirror.claim import ClaimKeeper, Ownership
from checkfreq.mirror.client import RemoteObjects
from checkfreq.mirror.layout import (
    CLAIM,
    FINISHED,
    MARKS,
    OBJECTS,
    Finish,
    decode_marks,
)
from checkfreq.mirror.report import MirrorReport, State
from checkfreq.mirror.service import MirrorService
from checkfreq.mirror.settings import Mirror
from checkfreq.mirror.uploader import UploadAbandonedError
from tests.mirror.checkpoints import MIB, Place, commit, markers, memory_remote, noise

DEADLINE_S = 60.0
MIRROR = Mirror("memory:///m", every_s=0.0)


class World(Place):
    """With services, and what they reported, in order."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, MIRROR)
        self.clock = Clock()
        self._queue: queue.Queue[MirrorReport] = queue.Queue()
        self._made: list[MirrorService] = []

    def start(self, run: str = "one", **changes: Any) -> MirrorService:
        arguments = {"report": self._queue.put, "connect": lambda mirror: self.remote, **changes}
        one = MirrorService(MIRROR, self.store, run=run, **arguments)
        self._made.append(one)
        one.start()
        return one

    def end(self) -> None:
        for one in self._made:
            one.finish(0.0)

    def put(self, step: int, to: MirrorService | None = None, **tensors: bytes) -> None:
        """Commit a step, and tell a service of it."""
        commit(self.store, step, {"m.safetensors": {"w": noise(100), **tensors}})
        if to is not None:
            to.committed(step)

    def wait_for(self, holds: Callable[[MirrorReport], bool]) -> MirrorReport:
        """The next report that is so."""
        while True:
            report = self._queue.get(timeout=DEADLINE_S)
            assert report.state is not State.ENDED or not report.problem, report.problem
            if holds(report):
                return report

    def wait_state(self, state: State) -> MirrorReport:
        return self.wait_for(lambda report: report.state is state)

    def wait_uploaded(self, step: int) -> MirrorReport:
        return self.wait_for(
            lambda report: report.uploaded_step == step and report.state is State.IDLE
        )

    def there(self) -> list[int]:
        """The steps of the mirror, each of which is whole."""
        return sorted(markers(self.remote))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "chk")
    yield made
    made.end()


class Clock:
    """Time that a test moves on."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_what_an_earlier_run_did_not_upload_is_uploaded_at_once(world: World) -> None:
    """The newest, and then what is pinned."""
    for step in (1, 2, 3):
        world.put(step)
    world.store.add_mark(1, keep=True)
    world.start()
    assert world.wait_uploaded(3).upload_s > 0
    world.wait_for(lambda report: {one.step for one in report.checkpoints} == {1, 3})
    assert world.there() == [1, 3]


def test_a_checkpoint_is_held_until_it_is_uploaded_and_the_newest_longer(world: World) -> None:
    service = world.start()
    world.wait_state(State.IDLE)
    for step in (1, 2):
        world.put(step, service)
        assert step in service.held() or step in world.there()
        world.wait_uploaded(step)
        assert service.held() == frozenset()
    service.remove([1, 2], once=2)
    world.wait_for(lambda report: [one.step for one in report.checkpoints] == [2])
    assert world.there() == [2]


def test_the_end_waits_for_the_last_checkpoint_and_gives_the_claim_up(world: World) -> None:
    service = world.start()
    world.put(1, service)
    world.put(2)
    world.store.add_mark(2, keep=True, metrics={"loss": float("nan")}, finished=True)
    service.committed(2)
    assert service.finish(DEADLINE_S)
    assert max(world.there()) == 2
    assert world.remote.head(CLAIM) is None
    assert decode_marks(world.remote.get(MARKS)[0])[2].keep
    assert Finish.decode(world.remote.get(FINISHED)[0]) == Finish(2, True)


def test_a_run_that_went_back_sets_the_other_future_aside(world: World) -> None:
    service = world.start()
    for step in (1, 5):
        world.put(step, service)
        world.wait_uploaded(step)
    assert service.finish(DEADLINE_S)
    shutil.rmtree(world.store.path(5))
    again = world.start()
    world.put(2)
    again.committed(2, set_aside_after=1)
    world.wait_uploaded(2)
    assert world.there() == [1, 2]


class Down(RemoteObjects):
    """A service that can be switched off, for the keys that begin so."""

    is_down = True
    num_refused = 0
    only = ""

    def put(self, key: str, data: bytes | memoryview) -> str | None:
        if self.is_down and key.startswith(self.only):
            self.num_refused += 1
            raise StorageError(5, "switched off", key)
        return super().put(key, data)


def test_a_trouble_lasts_until_an_upload_succeeds_whatever_else_does(world: World) -> None:
    down = world.serve(Down)
    down.only = OBJECTS
    world.put(1)
    service = world.start()
    first = world.wait_state(State.FAILING)
    again = world.wait_for(lambda report: report.state is not State.UPLOADING)
    assert (again.state, again.since_s) == (State.FAILING, first.since_s)  # the claim is well
    assert "switched off" in again.problem
    world.put(2, service)
    down.is_down = False
    during = world.wait_state(State.UPLOADING)
    assert during.since_s == first.since_s > 0
    after = world.wait_uploaded(2)
    assert (after.problem, after.since_s) == ("", 0.0)
    assert 2 in world.there()


class Flipping(RemoteObjects):
    """The first large object changes on its way."""

    has_flipped = False

    def put(self, key: str, data: bytes | memoryview) -> str | None:
        if len(data) > MIB and not self.has_flipped:
            self.has_flipped = True
            data = bytes([data[0] ^ 1]) + bytes(data[1:])
        return super().put(key, data)


def test_a_shared_object_that_was_damaged_on_its_way_is_found_and_sent_again(world: World) -> None:
    world.serve(Flipping)
    service, frozen = world.start(), noise(9 * MIB)
    for step in (1, 2):
        world.put(step, service, frozen=frozen)
        world.wait_uploaded(step)
    report = world.wait_for(lambda report: bool(report.damaged))
    assert "was read back with the digest" in report.damaged
    world.wait_for(lambda report: report.num_uploaded == 3)
    assert world.there() == [1, 2]  # and every object has its content


def test_at_the_end_a_service_that_was_failing_is_tried_once_more_at_once(world: World) -> None:
    down = world.serve(Down)
    world.put(1)
    service = world.start(clock=world.clock)  # pauses never end
    for _ in range(2):
        world.wait_state(State.FAILING)
    num_tries = down.num_refused
    assert service.finish(DEADLINE_S)
    assert down.num_refused == num_tries + 1


class KeepsAll(RemoteObjects):
    """A service that lets nobody remove anything."""

    def delete(self, keys: Sequence[str]) -> None:
        raise StorageError(13, "not allowed", keys[0])


def test_where_nothing_can_be_removed_that_is_said_once_and_uploads_go_on(world: World) -> None:
    world.serve(KeepsAll)
    service = world.start()
    told = []
    for step in (1, 2, 3):
        world.put(step, service)
        world.wait_uploaded(step)
        service.remove([step - 1], once=step)
        told.append(world.wait_state(State.IDLE).problem)
    assert told[0] == ""  # there was nothing to remove
    assert "nothing can be removed there" in told[1]
    assert told[2] == ""


@pytest.mark.parametrize(
    ("left_s", "sending", "is_given_up"),
    [
        (300.0, 1.0, True),  # at the end of a run there is time for the newest
        (16.5, 1.0, True),  # 6 s for this one, all of which is being sent, and 10 s for the newest
        (15.5, 1.0, False),
        (13.0, 0.25, True),  # four of its sixteen pieces are being sent
        (9.0, 0.0, False),  # the newest cannot arrive any more, this one may
        (0.0, None, False),  # all is sent: it gets its marker
    ],
)
def test_an_upload_in_progress_is_given_up_for_the_newest_only_if_that_can_arrive_in_time(
    world: World, left_s: float, sending: float | None, is_given_up: bool
) -> None:
    clock = world.clock
    service = MirrorService(MIRROR, world.store, run="one", report=lambda report: None, clock=clock)
    service._claim = ClaimKeeper(memory_remote(), run="one", clock=clock)
    assert service._claim.take() is Ownership.OURS
    service._recent_s.append(10.0)
    service._began_s = clock.now_s - 4.0
    service._queue.begin(1, now_s=service._began_s)
    service._queue.committed(2)
    service._go_on(1.0)  # the run goes on: nothing is given up
    service._queue.hurry()
    service._end_by_s = clock.now_s + left_s
    with pytest.raises(UploadAbandonedError) if is_given_up else contextlib.nullcontext():
        service._go_on(sending)


def test_a_damaged_checkpoint_is_reported_and_the_next_one_uploaded(world: World) -> None:
    world.put(1)
    path = world.store.path(1) / "m.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    service = world.start()
    report = world.wait_for(lambda report: bool(report.problem))
    assert "digest of the 100 bytes" in report.problem
    world.put(2, service)
    world.wait_uploaded(2)
    assert world.there() == [2]


def test_an_earlier_worker_that_uploads_is_waited_for_but_not_at_the_end(world: World) -> None:
    is_free = False
    world.put(1)
    service = world.start(try_lock=lambda: is_free)
    assert "earlier worker" in world.wait_state(State.WAITING).problem
    assert service.finish(0.0)
    assert world.there() == []
    world.start(try_lock=lambda: is_free)
    is_free = True
    world.wait_uploaded(1)
