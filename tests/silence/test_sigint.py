"""Ctrl-C at random instants, caught, and training goes on: no error, no wait, the same state."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path

import torch
from torch import nn

import checkfreq
from checkfreq import CFCheckpoint, CFManager
from iterators import CFIterator
from tests.silence.training import EVERY, data, loss_of, start

_NUM_INTERRUPTS = 40


def train(directory: str, seed: int) -> tuple[int, bool, bool]:
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
    run = start(train, tmp_path, kill=1)
    assert run.exit_code == 0, run.error
    interrupts, is_live, same_steps = run.result
    assert interrupts >= _NUM_INTERRUPTS
    assert is_live
    assert same_steps
    assert not run.warnings
