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

#: ``(manager, main, second, update)``; ``update`` is called with what an update has used.
Loop = Callable[[FakeManager, CFIterator, CFIterator, Callable[..., None]], None]

EPOCHS = 3


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


class Run:
    """One process: what each update used, and what each boundary saved after how many updates."""

    def __init__(
        self, loop: Loop, restored: Any = None, *, main: dict[str, Any], second: dict[str, Any]
    ) -> None:
        self.used: list[Any] = []
        self.saved: list[tuple[int, Any]] = []
        self.manager = FakeManager(restored=restored)
        self._loader_sizes = main.pop("n"), second.pop("n")
        iterators = [
            CFIterator(
                ResumableDataLoader(Plain(size), 1, shuffle=True, seed=size),
                cf_manager=self.manager,
                **options,
            )
            for size, options in zip(self._loader_sizes, (main, second), strict=True)
        ]
        loop(self.manager, iterators[0], iterators[1], self._update)
        self.manager.close()
        self.report = iterators[0].last_report

    def _update(self, *batches: Any) -> None:
        for position in self.manager.positions[len(self.saved) :]:
            self.saved.append((len(self.used), position))
        self.used.append([int(batch) for batch in batches])
        self.manager.weight_update()


def check(
    loop: Loop, *, n: int = 7, m: int = 9, lookahead: int | None = 0, second: int | None = 0
) -> Run:
    """Compare every resumed run with the whole one, which is returned."""

    def run(restored: Any = None) -> Run:
        return Run(
            loop,
            restored,
            main={"n": n, "lookahead": lookahead, "audit": True},
            second={"n": m, "lookahead": second, "marks_steps": False, "name": "second"},
        )

    whole = run()
    assert whole.saved
    for num_updates, position in whole.saved:
        assert run(position).used == whole.used[num_updates:], position
    assert whole.report is not None
    assert whole.report.exact
    assert not whole.report.doubled
    return whole


def each_epoch(fetched: Callable[[CFIterator, CFIterator], Iterable[Any]]) -> Loop:
    """A loop over what ``fetched`` makes of the two iterators in each epoch."""

    def loop(
        manager: FakeManager, main: CFIterator, second: CFIterator, update: Callable[..., None]
    ) -> None:
        for _ in main.epochs(EPOCHS):
            for batches in fetched(main, second):
                update(*(batches if isinstance(batches, tuple) else (batches,)))

    return loop


# Look-ahead


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
def test_a_prefetcher_whose_depth_is_stated_loses_no_batch(n: int, depth: int) -> None:
    loop = each_epoch(lambda main, second: ahead(main, depth))
    whole = check(loop, n=n, lookahead=depth)
    assert len(whole.used) == EPOCHS * n
    assert whole.manager.events.count("end_epoch") == EPOCHS


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prefetcher_around_an_accumulating_loop_loses_no_batch(depth: int) -> None:
    def loop(
        manager: FakeManager, main: CFIterator, second: CFIterator, update: Callable[..., None]
    ) -> None:
        for _ in main.epochs(EPOCHS):
            group = []
            for i, batch in ahead(main.enumerate(), depth):
                group.append(batch)
                if len(group) == 3 or i == 6:
                    update(*group)
                    group.clear()

    check(loop, lookahead=depth)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prefetcher_that_reads_over_the_end_of_an_epoch_loses_no_batch(depth: int) -> None:
    def loop(
        manager: FakeManager, main: CFIterator, second: CFIterator, update: Callable[..., None]
    ) -> None:
        for batch in itertools.islice(ahead(cycle(main), depth), 20 - main.step):
            update(batch)

    check(loop, lookahead=depth)


def test_a_batch_that_is_drawn_before_the_update_is_not_lost() -> None:
    def loop(
        manager: FakeManager, main: CFIterator, second: CFIterator, update: Callable[..., None]
    ) -> None:
        for _ in main.epochs(EPOCHS):
            batches = iter(main)
            batch = next(batches)
            while batch is not None:
                following = next(batches, None)
                update(batch)
                batch = following

    check(loop, lookahead=1)


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


