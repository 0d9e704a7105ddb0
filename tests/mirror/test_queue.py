"""Which step is uploaded next."""

from __future__ import annotations

import pytest

from checkfreq.mirror.queue import UploadQueue


def test_the_newest_comes_first_then_what_is_pinned_and_all_of_that_is_held() -> None:
    queue = UploadQueue(every_s=None)
    queue.pinned([4, 7])
    for step in (8, 9):
        queue.committed(step)
    assert queue.held() == {4, 7, 9}
    order = []
    while (step := queue.next_step) is not None:
        order.append(step)
        queue.begin(step, now_s=0.0)
        assert step in queue.held()
        queue.ended(now_s=0.0, seconds=1.0)
    assert order == [9, 7, 4]


@pytest.mark.parametrize(("every_s", "wait_s"), [(None, 10.0), (60.0, 10.0), (150.0, 50.0)])
def test_uploads_begin_every_s_apart_and_after_a_rest_of_a_tenth_of_their_time(
    every_s: float | None, wait_s: float
) -> None:
    queue = UploadQueue(every_s=every_s)
    queue.committed(1)
    assert queue.wait_s(1000.0) == 0.0
    queue.begin(1, now_s=1000.0)
    queue.ended(now_s=1100.0, seconds=100.0)
    queue.committed(2)
    assert queue.wait_s(1100.0) == wait_s
    assert queue.wait_s(1100.0 + wait_s) == 0.0


def test_at_the_end_of_a_run_only_the_newest_matters_without_pauses() -> None:
    queue = UploadQueue(every_s=60.0)
    queue.pinned([1])
    queue.committed(5)
    queue.begin(5, now_s=0.0)
    queue.committed(6)
    assert not queue.is_overtaken
    queue.hurry()
    assert queue.is_overtaken
    queue.failed()
    assert (queue.next_step, queue.wait_s(1.0), queue.held()) == (6, 0.0, {6})
    queue.begin(6, now_s=1.0)
    assert not queue.is_overtaken
    queue.ended(now_s=2.0, seconds=1.0)
    assert queue.next_step is None


def test_steps_up_to_another_runs_newest_are_not_wanted() -> None:
    queue = UploadQueue(every_s=None)
    queue.pinned([3, 8])
    queue.committed(5)
    queue.only_after(5)
    queue.pinned([4, 9])
    assert (queue.next_step, queue.held()) == (9, {8, 9})
    queue.committed(5)
    assert queue.next_step == 9
    queue.committed(6)
    assert queue.next_step == 6
