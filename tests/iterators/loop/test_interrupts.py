"""A loop over ``epochs()`` that Ctrl-C or an error left goes on where it was, in the same process.

What the updates use in all must be what they use in a loop that nothing interrupts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from iterators import CFIterator, ResumableDataLoader
from iterators.protocol import Delivery
from iterators.testing import FakeManager
from tests.iterators.datasets import Plain

_EPOCHS = 2

#: ``(run, iterator)``: trains, and may leave objects in ``run.kept`` as a traceback would.
Loop = Callable[["Run", CFIterator], None]


class Run(FakeManager):
    """A run of ``loop`` whose update number ``at`` is interrupted, and which then goes on."""

    def __init__(self, loop: Loop, at: int | None = None, when: str = "", **options: Any) -> None:
        super().__init__()
        self.used: list[int] = []
        self.kept: list[Any] = []
        self._at, self._when, self._num_delivered = at, when, 0
        batches = CFIterator(
            ResumableDataLoader(Plain(7), 1, shuffle=True, seed=3),
            cf_manager=self,
            **{"lookahead": 0, "audit": True, **options},
        )
        try:
            loop(self, batches)
        except KeyboardInterrupt:
            loop(self, batches)
        self.close()
        assert batches.last_report is not None
        assert batches.last_report.exact
        assert not batches.last_report.doubled

    def on_delivery(self, name: str, delivery: Delivery) -> None:
        self._interrupt("delivered", self._num_delivered)
        self._num_delivered += 1

    def update(self, batch: Any) -> None:
        number = len(self.used)
        self._interrupt("before", number)
        self.used.append(int(batch))
        self.weight_update()
        self._interrupt("after", number)

    def _interrupt(self, when: str, number: int) -> None:
        if (when, number) == (self._when, self._at):
            self._at = None
            raise KeyboardInterrupt


def plain(run: Run, batches: CFIterator) -> None:
    for _ in batches.epochs(_EPOCHS):
        for batch in batches:
            run.update(batch)


def kept(run: Run, batches: CFIterator) -> None:
    turns = batches.epochs(_EPOCHS)
    run.kept.append(turns)
    for _ in turns:
        served = iter(batches)
        run.kept.append(served)
        for batch in served:
            run.update(batch)
            if len(run.kept) > 2:  # the loop before is collected while this one runs
                del run.kept[:-2]


def one_ahead(run: Run, batches: CFIterator) -> None:
    for _ in batches.epochs(_EPOCHS):
        for batch in _ahead(batches):
            run.update(batch)


def _ahead(batches: Iterable[Any]) -> Iterator[Any]:
    held: deque[Any] = deque()
    for batch in batches:
        held.append(batch)
        if len(held) > 1:
            yield held.popleft()
    yield from held


@pytest.mark.parametrize(
    ("loop", "when", "options"),
    [
        (plain, "delivered", {}),
        (plain, "before", {"batches_per_epoch": 4}),
        (plain, "after", {}),
        (one_ahead, "delivered", {"lookahead": 1}),
        (one_ahead, "after", {"lookahead": 1}),
    ],
)
def test_an_interrupted_epoch_goes_on_with_the_batch_that_no_update_has_used(
    loop: Loop, when: str, options: dict[str, int]
) -> None:
    whole = Run(loop, **options)
    for at in range(len(whole.used)):
        assert Run(loop, at, when, **options).used == whole.used, at


@pytest.mark.parametrize(("at", "when"), [(0, "after"), (6, "before"), (9, "delivered")])
def test_an_interrupted_loop_that_a_traceback_keeps_does_not_end_the_next_one(
    at: int, when: str
) -> None:
    assert Run(kept, at, when).used == Run(kept).used
