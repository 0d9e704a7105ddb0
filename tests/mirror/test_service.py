"""The mirror's thread: what it uploads, holds, reports, and how it ends."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from obstore.store import ObjectStore

from checkfreq.errors import StorageError
from checkfreq.mirror.bandwidth import Bandwidth
from checkfreq.mirror.claim import RENEW_EVERY_S, ClaimKeeper, Ownership
from checkfreq.mirror.client import RemoteObjects
from checkfreq.mirror.layout import (
    CLAIM,
    FINISHED,
    MARKS,
    OBJECTS,
    SMALL_MAX_BYTES,
    Finish,
    decode_marks,
    marker_key,
)
from checkfreq.mirror.report import MirrorReport, State
from checkfreq.mirror.service import MirrorService
from checkfreq.mirror.settings import Mirror
from checkfreq.mirror.uploader import UploadAbandonedError, Uploader
from checkfreq.store.store import CheckpointStore
from tests.mirror.checkpoints import MIB, commit, markers, memory_remote, noise

DEADLINE_S = 60.0
MIRROR = Mirror("memory:///m", every_s=0.0)


class Reports:
    """What a service reported, in order."""

    def __init__(self) -> None:
        self._queue: queue.Queue[MirrorReport] = queue.Queue()

    def __call__(self, report: MirrorReport) -> None:
        self._queue.put(report)

    def wait_for(self, holds: Callable[[MirrorReport], bool]) -> MirrorReport:
        """The next report that is so."""
        while True:
            report = self._queue.get(timeout=DEADLINE_S)
            assert report.state is not State.ENDED or not report.problem, report.problem
            if holds(report):
                return report


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "chk")


@pytest.fixture
def remote() -> RemoteObjects:
    return memory_remote(MIRROR)


@pytest.fixture
def reports() -> Reports:
    return Reports()


@pytest.fixture
def start(
    store: CheckpointStore, remote: RemoteObjects, reports: Reports
) -> Iterator[Callable[..., MirrorService]]:
    made: list[MirrorService] = []

    def service(run: str = "one", **changes: object) -> MirrorService:
        arguments = {"report": reports, "connect": lambda mirror: remote, **changes}
        one = MirrorService(MIRROR, store, run=run, **arguments)  # type: ignore[arg-type]
        made.append(one)
        one.start()
        return one

    yield service
    for one in made:
        one.finish(0.0)


def put(store: CheckpointStore, step: int) -> None:
    commit(store, step, {"m.safetensors": {"w": noise(100)}})


def uploaded(step: int) -> Callable[[MirrorReport], bool]:
    return lambda report: report.uploaded_step == step and report.state is State.IDLE


def test_what_an_earlier_run_committed_and_did_not_upload_is_uploaded_at_once(
    store: CheckpointStore, remote: RemoteObjects, reports: Reports, start: Callable[..., object]
) -> None:
    put(store, 1)
    put(store, 2)
    start()
    report = reports.wait_for(uploaded(2))
    assert list(markers(remote)) == [2]
    assert [one.step for one in report.checkpoints] == [2]
    assert report.upload_s > 0


def test_committed_checkpoints_are_uploaded_and_held_until_then(
    store: CheckpointStore,
    remote: RemoteObjects,
    reports: Reports,
    start: Callable[..., MirrorService],
) -> None:
    service = start()
    reports.wait_for(lambda report: report.state is State.IDLE)
    put(store, 1)
    service.committed(1)
    assert 1 in service.held() or 1 in markers(remote)
    reports.wait_for(uploaded(1))
    assert service.held() == frozenset()


def test_the_end_of_a_run_waits_for_its_last_checkpoint_and_gives_the_claim_up(
    store: CheckpointStore,
    remote: RemoteObjects,
    reports: Reports,
    start: Callable[..., MirrorService],
) -> None:
    service = start()
    put(store, 1)
    service.committed(1)
    put(store, 2)
    store.add_mark(2, keep=True, metrics={"loss": float("nan")}, finished=True)
    service.committed(2)
    assert service.finish(DEADLINE_S)
    assert max(markers(remote)) == 2
    assert remote.head(CLAIM) is None
    assert decode_marks(remote.get(MARKS)[0])[2].keep
    assert Finish.decode(remote.get(FINISHED)[0]) == Finish(2, True)


def test_pinned_checkpoints_are_uploaded_after_the_newest(
    store: CheckpointStore, remote: RemoteObjects, reports: Reports, start: Callable[..., object]
) -> None:
    for step in (1, 2, 3):
        put(store, step)
    store.add_mark(1, keep=True)
    start()
    reports.wait_for(lambda report: {one.step for one in report.checkpoints} == {1, 3})
    assert sorted(markers(remote)) == [1, 3]


def test_steps_are_removed_on_request_but_not_the_newest(
    store: CheckpointStore,
    remote: RemoteObjects,
    reports: Reports,
    start: Callable[..., MirrorService],
) -> None:
    service = start()
    for step in (1, 2):
        put(store, step)
        service.committed(step)
        reports.wait_for(uploaded(step))
    service.remove([1, 2], once=2)
    reports.wait_for(lambda report: [one.step for one in report.checkpoints] == [2])
    assert list(markers(remote)) == [2]


def test_a_run_that_went_back_sets_the_other_future_aside(
    store: CheckpointStore,
    remote: RemoteObjects,
    reports: Reports,
    start: Callable[..., MirrorService],
) -> None:
    service = start()
    for step in (1, 5):
        put(store, step)
        service.committed(step)
        reports.wait_for(uploaded(step))
    assert service.finish(DEADLINE_S)
    for path in store.path(5).iterdir():
        path.unlink()
    store.path(5).rmdir()
    again = start()
    put(store, 2)
    again.committed(2, set_aside_after=1)
    reports.wait_for(uploaded(2))
    assert sorted(markers(remote)) == [1, 2]


class Down(RemoteObjects):
    """A service that can be switched off."""

    is_down = True
    num_refused = 0

    def __init__(self, mirror: Mirror, *, store: ObjectStore, only: str = "") -> None:
        super().__init__(mirror, store=store)
        self._only = only

    def put(self, key: str, data: bytes | memoryview) -> str | None:
        if self.is_down and key.startswith(self._only):
            self.num_refused += 1
            raise StorageError(5, "switched off", key)
        return super().put(key, data)


def test_a_service_that_fails_is_tried_again_and_then_gets_the_newest(
    store: CheckpointStore, reports: Reports, start: Callable[..., MirrorService]
) -> None:
    inner = memory_remote(MIRROR)
    down = Down(inner._mirror, store=inner._store)
    service = start(connect=lambda mirror: down)
    report = reports.wait_for(lambda report: report.state is State.FAILING)
    assert "switched off" in report.problem
    assert report.since_s > 0
    put(store, 1)
    service.committed(1)
    put(store, 2)
    service.committed(2)
    down.is_down = False
    reports.wait_for(uploaded(2))
    assert 2 in markers(down)


class Flipping(RemoteObjects):
    """The first large object changes on its way."""

    has_flipped = False

    def put(self, key: str, data: bytes | memoryview) -> str | None:
        if len(data) > MIB and not self.has_flipped:
            self.has_flipped = True
            data = bytes([data[0] ^ 1]) + bytes(data[1:])
        return super().put(key, data)


def test_a_shared_object_that_was_damaged_on_its_way_is_found_and_sent_again(
    store: CheckpointStore, reports: Reports, start: Callable[..., MirrorService]
) -> None:
    inner = memory_remote(MIRROR)
    remote = Flipping(inner._mirror, store=inner._store)
    service = start(connect=lambda mirror: remote)
    frozen = noise(9 * MIB)
    for step in (1, 2):
        commit(store, step, {"m.safetensors": {"w": noise(100), "frozen": frozen}})
        service.committed(step)
        reports.wait_for(uploaded(step))
    report = reports.wait_for(lambda report: bool(report.damaged))
    assert "was read back with the digest" in report.damaged
    reports.wait_for(lambda report: report.num_uploaded == 3)
    assert sorted(markers(remote)) == [1, 2]  # and every object has its content


class Clock:
    """Time that a test moves on."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_at_the_end_of_a_run_a_long_pause_is_cut_short(
    store: CheckpointStore, reports: Reports, start: Callable[..., MirrorService]
) -> None:
    inner, clock = memory_remote(MIRROR), Clock()
    down = Down(inner._mirror, store=inner._store)
    service = start(connect=lambda mirror: down, clock=clock)
    reports.wait_for(lambda report: report.state is State.FAILING)
    for _ in range(8):  # pauses grow to a minute and more
        service._backoff.failed(clock.now_s)
    assert service._pause_s(service._backoff, clock.now_s + 30.0) > 0
    service._end_by_s = clock.now_s + 300.0
    assert service._pause_s(service._backoff, clock.now_s + 30.0) == 0


