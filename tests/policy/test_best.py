"""The best checkpoint by a metric, and its name."""

from __future__ import annotations

import pytest

from checkfreq.errors import ConfigError, NoCheckpointError
from checkfreq.policy.best import BestName, best_step, require_best
from checkfreq.policy.retention_info import CheckpointInfo

NAN, INF = float("nan"), float("inf")


def rated(*values: float) -> list[CheckpointInfo]:
    return [CheckpointInfo(n, metrics={"loss": value}) for n, value in enumerate(values, 1)]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("best:loss", BestName("loss")),
        ("best:loss:min", BestName("loss", highest=False)),
        ("best:val:accuracy:max", BestName("val:accuracy", highest=True)),
        ("best:val:accuracy", BestName("val:accuracy")),
    ],
)
def test_a_name_says_the_metric_and_maybe_the_direction(text: str, name: BestName) -> None:
    assert BestName.parse(text) == name


@pytest.mark.parametrize("text", ["", "best", "best:", "best::max", "worst:loss", "12"])
def test_any_other_text_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="expected a number, 'best:METRIC'"):
        BestName.parse(text)


def test_the_lowest_or_the_highest_finite_value_wins_and_of_equal_ones_the_newer() -> None:
    there = rated(NAN, 0.2, 0.9, 0.2, INF, -INF, 0.9, NAN)
    assert best_step(there, "loss", highest=False) == 4
    assert best_step(there, "loss", highest=True) == 7
    assert best_step(there, "accuracy", highest=True) is None
    assert best_step(rated(NAN, INF), "loss", highest=True) is None


def test_the_name_decides_the_direction_before_the_caller_does() -> None:
    there = rated(0.2, 0.9)
    for name, step in (("best:loss", 2), ("best:loss:min", 1), ("best:loss:max", 2)):
        assert require_best(there, BestName.parse(name), highest=True, where="chk") == step
    assert require_best(there, BestName("loss"), where="chk") == 1


def test_without_such_a_metric_those_that_there_are_are_listed() -> None:
    with pytest.raises(NoCheckpointError, match="'f1'; its metrics: loss. Give them with save"):
        require_best(rated(0.1), BestName("f1"), where="chk")
    with pytest.raises(NoCheckpointError, match="its metrics: none"):
        require_best([], BestName("f1"), where="chk")
