"""Loops that count batches: the true index after a restore, or a word where none is asked for."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

import pytest

from iterators import CFIterator, ResumableDataLoader
from iterators.testing import FakeManager
from tests.iterators.datasets import Plain


def interrupted(*, at: int, manager: FakeManager | None = None) -> CFIterator:
    """Ten batches an epoch, restored where ``at`` were used."""
    first = CFIterator(ResumableDataLoader(Plain(20), 2), cf_manager=(early := FakeManager()))
    for _ in first.steps(at):
        early.weight_update()
    iterator = CFIterator(ResumableDataLoader(Plain(20), 2), cf_manager=manager or FakeManager())
    iterator.load_state_dict(first.state_dict())
    return iterator


def wrapped(batches: Iterable[Any]) -> Iterator[Any]:
    """What a progress bar is."""
    yield from batches


def accumulate(numbered: Iterable[tuple[int, Any]], manager: FakeManager, num: int) -> None:
    """Groups of four batches, and a short one at the end of ``num``."""
    for i, _ in numbered:
        if (i + 1) % 4 == 0 or i + 1 == num:
            manager.weight_update()


def test_accumulation_over_enumerate_updates_after_the_same_batches_in_a_resumed_run() -> None:
    for at, events in ((0, ["step", "step"]), (4, ["step"])):
        manager = FakeManager()
        iterator = interrupted(at=at, manager=manager)
        for _ in iterator.epochs(1):
            accumulate(iterator.enumerate(), manager, len(iterator))
        assert manager.events == ["first", *events, "end_epoch"]


@pytest.mark.parametrize(
    ("counted", "level", "told"),
    [
        (enumerate, "WARNING", "enumerate(train_loader) counts from 0"),
        (lambda one: enumerate(wrapped(one)), "WARNING", "enumerate(train_loader) counts from 0"),
        (lambda one: zip(count(), one, strict=False), "INFO", "a loop that counts by itself"),
    ],
    ids=["enumerate", "through a progress bar", "by itself"],
)
def test_a_count_from_0_in_a_resumed_epoch_is_told_with_what_to_write_and_warned_of_at_its_end(
    counted: Any, level: str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    manager = FakeManager()
    iterator = interrupted(at=4, manager=manager)
    for _ in iterator.epochs(2):
        accumulate(counted(iterator), manager, len(iterator))
    at_resume, at_end = caplog.records
    assert (at_resume.levelname, at_end.levelname) == (level, "WARNING")
    assert f"resumed at batch 4 of epoch 0, but {told}" in at_resume.message
    assert "train_loader.enumerate()" in at_resume.message
    assert "resumed in mid-epoch, ends with 2 batch(es) that no update" in at_end.message


def with_the_true_index(iterator: CFIterator, manager: FakeManager) -> None:
    for _ in iterator.epochs(1):
        for _ in iterator.enumerate():
            pass
    for _ in iterator:
        assert iterator.batch < 10


def over_something_else(iterator: CFIterator, manager: FakeManager) -> None:
    for _ in enumerate(wrapped([1])):
        for _ in iterator:
            manager.weight_update()


def carried_over(iterator: CFIterator, manager: FakeManager) -> None:
    for _ in iterator.epochs(2):
        accumulate(enumerate(iterator), manager, len(iterator) + 1)


@pytest.mark.parametrize(
    ("at", "loop"),
    [(4, with_the_true_index), (4, over_something_else), (0, carried_over), (10, carried_over)],
)
def test_loops_that_count_nothing_wrong_are_not_warned(
    at: int, loop: Any, caplog: pytest.LogCaptureFixture
) -> None:
    manager = FakeManager()
    loop(interrupted(at=at, manager=manager), manager)
    assert not caplog.records
