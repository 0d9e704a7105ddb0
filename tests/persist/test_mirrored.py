"""The mirror as the trainer knows it, and what a real worker does with one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from checkfreq.config import CFConfig
from checkfreq.mirror.report import Mirrored, MirrorReport, State
from checkfreq.mirror.settings import Mirror
from checkfreq.persist import protocol as p
from checkfreq.persist.client import WorkerClient
from checkfreq.persist.mirrored import MirrorView
from checkfreq.policy.retention import KeepLast
from tests.persist.conftest import HandMadeSlot, request

MIRROR = Mirror("s3://bucket/x")
DEADLINE_S = 60.0


class Seen:
    """Events and uploads that a view told of."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.uploads: list[tuple[float, float | None]] = []

    def record(self, kind: str, step: int, **data: object) -> None:
        self.events.append((kind, step))

    def uploading(self, began_s: float, ended_s: float | None) -> None:
        self.uploads.append((began_s, ended_s))


@pytest.fixture
def seen() -> Seen:
    return Seen()


@pytest.fixture
def view(seen: Seen) -> MirrorView:
    return MirrorView(
        MIRROR, KeepLast(2), record=seen.record, on_upload=seen.uploading, wall=lambda: 160.0
    )


def take(view: MirrorView, state: State, **fields: object) -> tuple[int, ...]:
    return view.take(MirrorReport(state, **fields).to_json())  # type: ignore[arg-type]


def test_an_upload_is_told_when_it_begins_and_when_it_ends(view: MirrorView, seen: Seen) -> None:
    take(view, State.UPLOADING, step=5, began_s=10.0)
    assert seen.uploads == [(10.0, None)]
    take(view, State.IDLE, step=5, began_s=10.0, ended_s=14.0, num_uploaded=1, upload_s=4.0)
    assert seen.uploads == [(10.0, None), (10.0, 14.0)]
    assert seen.events == [("uploaded", 5)]
    assert view.upload_s == 4.0


def test_the_last_upload_waits_for_the_one_in_progress(view: MirrorView) -> None:
    usual: dict[str, object] = {"upload_s": 40.0, "num_uploaded": 1}
    take(view, State.UPLOADING, began_s=time.perf_counter() - 10.0, **usual)
    assert 40.0 <= view.upload_s <= 30.0 + 40.0
    take(view, State.UPLOADING, began_s=time.perf_counter() - 100.0, **usual)
    assert view.upload_s >= 100.0  # it takes longer than usual, and so may the next
    take(view, State.UPLOADING, began_s=time.perf_counter() - 7.0)
    assert view.upload_s >= 7.0  # the first one
    take(view, State.IDLE, **usual)
    assert view.upload_s == 40.0


def test_the_mirrors_own_policy_or_the_runs_decides_what_is_removed(view: MirrorView) -> None:
    there = tuple(Mirrored(step, keep=step == 1) for step in (1, 2, 3, 4))
    assert take(view, State.IDLE, num_uploaded=1, checkpoints=there) == (2,)
    assert take(view, State.IDLE, num_uploaded=1, checkpoints=there) == ()
    mirror = Mirror("s3://bucket/x", retention=KeepLast(1))
    view = MirrorView(mirror, KeepLast(2), record=lambda *a, **k: None)
    assert take(view, State.IDLE, num_uploaded=1, checkpoints=there) == (2, 3)


def test_trouble_and_its_end_are_said(view: MirrorView, caplog: pytest.LogCaptureFixture) -> None:
    for state in (State.FAILING, State.UPLOADING, State.FAILING, State.WAITING, State.FAILING):
        take(view, state, problem="no route", since_s=100.0, uploaded_step=7)
    first, _ = caplog.records
    caplog.clear()
    take(view, State.IDLE, num_uploaded=1)
    (last,) = caplog.records
    assert first.levelno == logging.ERROR
    assert "newest there: step 7): no route" in first.getMessage()
    assert last.levelno == logging.WARNING
    assert "after 60 s" in last.getMessage()


def test_an_end_by_an_error_or_without_the_last_checkpoint_is_said(
    view: MirrorView, caplog: pytest.LogCaptureFixture
) -> None:
    take(view, State.ENDED, uploaded_step=4)
    view.closed(4)
    assert caplog.records == []
    view.closed(5)
    assert "step 5 is not in the mirror" in caplog.text
    take(view, State.ENDED, problem="Traceback")
    assert "has ended with an error" in caplog.text


# A real worker.


@pytest.fixture
def started(tmp_path: Path, slot: HandMadeSlot) -> Iterator[Callable[[Mirror], WorkerClient]]:
    made: list[WorkerClient] = []

    def start(mirror: Mirror) -> WorkerClient:
        client = WorkerClient(tmp_path / "chk", config=CFConfig(mirror=mirror, takeover_s=120.0))
        made.append(client)
        client.start()
        client.wait_opened()
        slot.share(client)
        return client

    yield start
    for client in made:
        client.kill()


def replies(client: WorkerClient, holds: Callable[[p.Message], bool]) -> p.Message:
    """The next reply that is so."""
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        reply = client.poll(timeout_s=1.0)
        if reply is not None and holds(reply):
            return reply
    raise AssertionError("the worker did not say so in time")


def committed(reply: p.Message) -> bool:
    assert not isinstance(reply, p.Failed), reply
    return isinstance(reply, p.Committed)


def in_state(state: State, step: int | None = None) -> Callable[[p.Message], bool]:
    def holds(reply: p.Message) -> bool:
        if not isinstance(reply, p.Mirrored):
            return False
        report = MirrorReport.from_json(reply.report)
        return report.state is state and (step is None or report.uploaded_step == step)

    return holds


def unreachable() -> Mirror:
    """A service that nobody runs."""
    options = {"endpoint": "http://127.0.0.1:1", "allow_http": True, "skip_signature": True}
    return Mirror("s3://bucket/x", options=options)


def test_a_step_not_uploaded_is_not_pruned(started: Callable[[Mirror], WorkerClient]) -> None:
    client = started(unreachable())
    for step in (1, 2, 3):
        client.submit(request(step))
        replies(client, committed)
    client.ask(p.Prune((1, 3)))
    done = replies(client, lambda reply: isinstance(reply, p.Done))
    assert isinstance(done, p.Done)
    assert done.steps == (1,)
    failing = replies(client, in_state(State.FAILING))
    assert isinstance(failing, p.Mirrored)
    assert "127.0.0.1:1" in failing.report["problem"]


def test_a_worker_told_to_close_without_time_to_upload_ends_at_once(
    started: Callable[[Mirror], WorkerClient],
) -> None:
    client = started(unreachable())
    client.submit(request(1))
    replies(client, committed)
    assert client.close(timeout_s=DEADLINE_S, upload_for_s=0.0)
