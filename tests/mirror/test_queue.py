"""Which step is uploaded next."""

from __future__ import annotations

from checkfreq.mirror.queue import UploadQueue


def test_the_newest_comes_next_and_superseded_ones_are_skipped() -> None:
    queue = UploadQueue(every_s=None)
    for step in (1, 2, 3):
        queue.committed(step)
    assert queue.next_step == 3
    assert queue.held() == {3}


def test_what_is_uploaded_and_what_comes_next_are_held() -> None:
    queue = UploadQueue(every_s=None)
    queue.committed(1)
    queue.begin(1, now_s=0.0)
    queue.committed(2)
    queue.committed(3)
    assert queue.held() == {1, 3}
    queue.ended(now_s=5.0, seconds=5.0)
    assert queue.held() == {3}


def test_pinned_steps_follow_the_newest_and_are_held() -> None:
    queue = UploadQueue(every_s=None)
    queue.pinned([4, 7])
    queue.committed(9)
    assert queue.held() == {4, 7, 9}
    order = []
    while (step := queue.next_step) is not None:
        order.append(step)
        queue.begin(step, now_s=0.0)
        queue.ended(now_s=0.0, seconds=1.0)
    assert order == [9, 7, 4]


def test_uploads_begin_every_s_apart() -> None:
    queue = UploadQueue(every_s=60.0)
    queue.committed(1)
    assert queue.wait_s(100.0) == 0.0
    queue.begin(1, now_s=100.0)
    queue.ended(now_s=110.0, seconds=10.0)
    queue.committed(2)
    assert queue.wait_s(120.0) == 40.0


def test_after_an_upload_there_is_a_rest_of_a_tenth_of_its_time() -> None:
    queue = UploadQueue(every_s=None)
    queue.committed(1)
    queue.begin(1, now_s=0.0)
    queue.ended(now_s=100.0, seconds=100.0)
    queue.committed(2)
    assert queue.wait_s(100.0) == 10.0
    assert queue.wait_s(110.0) == 0.0


def test_after_a_failure_the_newest_is_tried_at_once_and_the_failed_one_is_held_no_more() -> None:
    queue = UploadQueue(every_s=60.0)
    queue.committed(1)
    queue.begin(1, now_s=0.0)
    queue.committed(2)
    queue.failed()
    assert (queue.next_step, queue.wait_s(0.0)) == (2, 0.0)
    assert queue.held() == {2}


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


def test_steps_that_were_set_aside_or_are_gone_are_forgotten() -> None:
    queue = UploadQueue(every_s=None)
    queue.pinned([3, 8])
    queue.committed(5, set_aside_after=4)
    assert queue.held() == {3, 5}
    queue.forget(5)
    queue.forget(3)
    assert queue.next_step is None
