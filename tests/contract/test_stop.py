"""The contract's stop notices: ``should_stop``, ``TrainingStopped``, ``on_stop``."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from checkfreq import CFManager
from checkfreq.errors import PersistError
from checkfreq.store.store import CheckpointStore
from iterators import CFIterator, TrainingStopped
from tests.contract.conftest import Hold, SetFault
from tests.contract.runs import Training, config, loader, managed, running, train
from tests.fork_server import FORK_SERVER


def notify(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def stopped_run(
    chk_dir: Path, training: Training, *, at: list[int] | None = None, epochs: int = 5
) -> CFManager:
    """Train, with a signal in the batch before boundary ``at`` (default: in the second)."""
    with managed(chk_dir, training.chk) as manager:

        def each() -> None:
            if manager.global_step + 1 in (at or [2]):
                notify()

        train(training, manager, CFIterator(loader(), cf_manager=manager), epochs, each=each)
        raise AssertionError("code after training ran")
    return manager


def test_on_stop_return_ends_them_quietly(chk_dir: Path) -> None:
    training = Training()
    after_training = []
    with managed(chk_dir, training.chk) as manager:
        iterator = CFIterator(loader(), cf_manager=manager, on_stop="return")
        train(training, manager, iterator, 5, each=lambda: manager.global_step and notify())
        after_training.append(manager.global_step)
    assert after_training == [2]
    assert CheckpointStore(chk_dir).steps() == [2]


def test_a_signal_in_an_epochs_last_batch_is_honoured_after_the_epochs_tail(chk_dir: Path) -> None:
    with pytest.raises(TrainingStopped):
        stopped_run(chk_dir, Training(), at=[3])
    assert CheckpointStore(chk_dir).steps() == [3]
    position = CheckpointStore(chk_dir).manifest(3).objects["$positions"]["train"]
    assert (position["epoch"], position["position"]) == (1, 0)


def test_a_final_checkpoint_that_cannot_be_made_raises_and_never_claims_to_have_stopped(
    chk_dir: Path, worker_fault: SetFault
) -> None:
    worker_fault("commit.rename:raise-EIO:*")
    training = Training()
    manager = managed(chk_dir, training.chk)
    training.steps(manager, 1)
    notify()
    training.update(manager)
    with pytest.raises(PersistError, match="step 2"):
        manager.step()
    assert not manager.stopped
    with pytest.raises(PersistError):
        manager.close()


def test_sigterm_shortens_a_wait_that_has_begun(chk_dir: Path, hold_worker: Hold) -> None:
    gate = hold_worker("commit.sync_payload")
    training = Training()
    manager = managed(chk_dir, training.chk, config=config(stop_grace_s=2.0))
    training.steps(manager, 1)
    notify(signal.SIGUSR1)
    killer = threading.Thread(target=lambda: (gate.wait_reached(), notify()))
    killer.start()
    training.update(manager)
    with pytest.raises(PersistError, match="in vain"):
        manager.step()
    killer.join()
    with pytest.raises(PersistError):
        manager.close()


def test_the_handler_it_replaced_is_called_too_and_put_back_at_close(chk_dir: Path) -> None:
    calls: list[int] = []

    def mine(number: int, frame: object) -> None:
        calls.append(number)

    signal.signal(signal.SIGUSR1, mine)
    with running(chk_dir) as (training, manager):
        training.steps(manager, 1)
        notify(signal.SIGUSR1)
        assert manager.should_stop
        assert calls == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGUSR1) is mine
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    with managed(chk_dir, training.chk, fresh=True) as manager:
        training.steps(manager, 1)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # later, by somebody else: it stays
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN


def test_two_managers_closed_in_the_order_they_were_made_leave_the_handler_in_charge(
    tmp_path: Path,
) -> None:
    calls: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: calls.append(number))
    training = Training()
    managers = [managed(tmp_path / name, training.chk) for name in ("a", "b")]
    for manager in managers:
        training.steps(manager, 1)
    for manager in managers:
        manager.close()
    notify(signal.SIGUSR1)
    assert calls == [signal.SIGUSR1]
    assert not any(manager.should_stop for manager in managers)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_ends_by_the_signal_as_if_nobody_watched(chk_dir: Path) -> None:
    with running(chk_dir) as (training, manager):
        training.steps(manager, 1)
        child = os.fork()
        if child == 0:
            try:
                notify()
            finally:
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert not manager.should_stop


def test_outside_the_main_thread_it_says_that_signals_are_not_watched(
    chk_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def make() -> None:
        with running(chk_dir) as (training, manager):
            training.steps(manager, 1)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert "stop signals are not watched" in caplog.text
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


PLACES = ("in restore", "in the first step", "in the first iteration")


def _hang(chk_dir: Path, place: str, there: threading.Event) -> None:
    """A run that gets no further than ``place`` within the test's time."""
    with running(chk_dir, config=config(takeover_s=100.0)) as (training, manager):
        if place == "in restore":
            there.set()
            manager.restore()
        training.update(manager)
        there.set()
        if place == "in the first step":
            manager.step()
        threading.Event().wait(100.0)


@pytest.mark.parametrize("place", PLACES)
def test_a_run_that_hangs_before_its_first_boundary_still_dies_of_a_stop_signal(
    chk_dir: Path, place: str
) -> None:
    with managed(chk_dir, Training().chk) as holder:  # whoever opens the directory waits for it
        holder.save(wait=True)
        there = FORK_SERVER.Event()
        run = FORK_SERVER.Process(target=_hang, args=(chk_dir, place, there))
        run.start()
        assert there.wait(120.0)
        run.terminate()
        run.join(120.0)
        assert run.exitcode == -signal.SIGTERM
    assert CheckpointStore(chk_dir).steps() == [0]
