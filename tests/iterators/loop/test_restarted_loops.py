"""A loop over a range that begins again in a restored run is found; every other loop is not."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from iterators import CFIterator, ResumableDataLoader
from iterators.testing import FakeManager
from tests.iterators.datasets import Plain

#: Of epochs; a script has it from its arguments.
TOTAL = 4


def made(manager: FakeManager | None = None) -> CFIterator:
    return CFIterator(ResumableDataLoader(Plain(6), 2), cf_manager=manager or FakeManager())


def restored(epoch: int = 2) -> CFIterator:
    first = made(manager := FakeManager())
    for _ in first.steps(3 * epoch):
        manager.weight_update()
    manager.close()
    iterator = made(updating := FakeManager())
    iterator.load_state_dict(first.state_dict())
    updating.weight_update()
    return iterator


def one_epoch(iterator: CFIterator) -> None:
    list(iterator)


def in_a_function(iterator: CFIterator) -> None:
    for _ in bar(range(TOTAL)):
        one_epoch(iterator)


def bar(items: Iterable[Any]) -> Iterator[Any]:
    yield from items


def after_a_look(iterator: CFIterator) -> None:
    next(iter(iterator))
    plain(iterator)


def plain(iterator: CFIterator) -> None:
    for _ in range(TOTAL):
        for _ in iterator:
            break


def numbered(iterator: CFIterator) -> None:
    for _ in range(1, TOTAL + 1):
        for _ in iterator.enumerate():
            break


def epochs(iterator: CFIterator) -> None:
    for _ in iterator.epochs(TOTAL):
        for _ in range(1):
            one_epoch(iterator)


def from_the_epoch(iterator: CFIterator) -> None:
    for _ in range(iterator.epoch, TOTAL):
        one_epoch(iterator)


def skipping(iterator: CFIterator) -> None:
    for epoch in range(TOTAL):
        if epoch >= 2:
            one_epoch(iterator)


@pytest.mark.parametrize(
    ("script", "line"),
    [
        (plain, "`for _ in train_loader.epochs(TOTAL):`"),
        (numbered, "`for _ in range(train_loader.epoch + 1, TOTAL + 1):`"),
        (in_a_function, "`for _ in train_loader.epochs(TOTAL):`"),
        (after_a_look, "`for _ in train_loader.epochs(TOTAL):`"),
        *((right, None) for right in (epochs, from_the_epoch, skipping)),
    ],
)
def test_a_range_that_begins_again_is_named_with_the_line_to_write_and_no_other_loop(
    script: Callable[[CFIterator], None], line: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    script(restored())
    found = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert len(found) == (line is not None)
    assert all("goes on in epoch 2" in one and str(line) in one for one in found)


def test_a_run_made_in_the_loop_or_in_its_first_epoch_is_not_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for _ in range(2):
        one_epoch(restored())
    plain(restored(0))
    plain(made())
    assert not caplog.records