@pytest.mark.parametrize("m", [5, 7, 9])
@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("comes_first", [False, True])
@pytest.mark.parametrize("left_at", [3, 99])
def test_zip_may_ask_either_first_and_be_kept_by_a_variable(
    m: int, is_kept: bool, comes_first: bool, left_at: int
) -> None:
    def loop(
        manager: FakeManager, main: CFIterator, second: CFIterator, update: Callable[..., None]
    ) -> None:
        kept = []
        for _ in main.epochs(EPOCHS):
            pairs = iter([zip(second, main) if comes_first else zip(main, second)])
            if is_kept:
                kept = list(pairs)
            for one, other in kept[0] if is_kept else next(pairs):
                update(one, other)
                if main.batch == left_at:
                    break

    check(loop, m=m)


def test_plain_loops_over_a_kept_zip_lose_nothing() -> None:
    def loop(
        manager: FakeManager, main: CFIterator, second: CFIterator, update: Callable[..., None]
    ) -> None:
        while main.epoch < EPOCHS:
            pairs = zip(main.enumerate(), second)
            for (i, one), other in pairs:
                update(one, other)
                if i == 3:
                    break
            iter(main)

    check(loop)


def test_a_prefetcher_around_a_zip_loses_nothing_of_either() -> None:
    for fetched in (
        lambda main, second: ahead(zip(main, second)),
        lambda main, second: ahead(zip(second, main)),
        lambda main, second: zip(ahead(second), ahead(main)),
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


@pytest.mark.parametrize("num_drawn", [1, 2])
@pytest.mark.parametrize("comes_first", [False, True])
def test_a_second_source_that_is_opened_again_in_mid_epoch_loses_nothing(
    num_drawn: int, comes_first: bool
) -> None:
    def loop(
        manager: FakeManager, main: CFIterator, second: CFIterator, update: Callable[..., None]
    ) -> None:
        others = restarted(second)
        for _ in main.epochs(EPOCHS):
            batches = iter(main)
            while True:
                drawn = [next(others) for _ in range(num_drawn)] if comes_first else []
                if (batch := next(batches, None)) is None:
                    break
                update(batch, *drawn, *([] if comes_first else [next(others)]))

    check(loop, m=5)


def test_a_batch_that_is_asked_for_after_the_update_belongs_to_its_iteration() -> None:
    after: list[int] = []

    def loop(
        manager: FakeManager, main: CFIterator, second: CFIterator, update: Callable[..., None]
    ) -> None:
        others = iter(second)
        after.clear()
        for _ in main.epochs(1):
            for batch in main:
                update(batch)
                after.append(int(next(others)))

    whole = check(loop)
    expected = list(after)
    for num_updates, position in whole.saved:
        Run(
            loop,
            position,
            main={"n": 7},
            second={"n": 9, "marks_steps": False, "name": "second"},
        )
        assert after == expected[num_updates:]


def test_validation_in_the_tail_is_not_repeated() -> None:
    validated: list[list[int]] = []

    def loop(
        manager: FakeManager, main: CFIterator, second: CFIterator, update: Callable[..., None]
    ) -> None:
        next(iter(second))  # for its shape
        validated.clear()
        for _ in main.epochs(EPOCHS):
            for batch in main:
                update(batch)
            validated.append([int(one) for one in second])

    whole = check(loop, m=3)
    assert len({tuple(one) for one in validated}) > 1
    assert whole.saved


def test_a_kept_pass_goes_on_after_a_clean_close() -> None:
    drawn: list[int] = []
    restored: Any = None
    for _ in range(3):
        manager = FakeManager(restored=restored)
        main = CFIterator(ResumableDataLoader(Plain(6), 1), cf_manager=manager, steps_to_run=2)
        second = CFIterator(
            ResumableDataLoader(Plain(6), 1), cf_manager=manager, name="b", marks_steps=False
        )
        others = iter(second)
        for _ in main:
            drawn.append(int(next(others)))
            manager.weight_update()
        manager.close()
        restored = {"train": main.state_dict(), "b": second.state_dict()}
    assert drawn == list(range(6))