def test_at_the_end_of_a_run_a_service_that_has_been_failing_is_tried_once(
    store: CheckpointStore, reports: Reports, start: Callable[..., MirrorService]
) -> None:
    inner = memory_remote(MIRROR)
    down = Down(inner._mirror, store=inner._store)
    put(store, 1)
    service = start(connect=lambda mirror: down, clock=Clock())  # pauses never end
    for _ in range(2):
        reports.wait_for(lambda report: report.state is State.FAILING)
    num_tries = down.num_refused
    assert service.finish(DEADLINE_S)
    assert down.num_refused == num_tries + 1


def test_a_trouble_lasts_until_an_upload_succeeds_whatever_else_does(
    store: CheckpointStore, reports: Reports, start: Callable[..., MirrorService]
) -> None:
    inner = memory_remote(MIRROR)
    down = Down(inner._mirror, store=inner._store, only=OBJECTS)
    put(store, 1)
    start(connect=lambda mirror: down)
    first = reports.wait_for(lambda report: report.state is State.FAILING)
    for _ in range(2):  # it is tried again, and the claim is well
        again = reports.wait_for(lambda report: report.state is not State.UPLOADING)
        assert (again.state, again.since_s) == (State.FAILING, first.since_s)
        assert "switched off" in again.problem
    down.is_down = False
    during = reports.wait_for(lambda report: True)
    assert (during.state, during.since_s) == (State.UPLOADING, first.since_s)
    after = reports.wait_for(uploaded(1))
    assert (after.problem, after.since_s) == ("", 0.0)


