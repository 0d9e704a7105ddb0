"""A position belongs to the last update, in whatever order a loop fetches its batches.

A loop is run whole, then again from what was saved at each of its boundaries: what each update uses
must be what it used in the whole run.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from iterators import CFIterator, IterationStateError, ResumableDataLoader
from iterators.testing import FakeManager
from tests.iterators.datasets import Plain

#: ``(run, main, second)``; ``run`` is told what an update uses, and what else is noted.
Loop = Callable[["Run", CFIterator, CFIterator], None]

EPOCHS = 2


def ahead(batches: Iterable[Any], depth: int = 1) -> Iterator[Any]:
    """A prefetcher that holds ``depth`` batches while the loop uses one."""
    held: deque[Any] = deque()
    for batch in batches:
        held.append(batch)
        if len(held) > depth:
            yield held.popleft()
    yield from held


def cycle(batches: CFIterator) -> Iterator[Any]:
    """The batches of all epochs."""
    while True:
        yield from batches


class Run(FakeManager):
    """One process: what each update used, what else is noted, and what each boundary saved."""

    def __init__(self, loop: Loop, restored: Any, iterators: list[tuple[int, dict[str, Any]]]):
        super().__init__(restored=restored)
        self.used: list[Any] = []
        self.noted: list[Any] = []
        self.saved: list[tuple[int, int, Any]] = []
        main, second = (
            CFIterator(
                ResumableDataLoader(Plain(size), 1, shuffle=True, seed=size),
                cf_manager=self,
                **options,
            )
            for size, options in iterators
        )
        _ = main.batch, second.batch  # so that nothing searches for an enumerate() in each run
        loop(self, main, second)
        self.close()
        self.report = main.last_report

    def update(self, *batches: Any) -> None:
        self.used.append([int(batch) for batch in batches])
        self.weight_update()

    def step(self) -> None:
        super().step()
        self.saved.append((len(self.used), len(self.noted), self.positions[-1]))

    def end_epoch(self) -> None:
        super().end_epoch()
        self.saved.append((len(self.used), len(self.noted), self.positions[-1]))


def check(loop: Loop, *, n: int = 7, m: int = 9, lookahead: int = 0, second: int = 0) -> None:
    """Compare every resumed run with the whole one."""
    iterators: list[tuple[int, dict[str, Any]]] = [
        (n, {"lookahead": lookahead, "audit": True}),
        (m, {"lookahead": second, "marks_steps": False, "name": "second"}),
    ]
    whole = Run(loop, None, iterators)
    assert whole.saved
    for num_updates, num_noted, position in whole.saved:
        resumed = Run(loop, position, iterators)
        assert resumed.used == whole.used[num_updates:], position
        assert resumed.noted == whole.noted[num_noted:], position
    assert whole.report is not None
    assert whole.report.exact
    assert not whole.report.doubled


def each_epoch(fetched: Callable[[CFIterator, CFIterator], Iterable[Any]]) -> Loop:
    """A loop over what ``fetched`` makes of the two iterators in each epoch."""

    def loop(run: Run, main: CFIterator, second: CFIterator) -> None:
        for _ in main.epochs(EPOCHS):
            for batches in fetched(main, second):
                run.update(*(batches if isinstance(batches, tuple) else (batches,)))

    return loop


def over_the_end_of_an_epoch(run: Run, main: CFIterator, second: CFIterator) -> None:
    for batch in itertools.islice(ahead(cycle(main), 2), 20 - main.step):
        run.update(batch)


def left_early(main: CFIterator, second: CFIterator) -> Iterator[Any]:
    for batch in ahead(main):
        yield batch
        if main.batch == 4:
            return


def zipped(*, second_first: bool = False, left_at: int = 99, kept: bool = False) -> Loop:
    """A zip of the two in either order; perhaps left, perhaps kept by a variable."""

    def loop(run: Run, main: CFIterator, second: CFIterator) -> None:
        both = (second, main) if second_first else (main, second)
        for _ in main.epochs(EPOCHS):
            held = zip(*both, strict=False) if kept else None
            for one, other in held or zip(*both, strict=False):
                run.update(one, other)
                if main.batch == left_at:
                    break

    return loop


def a_zip_kept_by_plain_loops(run: Run, main: CFIterator, second: CFIterator) -> None:
    while main.epoch < EPOCHS:
        pairs = zip(main.enumerate(), second, strict=False)
        for (i, one), other in pairs:
            run.update(one, other)
            if i == 1:
                break
        iter(main)


def opened_again(*, comes_first: bool) -> Loop:
    """Two batches of the second for each of the first, also where it ends in mid-epoch."""

    def loop(run: Run, main: CFIterator, second: CFIterator) -> None:
        others = cycle(second)
        for _ in main.epochs(EPOCHS):
            batches = iter(main)
            while True:
                drawn = [next(others), next(others)] if comes_first else []
                if (batch := next(batches, None)) is None:
                    break
                run.update(batch, *(drawn or [next(others), next(others)]))

    return loop


def asked_for_after_the_update(run: Run, main: CFIterator, second: CFIterator) -> None:
    others = iter(second)
    for _ in main.epochs(1):
        for batch in main:
            run.update(batch)
            run.noted.append(int(next(others)))


def validating_in_the_tail(run: Run, main: CFIterator, second: CFIterator) -> None:
    for _ in main.epochs(EPOCHS):
        for batch in main:
            run.update(batch)
        validated = [int(one) for one in second]
        assert validated not in run.noted
        run.noted.append(validated)


LOOPS: dict[str, tuple[Loop, dict[str, Any]]] = {
    "a prefetcher": (each_epoch(lambda main, second: ahead(main)), {"lookahead": 1}),
    "a prefetcher deeper than an epoch": (
        each_epoch(lambda main, second: ahead(main, 3)),
        {"n": 1, "lookahead": 3},
    ),
    "a prefetcher over the end of an epoch": (over_the_end_of_an_epoch, {"lookahead": 2}),
    "a prefetched epoch left early": (each_epoch(left_early), {"lookahead": 1}),
    "zip, a shorter second": (zipped(), {"m": 5}),
    "zip, a longer second first": (zipped(second_first=True), {}),
    "zip left early": (zipped(left_at=3), {"m": 7}),
    "zip, the second first, left early": (zipped(second_first=True, left_at=3), {"m": 7}),
    "zip kept": (zipped(kept=True), {"n": 3, "m": 5}),
    "zip kept, the second first, left early": (
        zipped(second_first=True, left_at=1, kept=True),
        {"n": 3, "m": 5},
    ),
    "zip kept by plain loops": (a_zip_kept_by_plain_loops, {"n": 3}),
    "a prefetcher around a zip": (
        each_epoch(lambda main, second: ahead(zip(second, main, strict=False))),
        {"lookahead": 1, "second": 1},
    ),
    "a zip of prefetchers": (
        each_epoch(lambda main, second: zip(ahead(second), ahead(main), strict=False)),
        {"lookahead": 1, "second": 1},
    ),
    "a second opened again, first": (opened_again(comes_first=True), {"n": 4, "m": 3}),
    "a second opened again": (opened_again(comes_first=False), {"n": 4, "m": 3}),
    "a batch asked for after the update": (asked_for_after_the_update, {}),
    "validation in the tail": (validating_in_the_tail, {}),
}


@pytest.mark.parametrize("kind", LOOPS)
def test_a_loop_loses_and_repeats_nothing_from_any_of_its_boundaries_on(kind: str) -> None:
    loop, options = LOOPS[kind]
    check(loop, **options)


# Look-ahead


def test_a_clean_close_in_mid_epoch_keeps_what_was_fetched_ahead() -> None:
    used: list[int] = []
    restored: Any = None
    for _ in range(2):
        manager = FakeManager(restored=restored)
        main = CFIterator(ResumableDataLoader(Plain(6), 1), cf_manager=manager, lookahead=1)
        for batch in ahead(main):
            used.append(int(batch))
            manager.weight_update()
            if len(used) == 3:
                break
        assert main.is_using_batch
        manager.close()
        assert not main.is_using_batch
        restored = {"train": main.state_dict()}
    assert used == [0, 1, 2, 3, 4, 5]


def test_an_update_before_the_stated_batches_were_fetched_and_steps_are_errors() -> None:
    manager = FakeManager()
    main = CFIterator(ResumableDataLoader(Plain(6), 1), cf_manager=manager, lookahead=2)
    with pytest.raises(ValueError, match=r"steps\(\) cannot be used with lookahead=2"):
        main.steps(3)
    batches = ahead(main, 1)
    next(batches)
    manager.weight_update()
    with pytest.raises(IterationStateError, match=r"fetch 3 batches .* an update came after 2"):
        next(batches)
