"""When ranks meet again: often enough, whatever iterations take meanwhile."""

from __future__ import annotations

import torch

from checkfreq.distributed.together import steps_to_meeting
from checkfreq.pipeline import first_device
from checkfreq.snapshot.captured import CapturedState, Everything
from checkfreq.snapshot.sink import TensorRef


def test_ranks_meet_once_in_the_time_given() -> None:
    assert steps_to_meeting(1.0, 0.25, since_last=50) == 4


def test_they_meet_at_every_boundary_where_iterations_are_longer() -> None:
    assert steps_to_meeting(1.0, 30.0, since_last=50) == 1


def test_a_meeting_is_never_far_away_in_iterations_that_may_become_slower() -> None:
    assert steps_to_meeting(1.0, 0.0001, since_last=5000) == 100


def test_the_distance_at_most_doubles_from_one_meeting_to_the_next() -> None:
    assert [steps_to_meeting(1.0, 0.001, since_last=last) for last in (0, 1, 8)] == [1, 2, 16]


def test_a_rank_that_writes_nothing_of_a_device_still_measures_time_there() -> None:
    own = TensorRef("rng.rank-00001", "cpu", torch.zeros(2), False)
    device = torch.device("meta")
    theirs = TensorRef("model", "weight", torch.zeros(2, device=device), True)
    whole = Everything([theirs, own], {}, {}, {})
    assert first_device(CapturedState([own], {}, {}, {}, whole)) == device
