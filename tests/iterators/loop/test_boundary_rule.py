"""When a boundary is due, as tables."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from iterators.loop.boundary_rule import BoundaryRule


@dataclass
class Updates:
    """Counts weight updates, as a manager does."""

    update_attempts: int = 0


@pytest.mark.parametrize(
    ("pending", "updates", "is_due", "num_unused"),
    [(0, 0, False, 0), (0, 1, False, 0), (1, 0, False, 1), (1, 1, True, 0), (3, 2, True, 0)],
)
def test_an_update_after_a_batch_makes_a_boundary_due(
    pending: int, updates: int, is_due: bool, num_unused: int
) -> None:
    manager = Updates(7)
    rule = BoundaryRule(manager, accumulate=None)
    rule.start_group()
    manager.update_attempts += updates
    assert rule.is_due(pending) is is_due
    assert rule.is_due(pending, epoch_over=True) is is_due
    assert rule.num_unused(pending) == num_unused


@pytest.mark.parametrize(
    ("pending", "is_due", "is_due_at_end"),
    [(0, False, False), (1, False, True), (2, False, True), (3, True, True), (4, True, True)],
)
def test_accumulate_counts_batches_and_a_shorter_group_at_the_epochs_end(
    pending: int, is_due: bool, is_due_at_end: bool
) -> None:
    rule = BoundaryRule(Updates(), accumulate=3)
    rule.start_group()
    assert rule.is_due(pending) is is_due
    assert rule.is_due(pending, epoch_over=True) is is_due_at_end
    assert rule.counts_batches


def test_without_a_manager_every_batch_makes_one_due_and_none_is_unused() -> None:
    rule = BoundaryRule(None, accumulate=None)
    rule.start_group()
    assert not rule.is_due(0)
    assert rule.is_due(1)
    assert rule.num_unused(1) == 0
    assert not rule.no_update_since(rule.attempts)
    assert not rule.counts_batches


def test_updates_before_a_groups_first_batch_do_not_count_for_it() -> None:
    manager = Updates()
    rule = BoundaryRule(manager, accumulate=None)
    manager.update_attempts += 1
    rule.start_group()
    assert not rule.is_due(1)
    assert rule.no_update_since(1)
