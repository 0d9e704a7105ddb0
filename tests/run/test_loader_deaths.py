"""Errors by which a loader tells that its worker is gone, and those that are the dataset's own."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from checkfreq.run.loader_deaths import QuietChildren, is_of_dead_worker
from iterators import CFIterator
from iterators.torch.worker_start import WorkerStart


class Samples(Dataset[torch.Tensor]):
    """Eight tensors; the worker does something before it loads the last ones."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.act = act

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 6:
            self.act()
        return torch.zeros(4)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def raise_file_not_found() -> None:
    Path("/there/is/no/such/file").read_bytes()


def error_of(act: Callable[[], Any]) -> tuple[type[BaseException], bool]:
    """The type of what the loader raises, and whether it tells of a worker that is gone."""
    loader = DataLoader(Samples(act), 2, num_workers=1, multiprocessing_context="fork")
    batches = iter(CFIterator(loader))
    next(batches)
    children = QuietChildren()
    children.install()
    try:
        list(batches)
    except (RuntimeError, OSError, EOFError) as error:
        return type(error), is_of_dead_worker(error)
    finally:
        # Torch's handler raises for as long as it knows the worker, wherever the test is then.
        batches.close()
        del batches, loader
        gc.collect()
        children.uninstall()
    raise AssertionError("it loaded everything")


@pytest.mark.parametrize("act", [terminate, kill, raise_file_not_found])
def test_a_worker_that_is_gone_is_known_by_what_the_loader_raises_and_nothing_else_is(
    act: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)  # torch's: 5 s
    kind, is_of_worker = error_of(act)
    assert is_of_worker is (act is not raise_file_not_found)
    assert is_of_worker or kind is FileNotFoundError


def test_a_batch_whose_worker_left_before_it_was_unpacked_is_of_a_dead_worker() -> None:
    """A worker that ends by itself removes the name of the socket that passes memory on."""
    loader = DataLoader(
        Samples(int),
        2,
        num_workers=1,
        multiprocessing_context="fork",
        worker_init_fn=WorkerStart(None),
    )
    batches: Any = iter(loader)
    message = batches._data_queue._reader.recv_bytes()
    (worker,) = batches._workers
    worker.terminate()
    worker.join()
    with pytest.raises(FileNotFoundError) as caught:
        ForkingPickler.loads(message)
    assert is_of_dead_worker(caught.value)
