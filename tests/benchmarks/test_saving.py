"""What is counted as a save: the iterations from its boundary until one behind its durability."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator

from benchmarks.lab.saving import Work, sample
from benchmarks.peers import Saved


class Scripted:
    """Durable at the ``polls``-th question; notes what is asked of it."""

    def __init__(self, *, polls: int) -> None:
        self.said: list[str] = []
        self._polls = polls

    def boundary(self, *, save: bool) -> None:
        self.said.append("save" if save else "boundary")

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        self.said.append("update")
        yield

    def is_durable(self) -> bool:
        self._polls -= 1
        return self._polls <= 0

    def finish(self) -> Saved:
        self.said.append("finish")
        return Saved(2.0, 1.5)


def sampled(*, polls: int, **options: object) -> tuple[list[str], dict[str, float], list[int]]:
    saver, changes = Scripted(polls=polls), [0]

    def change() -> None:
        changes[0] += 1
        saver.said.append("change")

    figures = sample(saver, change, Work(1e-4), **options)  # type: ignore[arg-type]
    return saver.said, figures, changes


def test_training_goes_on_until_the_save_is_durable_and_one_iteration_more() -> None:
    said, figures, changes = sampled(polls=3, clean_iterations=2)
    clean, saving = ["boundary", "update", "change"], ["save", "update", "change"]
    assert said == [*clean * 2, *saving, *clean * 2, *clean, "finish"]
    assert changes == [6]
    assert (figures["durable_s"], figures["persist_s"]) == (2.0, 1.5)
    assert figures["held_s"] >= figures["save_s"] > 0


def test_clean_iterations_are_remembered_across_arms() -> None:
    recent_s: deque[float] = deque([100.0, 100.0], maxlen=3)
    _, figures, _ = sampled(polls=1, clean_iterations=1, recent_s=recent_s)
    assert len(recent_s) == 3
    assert recent_s[-1] < 100.0
    assert figures["added_s"] < -199.0  # two iterations, against one of 100 s
