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


def check(
    loop: Loop, *, n: int = 7, m: int = 9, lookahead: int | None = 0, second: int | None = 0
) -> Run:
    """Compare every resumed run with the whole one, which is returned."""
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
    return whole


def each_epoch(fetched: Callable[[CFIterator, CFIterator], Iterable[Any]]) -> Loop:
    """A loop over what ``fetched`` makes of the two iterators in each epoch."""

    def loop(run: Run, main: CFIterator, second: CFIterator) -> None:
        for _ in main.epochs(EPOCHS):
            for batches in fetched(main, second):
                run.update(*(batches if isinstance(batches, tuple) else (batches,)))

    return loop


# Look-ahead


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("n", [1, 3, 7])
def test_a_prefetcher_whose_depth_is_stated_loses_no_batch(n: int, depth: int) -> None:
    loop = each_epoch(lambda main, second: ahead(main, depth))
    whole = check(loop, n=n, lookahead=depth)
    assert len(whole.used) == EPOCHS * n
    assert whole.events.count("end_epoch") == EPOCHS


def test_a_prefetcher_around_an_accumulating_loop_loses_no_batch() -> None:
    def loop(run: Run, main: CFIterator, second: CFIterator) -> None:
        for _ in main.epochs(EPOCHS):
            group = []
            for i, batch in ahead(main.enumerate(), 2):
                group.append(batch)
                if len(group) == 3 or i == 6:
                    run.update(*group)
                    group.clear()

    check(loop, lookahead=2)


def test_a_prefetcher_that_reads_over_the_end_of_an_epoch_loses_no_batch() -> None:
    def loop(run: Run, main: CFIterator, second: CFIterator) -> None:
        for batch in itertools.islice(ahead(cycle(main), 2), 20 - main.step):
            run.update(batch)

    check(loop, lookahead=2)


def test_a_prefetched_epoch_that_is_left_early_ends_there() -> None:
    def fetched(main: CFIterator, second: CFIterator) -> Iterator[Any]:
        for batch in ahead(main):
            yield batch
            if main.batch == 4:
                return

    check(each_epoch(fetched), lookahead=1)


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


def test_an_update_before_the_stated_batches_were_fetched_is_an_error() -> None:
    manager = FakeManager()
    main = CFIterator(ResumableDataLoader(Plain(6), 1), cf_manager=manager, lookahead=2)
    batches = ahead(main, 1)
    next(batches)
    manager.weight_update()
    with pytest.raises(IterationStateError, match=r"fetch 3 batches .* an update came after 2"):
        next(batches)


def test_steps_and_a_negative_lookahead_are_refused() -> None:
    main = CFIterator(ResumableDataLoader(Plain(6), 1), lookahead=1)
    with pytest.raises(ValueError, match=r"steps\(\) cannot be used with lookahead=1"):
        main.steps(3)
    with pytest.raises(ValueError, match="lookahead must not be negative"):
        CFIterator(ResumableDataLoader(Plain(6), 1), lookahead=-1)


# A second iterator


@pytest.mark.parametrize(("m", "left_at"), [(5, 99), (9, 99), (7, 3)])
@pytest.mark.parametrize("comes_first", [False, True])
def test_zip_may_ask_either_first(m: int, left_at: int, comes_first: bool) -> None:
    def loop(run: Run, main: CFIterator, second: CFIterator) -> None:
        for _ in main.epochs(EPOCHS):
            for one, other in (
                zip(second, main, strict=False) if comes_first else zip(main, second, strict=False)
            ):
                run.update(one, other)
                if main.batch == left_at:
                    break

    check(loop, m=m)


@pytest.mark.parametrize("comes_first", [False, True])
@pytest.mark.parametrize("left_at", [1, 99])
def test_zip_may_be_kept_by_a_variable(comes_first: bool, left_at: int) -> None:
    def loop(run: Run, main: CFIterator, second: CFIterator) -> None:
        for _ in main.epochs(2):
            pairs = (
                zip(second, main, strict=False) if comes_first else zip(main, second, strict=False)
            )
            for one, other in pairs:
                run.update(one, other)
                if main.batch == left_at:
                    break

    check(loop, n=3, m=5)


def test_plain_loops_over_a_kept_zip_lose_nothing() -> None:
    def loop(run: Run, main: CFIterator, second: CFIterator) -> None:
        while main.epoch < 2:
            pairs = zip(main.enumerate(), second, strict=False)
            for (i, one), other in pairs:
                run.update(one, other)
                if i == 1:
                    break
            iter(main)

    check(loop, n=3)


def test_a_prefetcher_around_a_zip_loses_nothing_of_either() -> None:
    for fetched in (
        lambda main, second: ahead(zip(main, second, strict=False)),
        lambda main, second: ahead(zip(second, main, strict=False)),
        lambda main, second: zip(ahead(second), ahead(main), strict=False),
    ):
        check(each_epoch(fetched), lookahead=1, second=1)


def restarted(second: CFIterator) -> Iterator[Any]:
    """Draws on and on from an iterator that is opened again whenever it ends."""
    batches = iter(second)
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            batches = iter(second)
            batch = next(batches)
        yield batch


@pytest.mark.parametrize("comes_first", [False, True])
def test_a_second_source_that_is_opened_again_in_mid_epoch_loses_nothing(
    comes_first: bool,
) -> None:
    def loop(run: Run, main: CFIterator, second: CFIterator) -> None:
        others = restarted(second)
        for _ in main.epochs(2):
            batches = iter(main)
            drawn: list[Any] = []
            while True:
                if comes_first:
                    drawn = [next(others) for _ in range(2)]
                if (batch := next(batches, None)) is None:
                    break
                if not comes_first:
                    drawn = [next(others) for _ in range(2)]
                run.update(batch, *drawn)

    check(loop, n=4, m=3)


def test_a_batch_that_is_asked_for_after_the_update_belongs_to_its_iteration() -> None:
    def loop(run: Run, main: CFIterator, second: CFIterator) -> None:
        others = iter(second)
        for _ in main.epochs(1):
            for batch in main:
                run.update(batch)
                run.noted.append(int(next(others)))

    check(loop)


def test_validation_in_the_tail_is_not_repeated() -> None:
    def loop(run: Run, main: CFIterator, second: CFIterator) -> None:
        for _ in main.epochs(EPOCHS):
            for batch in main:
                run.update(batch)
            run.noted.append([int(one) for one in second])

    assert len({tuple(one) for one in check(loop).noted}) == EPOCHS