@pytest.mark.parametrize("key", [CLAIM, MARKS, FINISHED, marker_key(7)])
def test_an_object_that_is_too_large_keeps_nothing_from_being_uploaded(
    store: CheckpointStore,
    remote: RemoteObjects,
    reports: Reports,
    start: Callable[..., MirrorService],
    key: str,
) -> None:
    clock = Clock()
    remote.put(key, bytes(SMALL_MAX_BYTES + 1))
    put(store, 1)
    start(clock=clock)
    if key == CLAIM:  # as any that cannot be read, it may be another run's for a minute
        reports.wait_for(lambda report: report.state is State.WAITING)
        clock.now_s += 100.0
    assert reports.wait_for(lambda report: report.uploaded_step == 1).problem == ""


class KeepsAll(RemoteObjects):
    """A service that lets nobody remove anything."""

    def delete(self, keys: Sequence[str]) -> None:
        raise StorageError(13, "not allowed", keys[0])


def test_where_nothing_can_be_removed_that_is_said_once_and_uploads_go_on(
    store: CheckpointStore, reports: Reports, start: Callable[..., MirrorService]
) -> None:
    inner = memory_remote(MIRROR)
    keeps = KeepsAll(inner._mirror, store=inner._store)
    service = start(connect=lambda mirror: keeps)
    told = []
    for step in (1, 2, 3):
        put(store, step)
        service.committed(step)
        reports.wait_for(uploaded(step))
        service.remove([step - 1], once=step)
        told.append(reports.wait_for(lambda report: report.state is State.IDLE).problem)
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
        (12.0, 0.25, False),
        (9.0, 0.0, False),  # the newest cannot arrive any more, this one may
        (0.0, 1.0, True),
        (0.0, None, False),  # all is sent: it gets its marker
    ],
)
def test_an_upload_in_progress_is_given_up_for_the_newest_only_if_that_can_arrive_in_time(
    store: CheckpointStore, left_s: float, sending: float | None, is_given_up: bool
) -> None:
    clock = Clock()
    service = MirrorService(MIRROR, store, run="one", report=lambda report: None, clock=clock)
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


@pytest.mark.parametrize(
    ("left_s", "in_s"),
    [
        (1000.0, 0.0),
        (30.0, 0.0),  # 10 s for this one, 10 s for the last one, 5 s to spare for each
        (29.0, 14.0),
        (16.0, 1.0),
        (15.0, 0.0),  # no last one came
        (-1.0, 0.0),  # the run goes on after its end
    ],
)
def test_an_upload_that_would_be_in_the_way_of_the_last_one_does_not_begin(
    store: CheckpointStore, left_s: float, in_s: float
) -> None:
    service = MirrorService(
        MIRROR, store, run="one", report=lambda report: None, ends_at_s=lambda: 1000.0 + left_s
    )
    assert service._upload_in_s(1000.0) == 0.0  # nobody knows yet how long one takes
    service._recent_s.append(10.0)
    assert service._upload_in_s(1000.0) == in_s
    service._end_by_s = 1000.0 + left_s
    assert service._upload_in_s(1000.0) == 0.0


