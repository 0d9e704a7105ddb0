"""Ctrl-C that is caught, and processes that end with a loader open."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import checkfreq
from checkfreq import CFCheckpoint, CFManager
from checkfreq.errors import ConfigError
from iterators import CFIterator
from tests.silence.training import EVERY, data, digest, loss_of, start

# ---- a notebook: cells run again, Ctrl-C is caught, and training goes on with the same objects


def test_a_second_manager_of_this_process_is_refused_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    chk = CFCheckpoint(model=model, optimizer=optimizer)
    manager = CFManager(tmp_path, chk, **EVERY)
    manager.restore()
    manager.step()
    with pytest.raises(ConfigError, match=r"this process has .* open already.*close\(\)"):
        CFManager(tmp_path, chk, **EVERY)
    manager.step()
    manager.close()
    assert "waiting" not in caplog.text
    with CFManager(tmp_path, chk, **EVERY) as third:
        assert third.restore()
        assert third.global_step == 2
    assert not [one for one in caplog.records if one.levelno > logging.WARNING]


def interrupted(directory: str, at: int) -> tuple[str, int]:
    """Ctrl-C before the forward pass of update ``at``, or after its step; the cell is run again.

    The error is kept, as a notebook keeps the last one, and with it the variables of the cell.
    """
    torch.manual_seed(1)
    model = nn.Linear(8, 3)
    optimizer = torch.optim.Adam(model.parameters())
    errors: list[KeyboardInterrupt] = []
    with CFManager(directory, CFCheckpoint(model=model, optimizer=optimizer), **EVERY) as manager:
        batches = CFIterator(data(), cf_manager=manager, seed=1)

        def interrupt(update: int) -> None:
            if update == at and not errors:
                os.kill(os.getpid(), signal.SIGINT)

        def cell() -> None:
            turns = batches.epochs(3)
            for _ in turns:
                for x, y in batches:
                    update = manager.update_attempts + 1
                    interrupt(update)
                    optimizer.zero_grad()
                    loss_of(model, x, y).backward()
                    optimizer.step()
                    interrupt(-update)

        manager.restore()
        try:
            cell()
        except KeyboardInterrupt as error:
            errors.append(error)
            cell()
        assert bool(errors) == bool(at)
    return digest(model, optimizer), manager.global_step


def each_interrupted(directory: str, _: int) -> list[Any]:
    """Of three epochs of 8 updates; 0: never, negative: after the step."""
    places = (0, 1, -1, 5, 8, -8, 9, -24)
    return [interrupted(f"{directory}/{number}", at) for number, at in enumerate(places)]


def test_an_epoch_that_ctrl_c_left_goes_on_where_it_was(tmp_path: Path) -> None:
    run = start(each_interrupted, tmp_path)
    assert run.exit_code == 0, run.error
    assert run.result == [run.result[0]] * 8
    assert not run.warnings


# ---- ctrl-C at random instants, caught, and training goes on: no error, no wait, the same state


_NUM_INTERRUPTS = 20


def interrupted_over_and_over(directory: str, seed: int) -> tuple[int, bool, bool]:
    """Returns the interrupts, whether the last checkpoint is the live state, and whether the steps
    of the iterator are those of the manager."""
    loader = data()
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    manager = CFManager(directory, CFCheckpoint(model=model, optimizer=optimizer), **EVERY)
    batches = CFIterator(loader, cf_manager=manager, seed=1)
    manager.restore()
    dice = random.Random(seed)
    armed, over = threading.Event(), threading.Event()

    def interrupt() -> None:
        while not over.wait(dice.uniform(0.002, 0.03)):
            if armed.is_set():
                armed.clear()  # one interrupt for each time, or the next could come between two
                os.kill(os.getpid(), signal.SIGINT)

    def some(total: int) -> None:
        for x, y in batches.steps(total):
            loss_of(model, x, y).backward()
            manager.weight_update()
            optimizer.zero_grad()

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    interrupts = 0
    while interrupts < _NUM_INTERRUPTS:
        try:
            armed.set()
            some(10**9)
        except KeyboardInterrupt:
            interrupts += 1
    over.set()
    thread.join()
    some(manager.global_step + 3)
    manager.save(wait=True)
    saved = checkfreq.load(directory)["model"]["weight"]
    same_steps = batches.step == manager.global_step
    manager.close()
    return interrupts, torch.equal(saved, model.weight.detach()), same_steps


def test_training_goes_on_after_interrupts_that_are_caught(tmp_path: Path) -> None:
    run = start(interrupted_over_and_over, tmp_path, kill=1)
    assert run.exit_code == 0, run.error
    interrupts, is_live, same_steps = run.result
    assert interrupts >= _NUM_INTERRUPTS
    assert is_live
    assert same_steps
    assert not run.warnings


# ---- a process that leaves a loader with workers open ends at once all the same


ROOT = Path(__file__).resolve().parents[2]


LEAVES_OPEN = """
import numpy as np
from torch.utils.data import DataLoader
from iterators import CFIterator

large = [np.zeros(50_000) for _ in range(400)]
loader = DataLoader(large, 4, collate_fn=list, num_workers=2, multiprocessing_context="fork")
batches = iter(CFIterator(loader))
next(batches)
1 / 0
"""


def test_a_script_that_ends_by_an_exception_says_nothing_else() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEAVES_OPEN], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert "worker" not in done.stderr
