"""The contract's notices: a run that is told when it ends, by a real worker that asks."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkfreq import CFManager, Mirror
from checkfreq.errors import DirectoryBusyError, StorageError
from checkfreq.events import StopRecord
from checkfreq.persist.lock import DirectoryLock
from checkfreq.store.store import CheckpointStore
from iterators import CFIterator, TrainingStopped
from tests.contract.conftest import Hold
from tests.contract.runs import Training, config, loader, managed, running, train
from tests.notices.conftest import Install, Server, command, server

__all__ = ["command", "server"]

_LONG_S = 120.0


def in_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)


def events(chk_dir: Path, kind: str) -> list[dict[str, Any]]:
    lines = (chk_dir / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == kind]


def train_until(
    training: Training, manager: CFManager, is_reached: Callable[[], bool], what: str
) -> None:
    """Iterations until something outside has happened."""
    deadline_s = time.monotonic() + _LONG_S
    while not is_reached():
        assert time.monotonic() < deadline_s, f"trained in vain until {what}"
        training.steps(manager, 1)


def stopped_at(chk_dir: Path, training: Training, **settings: Any) -> CFManager:
    """Train until the run stops by itself."""
    with managed(chk_dir, training.chk, config=config(**settings)) as manager:
        train_until(training, manager, lambda: manager.stopped, "it stops")
    return manager


def test_iterators_stop_as_after_a_signal_and_the_run_is_continued_to_the_same_bits(
    chk_dir: Path, tmp_path: Path
) -> None:
    epochs = 40  # enough for the worker to start, and to say that the deadline is over
    reference = Training()
    with managed(tmp_path / "reference", reference.chk) as manager:
        train(reference, manager, CFIterator(loader(), cf_manager=manager), epochs)
        bits = reference.bits()
    training, past = Training(), config(deadline=time.time() - 1.0)
    manager = managed(chk_dir, training.chk, config=past)
    with manager, pytest.raises(TrainingStopped) as caught:
        train(training, manager, CFIterator(loader(), cf_manager=manager), epochs)
    assert caught.value.code == 75
    with running(chk_dir, seed=1) as (training, manager):
        iterator = CFIterator(loader(), cf_manager=manager)
        assert manager.restore()
        train(training, manager, iterator, epochs)
        assert training.bits() == bits


def test_a_notice_that_comes_during_a_restore_stops_the_run_at_its_first_boundary(
    chk_dir: Path, monkeypatch: pytest.MonkeyPatch, command: Install
) -> None:
    with managed(chk_dir, Training().chk) as manager:
        manager.save(wait=True)
    in_job(monkeypatch)
    called = command("squeue", "echo INVALID")
    with running(chk_dir) as (training, manager):
        assert manager.restore()
        until = time.monotonic() + _LONG_S
        while not called.exists():
            assert time.monotonic() < until, "nobody asked squeue"
            threading.Event().wait(0.01)
        train_until(training, manager, lambda: manager.stopped, "it stops")
    assert events(chk_dir, "stop")[0]["signal"] == "slurm"


def board_end(manager: CFManager) -> float | None:
    """Seconds until the end that the run knows of."""
    end = manager._session.last_moment.end()
    return None if end is None else end.ends_in_s


def test_a_time_limit_that_is_extended_lets_training_go_on_and_a_new_worker_goes_on_watching(
    chk_dir: Path, monkeypatch: pytest.MonkeyPatch, command: Install
) -> None:
    """The environment has the first limit, which is over soon; squeue has the new one."""
    in_job(monkeypatch)
    monkeypatch.setenv("SLURM_JOB_END_TIME", f"{time.time() + 2.0:.0f}")
    called = command("squeue", "echo 1:00:00")
    with running(chk_dir) as (training, manager):
        train_until(training, manager, lambda: bool(board_end(manager)), "squeue has answered")
        training.steps(manager, 3)
        assert not manager.should_stop
        assert (board_end(manager) or 0.0) > 3000.0
        manager._persistence._client.kill()
        asked_again = lambda: len(called.read_text().splitlines()) == 2  # noqa: E731
        train_until(training, manager, asked_again, "the new worker asks")
        assert not manager.should_stop


# ---- spot machines


@pytest.mark.more
def test_a_notice_that_is_taken_back_lets_training_go_on(chk_dir: Path, server: Server) -> None:
    root = "GET /computeMetadata/v1/instance/"
    server.headers["Metadata-Flavor"] = "Google"
    server.answers |= {
        f"{root}preempted": (200, "FALSE"),
        f"{root}maintenance-event": (200, "TERMINATE_ON_HOST_MAINTENANCE"),
    }
    training, asked = Training(), config(notices=("gcp",), metadata_url=server.url)
    with managed(chk_dir, training.chk, config=asked) as manager:
        train_until(training, manager, lambda: bool(board_end(manager)), "the notice comes")
        server.answers[f"{root}maintenance-event"] = (200, "NONE")
        train_until(training, manager, lambda: board_end(manager) is None, "it is taken back")
        training.steps(manager, 3)
        assert not manager.should_stop
    texts = [event["text"] for event in events(chk_dir, "notice")]
    assert [text.split(": ")[1] for text in texts][1] == "no longer so"


# ---- on_stop


def test_what_on_stop_raises_is_logged_and_outside_slurm_a_requeue_says_what_to_do(
    chk_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_stop(record: StopRecord) -> None:
        raise RuntimeError("the pager is broken")

    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with running(chk_dir, config=config(on_stop=on_stop, requeue=True)) as (training, manager):
        training.steps(manager, 1)
        os.kill(os.getpid(), signal.SIGTERM)
        training.steps(manager, 1)
        assert manager.stopped
    assert caplog.text.count("CFConfig.on_stop raised at step 2") == 2
    assert "this is no SLURM job" in caplog.text


# ---- grace


def test_on_stop_is_told_before_and_after_and_a_second_sigterm_meanwhile_changes_nothing(
    chk_dir: Path, hold_worker: Hold
) -> None:
    gate = hold_worker("commit.rename")

    def notify_again() -> None:
        gate.wait_reached()
        os.kill(os.getpid(), signal.SIGTERM)
        gate.open()

    told: list[tuple[StopRecord, list[int]]] = []

    def on_stop(record: StopRecord) -> None:
        told.append((record, CheckpointStore(chk_dir).steps()))

    training, before = Training(), time.time()
    settings = config(on_stop=on_stop, stop_grace_s=1000.0)
    with managed(chk_dir, training.chk, config=settings) as manager:
        training.steps(manager, 1)
        os.kill(os.getpid(), signal.SIGTERM)
        again = threading.Thread(target=notify_again)
        again.start()
        training.steps(manager, 1)
        again.join()
        assert manager.stopped
        training.steps(manager, 1)
    assert [(record.is_durable, steps) for record, steps in told] == [(False, []), (True, [2])]
    first = told[0][0]
    assert (first.source, first.why, first.step) == ("SIGTERM", "SIGTERM received", 2)
    assert before + 900.0 < (first.ends_at_unix_s or 0.0) < time.time() + 1000.0


# ---- requeue


def test_a_job_that_finds_its_directory_in_use_is_requeued(
    chk_dir: Path, monkeypatch: pytest.MonkeyPatch, command: Install
) -> None:
    in_job(monkeypatch)
    command("squeue", "echo UNLIMITED")
    called = command("scontrol", "true")
    chk_dir.mkdir()
    lock = DirectoryLock(chk_dir)
    assert lock.try_now(owner_pid=4711)
    busy = config(requeue=True, takeover_s=0.0)
    with (
        pytest.raises(DirectoryBusyError, match="still locked by .* 4711"),
        managed(chk_dir, Training().chk, config=busy) as manager,
    ):
        manager.restore()
    lock.release()
    assert called.read_text() == "requeue 42\n"


@pytest.mark.parametrize("num_restarts", [0, 1])
def test_a_job_whose_mirror_does_not_answer_is_requeued_if_it_did_before(
    chk_dir: Path, monkeypatch: pytest.MonkeyPatch, command: Install, num_restarts: int
) -> None:
    """At the first start it may be the URL that is wrong, and so it would be for ever."""
    in_job(monkeypatch)
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(num_restarts))
    command("squeue", "echo UNLIMITED")
    called = command("scontrol", "true")
    with managed(chk_dir, Training().chk) as manager:
        manager.save(wait=True)
    monkeypatch.setattr("checkfreq.mirror.reader._FIRST_PAUSE_S", 0.01)
    with socket.create_server(("127.0.0.1", 0)) as server:
        nobody = f"http://127.0.0.1:{server.getsockname()[1]}"
    options = {"endpoint": nobody, "access_key_id": "1", "secret_access_key": "2"}
    mirror = Mirror("s3://bucket/run", options=options, wait_on_close_s=0.0)
    with (
        pytest.raises(StorageError, match="cannot list"),
        managed(chk_dir, Training().chk, config=config(requeue=True, mirror=mirror)) as manager,
    ):
        manager.restore()
    assert called.exists() is bool(num_restarts)


@pytest.mark.parametrize(("status", "says"), [(0, "is requeued"), (1, "sbatch --dependency")])
def test_a_stopped_job_is_requeued_once_everything_is_durable(
    chk_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    command: Install,
    status: int,
    says: str,
) -> None:
    caplog.set_level("INFO")
    in_job(monkeypatch)
    command("squeue", "echo UNLIMITED")
    called = command("scontrol", f"ls {chk_dir} >> {chk_dir}.seen; exit {status}")
    with running(chk_dir, config=config(requeue=True)) as (training, manager):
        training.steps(manager, 1)
        os.kill(os.getpid(), signal.SIGTERM)
        training.steps(manager, 1)
        assert not called.exists()
    assert called.read_text() == "requeue 42\n"
    assert "step-00000002" in Path(f"{chk_dir}.seen").read_text()
    assert says in caplog.text


def test_a_job_that_was_not_stopped_is_finished_or_past_its_own_deadline_is_not_requeued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Install
) -> None:
    """After a deadline of one's own the next job would have the same, and so on for ever."""
    in_job(monkeypatch)
    command("squeue", "echo UNLIMITED")
    called = command("scontrol", "true")
    for name in ("closed", "finished"):
        training = Training()
        manager = managed(tmp_path / name, training.chk, config=config(requeue=True))
        training.steps(manager, 1)
        if name == "finished":
            os.kill(os.getpid(), signal.SIGTERM)
            training.steps(manager, 1)
            manager.finish()
        manager.close()
    stopped_at(tmp_path / "past", Training(), deadline=time.time() - 1.0, requeue=True)
    assert not called.exists()
