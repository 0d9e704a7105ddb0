"""When a checkpoint is due, for an interval the user gave."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkfreq.errors import ConfigError
from checkfreq.policy.cadence import ManualCadence


def due_steps(interval: int, last: int = 0, *, epoch_every: int = 0, upto: int = 12) -> list[int]:
    """Steps at which one starts when nothing is ever deferred."""
    cadence, found = ManualCadence(interval), []
    for step in range(last + 1, upto + 1):
        epoch_boundary = bool(epoch_every) and step % epoch_every == 0
        if cadence.is_due(step=step, last_step=last, epoch_boundary=epoch_boundary):
            found.append(step)
            last = step
    return found


def test_an_epoch_boundary_changes_nothing_where_an_interval_is_given() -> None:
    assert due_steps(5, epoch_every=4) == [5, 10]


def test_zero_means_at_epoch_boundaries_only() -> None:
    assert due_steps(0, epoch_every=4) == [4, 8, 12]


@given(interval=st.integers(1, 50), last=st.integers(0, 200), gap=st.integers(1, 200))
def test_due_exactly_if_a_multiple_was_passed(interval: int, last: int, gap: int) -> None:
    passed = any(step % interval == 0 for step in range(last + 1, last + gap + 1))
    due = ManualCadence(interval).is_due(step=last + gap, last_step=last, epoch_boundary=False)
    assert due is passed


def test_a_negative_interval_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"chk_freq: expected .* >= 0, got -1"):
        ManualCadence(-1)
