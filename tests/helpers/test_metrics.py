"""Metrics: the same values give the same history, however they are split and interrupted."""

from __future__ import annotations

import csv
import math
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from checkfreq import CFCheckpoint, CFManager, CFMode
from checkfreq.errors import ConfigError, StateError, StorageError
from checkfreq.helpers import Best, Metrics, Summary
from checkfreq.helpers.group import Group
from checkfreq.helpers.sums import ExactSum
from tests.state.ranks import run_ranks

FLOATS = st.floats(-1e100, 1e100)


class Rank:
    """A rank whose group has the others' values already."""

    def __init__(self, rank: int, others: list[Any]) -> None:
        self.rank, self.world = rank, len(others) + 1
        self._others = others

    def gather(self, value: Any) -> list[Any]:
        """Everyone's."""
        return [*self._others[: self.rank], value, *self._others[self.rank :]]


def test_means_are_weighted_and_nan_shows_in_the_sum_and_not_in_the_extremes() -> None:
    metrics = Metrics()
    metrics.update({"loss": torch.tensor(1.0), "unweighed": 1.0}, weight=3)
    metrics.update({"loss": 5.0, "images": 2})
    metrics.update({"loss": 2.0, "none": 1.0}, weight=0)
    for value in (math.nan, 2.0, math.nan, 1.0):
        metrics.update({"odd": value})
    row = metrics.reduce()
    assert row["loss"] == Summary(num=3, sum=8.0, weight=4.0, min=1.0, max=5.0, last=2.0)
    assert (row["loss"].mean, row["images"].sum) == (2.0, 2.0)
    assert math.isnan(row["none"].mean)
    assert (row["odd"].min, row["odd"].max, row["odd"].last) == (1.0, 2.0, 1.0)
    assert math.isnan(row["odd"].sum)


def test_reductions_add_up_to_the_epoch_and_epochs_to_the_history() -> None:
    metrics = Metrics()
    for epoch in range(2):
        for value in (1.0, 3.0):
            metrics.update({"loss": value + epoch})
            assert metrics.reduce()["loss"].num == 1
        assert metrics.epoch["loss"].num == 2
        assert metrics.end_epoch()["loss"].mean == 2.0 + epoch
    assert metrics.epoch == {}
    assert metrics.series("loss") == [2.0, 3.0]
    assert metrics.series("loss", of="max") == [3.0, 4.0]


def test_the_best_epoch_is_the_first_of_its_value_and_never_nan() -> None:
    metrics = Metrics()
    for value in (math.nan, 0.5, 0.3, 0.3, math.inf):
        metrics.update({"loss": value})
        metrics.end_epoch()
    metrics.end_epoch()  # an epoch without a value
    assert metrics.best("loss") == Best(2, 0.3)
    assert metrics.best("loss", highest=True) == Best(4, math.inf)
    assert metrics.best("other") is None
    assert math.isnan(metrics.series("loss")[5])


@pytest.mark.parametrize("weight", [-1.0, math.nan])
def test_a_weight_that_is_none_is_refused(weight: float) -> None:
    with pytest.raises(ConfigError, match=r"Metrics\.update\(weight=\.\.\.\)"):
        Metrics().update({"loss": 1.0}, weight=weight)
    with pytest.raises(ConfigError, match="expected one of mean, sum"):
        Metrics().series("loss", of="median")


@given(st.lists(FLOATS), st.randoms(use_true_random=False))
def test_a_sum_is_exact_in_any_order(values: list[float], dice: random.Random) -> None:
    exact = sum(map(Fraction, values), Fraction(0))
    dice.shuffle(values)
    total = ExactSum()
    for value in values:
        total.add(value)
    assert Fraction(total.value) == Fraction(float(exact))
    for value in (1e308, 1e308, 1.0):
        total.add(value)
    assert total.value == math.inf


