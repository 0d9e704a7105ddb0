"""The contract in forks of the training process: there the manager does nothing, and says so."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from checkfreq import CFManager
from checkfreq.errors import StateError
from checkfreq.store.store import CheckpointStore
from iterators import CFIterator
from tests.contract.conftest import Hold
from tests.contract.runs import BATCH, Training, config, loader, managed, train

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

WELL = 17


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A fork has none of the threads of its parent's OpenMP, and would wait for them forever.

    That is torch's, in any forked child that computes: its loader workers have one thread, too.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Forkable(Training):
    """Has gradients without autograd, which a fork may not use in some processes.

    In a torch for CUDA on a machine without a device, a fork has none once a FakeTensorMode was
    used before it: torch.compile and DTensors, so other tests in this process, use one.
    """

    def backward(self, x: torch.Tensor | None = None) -> None:
        """Gradients that depend on the input, the parameters and the generators."""
        x = torch.randn(BATCH, 3) if x is None else x
        with torch.no_grad():
            scale = self.model(x).square().mean()
            for parameter in self.model.parameters():
                parameter.grad = scale * (parameter + 1)


def steps(training: Training, manager: CFManager) -> None:
    """Every call that a loop makes."""
    training.steps(manager, 3)
    manager.save(wait=True, metrics={"loss": 1.0})
    with manager.updating():
        manager.end_epoch()
    manager.wait()
    assert manager.global_step == 2
    assert not manager.stopped
    with pytest.raises(StateError, match="in a fork of the training process"):
        manager.restore()
    manager.close()


def unwinds(training: Training, manager: CFManager) -> None:
    sys.exit(WELL)


def fails(training: Training, manager: CFManager) -> None:
    training.steps(manager, 1)
    raise KeyError("the child's")


def iterates(training: Training, manager: CFManager) -> None:
    train(training, manager, CFIterator(loader(), cf_manager=manager), 2)


def forked(
    chk_dir: Path, training: Training, child: Callable[[Training, CFManager], None]
) -> tuple[int, CFManager]:
    """A run that forks after its second boundary and goes on; how the child ended.

    The child is alive until the next run has restored, in the same directory.
    """
    me = os.getpid()
    ready, tell = os.pipe()
    try:
        with managed(chk_dir, training.chk, chk_freq=1, config=config(takeover_s=0.0)) as manager:
            training.steps(manager, 2)
            pid = os.fork()
            if pid == 0:
                child(training, manager)
                sys.exit(WELL)
            training.steps(manager, 2)
            manager.wait()
        again = Forkable(seed=1)
        with managed(chk_dir, again.chk, config=config(takeover_s=0.0)) as successor:
            assert successor.restore()
            assert again.bits() == training.bits()
    except BaseException as error:
        if os.getpid() != me:
            os.read(ready, 1)
            well = isinstance(error, SystemExit) and error.code == WELL
            os._exit(WELL if well or isinstance(error, KeyError) else 1)
        raise
    os.write(tell, b"x")
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    for fd in (ready, tell):
        os.close(fd)
    return status, manager


@pytest.mark.parametrize("child", [steps, unwinds, fails, iterates])
def test_whatever_a_forked_child_does_the_parents_run_goes_on(
    chk_dir: Path, child: Callable[[Training, CFManager], None]
) -> None:
    status, manager = forked(chk_dir, Forkable(), child)
    assert status == WELL
    assert manager.stats()["num_workers_replaced"] == manager.stats()["num_failed"] == 0
    assert CheckpointStore(chk_dir).verify(manager.global_step).step == 4
    assert manager.stats()["num_committed"] >= 2


@contextlib.contextmanager
def in_a_child() -> Iterator[bool]:
    """The block runs in a forked child, which ends there, and in the parent; True in the child."""
    pid = os.fork()
    if pid == 0:
        try:
            yield True
            os._exit(WELL)
        finally:
            os._exit(1)
    yield False
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == WELL


def test_a_child_forked_in_the_middle_of_a_copy_does_not_wait_for_it_and_says_once_whose_it_is(
    chk_dir: Path, hold_trainer: Hold, caplog: pytest.LogCaptureFixture
) -> None:
    gate = hold_trainer("snapshot.copy_settled")
    training, parent = Forkable(), os.getpid()
    with managed(chk_dir, training.chk, chk_freq=1) as manager:
        training.steps(manager, 1)
        gate.wait_reached()
        with in_a_child() as is_child:
            if is_child:
                training.update(manager)  # in the child nobody copies, and nobody will
                training.steps(manager, 3)
                manager.close()
                (said,) = [r.message for r in caplog.records if r.levelno == logging.WARNING]
                assert f"is a fork of the training process {parent}: " in said
                assert said.endswith("checkpoints are taken by the parent")
        gate.open()
        manager.wait()
        assert manager.all_steps() == [1]
    assert not caplog.records


def test_a_child_may_have_a_manager_of_its_own_and_its_stop_signals(
    chk_dir: Path, tmp_path: Path
) -> None:
    training = Forkable()
    with managed(chk_dir, training.chk) as manager:
        training.steps(manager, 1)
        with in_a_child() as is_child:
            if is_child:
                with managed(tmp_path / "own", training.chk) as own:
                    training.steps(own, 1)
                    os.kill(os.getpid(), signal.SIGTERM)
                    training.steps(own, 1)
                    assert own.stopped
                    assert not manager.should_stop
    assert CheckpointStore(tmp_path / "own").steps() == [2]
    assert CheckpointStore(chk_dir).steps() == [1]


def test_a_child_that_leaves_a_loop_does_not_end_its_parents_loader_workers(chk_dir: Path) -> None:
    training = Forkable()
    me = os.getpid()
    pid = -1
    try:
        with managed(chk_dir, training.chk) as manager:
            batches = loader(48, num_workers=1, prefetch_factor=2)
            for (x,) in CFIterator(batches, cf_manager=manager):
                training.update(manager, x)
                if manager.global_step == 1:
                    pid = os.fork()
                    if pid == 0:
                        sys.exit(WELL)
                    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == WELL
    except SystemExit:
        if os.getpid() != me:
            os._exit(WELL)
        raise
    assert manager.global_step == 12
    assert CheckpointStore(chk_dir).steps() == [12]