def test_a_damaged_checkpoint_is_reported_and_the_next_one_uploaded(
    store: CheckpointStore,
    remote: RemoteObjects,
    reports: Reports,
    start: Callable[..., MirrorService],
) -> None:
    put(store, 1)
    path = store.path(1) / "m.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    service = start()
    report = reports.wait_for(lambda report: bool(report.problem))
    assert "digest of the 100 bytes" in report.problem
    put(store, 2)
    service.committed(2)
    reports.wait_for(uploaded(2))
    assert list(markers(remote)) == [2]


def test_an_earlier_worker_that_is_still_uploading_is_waited_for(
    store: CheckpointStore, reports: Reports, start: Callable[..., MirrorService]
) -> None:
    is_free = False
    put(store, 1)
    start(try_lock=lambda: is_free)
    report = reports.wait_for(lambda report: report.state is State.WAITING)
    assert "earlier worker" in report.problem
    is_free = True
    reports.wait_for(uploaded(1))


def test_a_second_run_waits_for_the_first_ones_claim(
    store: CheckpointStore,
    remote: RemoteObjects,
    reports: Reports,
    start: Callable[..., MirrorService],
) -> None:
    start("one")
    reports.wait_for(lambda report: report.state is State.IDLE)
    second = start("two")
    report = reports.wait_for(lambda report: report.state is State.WAITING)
    assert "run one" in report.problem
    put(store, 1)
    second.committed(1)
    assert second.held() == {1}
    assert markers(remote) == {}


class Renewed:
    """Another run's claim, which is alive while a test says so."""

    def __init__(self, remote: RemoteObjects, clock: Clock) -> None:
        self._keeper = ClaimKeeper(remote, run="other", clock=clock, wall=clock)
        self._clock = clock
        assert self._keeper.take() is Ownership.OURS
        self.release = self._keeper.release

    def refuse(self, service: MirrorService, reports: Reports) -> None:
        """Renew it once ``service`` has seen it."""
        reports.wait_for(lambda report: report.state is State.WAITING)
        self._clock.now_s += RENEW_EVERY_S
        assert self._keeper.renew_if_due()
        service.marks_changed()  # it looks up
        reports.wait_for(lambda report: report.state is State.REFUSED)


def test_a_run_that_was_refused_uploads_once_the_other_has_ended_and_leaves_its_checkpoints(
    store: CheckpointStore,
    remote: RemoteObjects,
    reports: Reports,
    start: Callable[..., MirrorService],
    tmp_path: Path,
) -> None:
    clock = Clock()
    other = Renewed(remote, clock)
    service = start(clock=clock)
    other.refuse(service, reports)
    for step in (3, 4):
        put(store, step)
        service.committed(step)
    theirs = CheckpointStore(tmp_path / "other")
    put(theirs, 5)
    Uploader(
        remote, theirs, bandwidth=Bandwidth(None), part_bytes=16 << 20, go_on=lambda sending: None
    ).upload(5)
    other.release()
    clock.now_s += RENEW_EVERY_S
    service.marks_changed()
    report = reports.wait_for(lambda report: report.state is State.IDLE)
    assert (report.uploaded_step, report.held) == (5, ())
    put(store, 6)
    service.committed(6)
    reports.wait_for(uploaded(6))
    assert sorted(markers(remote)) == [5, 6]


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_refused_run_that_ends_asks_once_more_and_waits_no_longer(
    store: CheckpointStore,
    remote: RemoteObjects,
    reports: Reports,
    start: Callable[..., MirrorService],
    is_alive: bool,
) -> None:
    clock = Clock()
    other = Renewed(remote, clock)
    service = start(clock=clock)
    other.refuse(service, reports)
    put(store, 1)
    service.committed(1)
    if not is_alive:
        other.release()
    assert service.finish(DEADLINE_S)  # on a clock that stands still: it has waited for nothing
    assert sorted(markers(remote)) == ([] if is_alive else [1])


def test_an_end_without_time_uploads_nothing_and_is_reported(
    store: CheckpointStore, remote: RemoteObjects, start: Callable[..., MirrorService]
) -> None:
    service = start(try_lock=lambda: False)
    put(store, 1)
    service.committed(1)
    assert service.finish(0.0)
    assert markers(remote) == {}


def test_a_report_arrives_as_it_was_sent() -> None:
    report = MirrorReport(State.FAILING, step=3, problem="x", held=(1, 2))
    assert MirrorReport.from_json(report.to_json()) == report