@pytest.mark.parametrize(
    "state",
    [{}, {"history": [], "epoch": {"a": 1.0}, "own": {}, "rank": None}],
)
def test_a_state_of_something_else_is_refused_and_changes_nothing(state: Any) -> None:
    metrics = Metrics()
    metrics.update({"loss": 1.0})
    before = metrics.state_dict()
    with pytest.raises(StateError, match=r"expected a state_dict\(\) of Metrics"):
        metrics.load_state_dict(state)
    assert metrics.state_dict() == before


def test_values_of_another_rank_that_were_not_reduced_are_dropped_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    saved: Group = Rank(0, [{}])
    metrics = Metrics(group=saved)
    metrics.update({"loss": 1.0})
    same, other = Metrics(group=saved), Metrics(group=Rank(1, [{}]))
    same.load_state_dict(metrics.state_dict())
    assert caplog.text == ""
    other.load_state_dict(metrics.state_dict())
    assert "rank 1 restores values that rank 0 counted" in caplog.text
    assert (same.reduce()["loss"].num, other.reduce()) == (1, {})


def of_three_epochs() -> Metrics:
    metrics = Metrics()
    for epoch in range(3):
        metrics.update({"loss": 0.1 * epoch, **({"images": 8} if epoch else {})})
        metrics.end_epoch()
    return metrics


def test_the_csv_has_a_line_per_epoch_and_every_digit(tmp_path: Path) -> None:
    of_three_epochs().to_csv(tmp_path / "metrics.csv")
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["0", "1", "2"]
    assert [float(row["loss.mean"]) for row in rows] == [0.0, 0.1, 0.2]
    assert [row["images.num"] for row in rows] == ["", "1", "1"]
    assert list(rows[0])[:3] == ["epoch", "images.mean", "images.sum"]
    with pytest.raises(StorageError, match=r"Metrics.to_csv to .*gone/metrics\.csv"):
        of_three_epochs().to_csv(tmp_path / "gone" / "metrics.csv")


class Writer:
    """Keeps what a SummaryWriter would."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> None:
        """See ScalarWriter."""
        self.scalars.append((tag, scalar_value, global_step))


def test_tensorboard_gets_the_last_epoch_or_those_asked_for(tmp_path: Path) -> None:
    writer, metrics = Writer(), of_three_epochs()
    Metrics().to_tensorboard(writer)
    metrics.to_tensorboard(writer)
    assert writer.scalars == [("images", 8.0, 2), ("loss", 0.2, 2)]
    writer.scalars.clear()
    metrics.to_tensorboard(writer, prefix="train/", epochs=range(2))
    expected = [("train/loss", 0.0, 0), ("train/images", 8.0, 1), ("train/loss", 0.1, 1)]
    assert writer.scalars == expected
    other = Metrics(group=Rank(1, [{}]))  # only rank 0 writes
    other.update({"loss": 1.0})
    other.end_epoch()
    other.to_tensorboard(writer)
    other.to_csv(tmp_path / "metrics.csv")
    assert (writer.scalars, list(tmp_path.iterdir())) == (expected, [])


def _resumable(role: Any, folder: Path, resume: bool) -> tuple[int, float]:
    """One life of a rank: an update that only it counts, or the restore of that."""
    torch.manual_seed(0)
    metrics = Metrics()
    model = nn.Linear(2, 1)
    chk = CFCheckpoint(model=model, metrics=metrics, per_rank=["metrics"])
    with CFManager(folder / "chk", chk, mode=CFMode.MANUAL, chk_freq=100) as cf_manager:
        assert cf_manager.restore() == resume
        if not resume:
            metrics.update({"loss": 0.5 + role.rank})
            cf_manager.step()
    row = metrics.end_epoch()["loss"]
    return row.num, row.sum


@pytest.mark.dist
def test_what_ranks_counted_comes_back_once_on_every_rank(tmp_path: Path) -> None:
    for resume in (False, True):
        found = run_ranks(tmp_path, 2, _resumable, tmp_path, resume)
        assert found == [(2, 2.0), (2, 2.0)]
