"""The mirror's thread: what it uploads, holds, reports, and how it ends."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from checkfreq.errors import StorageError
from checkfreq.mirror.client import RemoteObjects
from checkfreq.mirror.layout import CLAIM, FINISHED, MARKS, Finish, decode_marks
from checkfreq.mirror.report import MirrorReport, State
from checkfreq.mirror.service import MirrorService
from checkfreq.mirror.settings import Mirror
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

    def put(self, key: str, data: bytes | memoryview) -> str | None:
        if self.is_down:
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
    assert service._pause_s(clock.now_s + 30.0) > 0
    service._end_by_s = clock.now_s + 300.0
    assert service._pause_s(clock.now_s + 30.0) == 0


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
