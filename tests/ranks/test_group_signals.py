"""A signal to the whole process group: loader workers get it too, and the run ends as it should."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterable, Iterator
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from checkfreq import CFCheckpoint, CFManager, CFMode
from iterators import CFIterator
from tests.acceptance.processes import verify_all
from tests.acceptance.ranks import Life, Rank, Ranks
from tests.ranks import tiny

pytestmark = [pytest.mark.dist, pytest.mark.crash]

NUM_BATCHES = 200_000  # no run comes to its end


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """Single numbers, each in memory of its own: a batch is of no use once its worker is gone."""

    def __len__(self) -> int:
        return NUM_BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2,), float(index % 7))


class Opaque:
    """An iterable that nothing is known of."""

    def __init__(self, loader: DataLoader[torch.Tensor]) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._loader)


def batches_of(rank: Rank, manager: CFManager) -> Iterable[torch.Tensor]:
    """The loop's batches, as the setting says."""
    kind = rank.settings["loader"]
    loader = DataLoader(Numbers(), 1, num_workers=2)
    if kind == "no iterator":
        return _with_steps(loader, manager)
    if kind == "opaque":
        return CFIterator(Opaque(loader), cf_manager=manager, exact=False)
    return CFIterator(loader, cf_manager=manager)


def _with_steps(loader: Iterable[torch.Tensor], manager: CFManager) -> Iterator[torch.Tensor]:
    for batch in loader:
        yield batch
        manager.step()


def train(rank: Rank) -> None:
    """Report every update."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    # Nothing is exchanged, so what each rank learns is its own.
    chk = CFCheckpoint(model=model, optimizer=optimizer, per_rank=["model", "optimizer"])
    freq, config = rank.settings.get("chk_freq", 0), tiny.config(rank)
    with CFManager(rank.chk_dir, chk, mode=CFMode.MANUAL, chk_freq=freq, config=config) as manager:
        for number, batch in enumerate(batches_of(rank, manager), 1):
            model(batch).mean().backward()
            manager.weight_update()
            rank.send("updated", number)
            if rank.settings.get("is_late") and manager.latest_step():
                lose_workers()


def lose_workers() -> None:
    """The workers get the signal first, and their deaths are noticed before it comes here."""
    noticed = threading.Event()

    def then_stop() -> None:
        noticed.wait(30)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=then_stop).start()
    workers = [str(worker.pid) for worker in active_children()]
    try:
        subprocess.run(["kill", "-TERM", *workers], check=True)  # not by their parent
        threading.Event().wait(30)
    finally:
        noticed.set()


def stopped(folder: Path, world: int = 1, **settings: Any) -> Any:
    """Signal the process group of each rank in the midst of training; how all ended."""
    with Ranks(Life(train, folder, world, settings=settings, store="agent")) as ranks:
        ranks.read_until(lambda: all(len(one.all("updated")) >= 5 for one in ranks.heard))
        for rank in range(world):
            os.killpg(ranks.pid(rank), signal.SIGTERM)
        return ranks.finish()


def test_a_signal_to_the_process_group_stops_with_a_checkpoint_of_the_last_boundary(
    tmp_path: Path,
) -> None:
    heard = stopped(tmp_path, 2, loader="map-style")
    for one in heard:
        assert one.failure is not None
        assert one.failure.kind == "TrainingStopped", one.failure.trace
    assert verify_all(tmp_path / "chk") == [heard[0].last("updated")]


def test_other_loaders_whose_workers_die_of_the_signal_do_not_end_the_run_by_an_error(
    tmp_path: Path,
) -> None:
    (one,) = stopped(tmp_path, loader="opaque")
    assert one.failure is not None
    assert one.failure.kind in ("TrainingStopped", "SystemExit"), one.failure.trace
    (step,) = verify_all(tmp_path / "chk")
    assert step >= 5


def test_workers_that_die_of_the_signal_before_it_comes_to_the_trainer_are_no_error_either(
    tmp_path: Path,
) -> None:
    settings = {"loader": "no iterator", "is_late": True, "chk_freq": 1}
    with Ranks(Life(train, tmp_path, 1, settings=settings)) as ranks:
        (one,) = ranks.finish()
    assert one.failure is not None
    assert (one.failure.kind, one.failure.text) == ("SystemExit", "75"), one.failure.trace
    assert verify_all(tmp_path / "chk")
