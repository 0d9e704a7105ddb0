"""Lines of marks are strict JSON, and malformed lines are skipped."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NoReturn

import pytest

from checkfreq.store.marks import StepMark, mark_line, read_marks

WHERE = Path("marks.jsonl")


def strictly(text: str) -> Any:
    """Parse like a strict JSON reader, which accepts no NaN."""

    def refuse(name: str) -> NoReturn:
        raise ValueError(name)

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 0.25, -3.0])
def test_any_float_comes_back_from_strict_json(value: float) -> None:
    line = mark_line(3, keep=True, metrics={"loss": value})
    strictly(line)
    (mark,) = read_marks(line.encode(), path=WHERE).values()
    assert mark.keep
    assert repr(mark.metrics["loss"]) == repr(value)


def test_lines_of_an_earlier_version_are_understood() -> None:
    line = b'{"step": 3, "keep": null, "metrics": {"loss": NaN, "other": 1}}'
    metrics = read_marks(line, path=WHERE)[3].metrics
    assert math.isnan(metrics["loss"])
    assert metrics["other"] == 1.0


@pytest.mark.parametrize(
    "value", ['"much"', "true", "null", "[1]", "1" + 400 * "0"], ids=lambda text: text[:6]
)
def test_a_metric_that_is_not_a_number_is_skipped_with_a_warning(
    value: str, caplog: pytest.LogCaptureFixture
) -> None:
    lines = f'{{"step": 3, "keep": null, "metrics": {{"loss": {value}}}}}\n{mark_line(4)}'
    assert read_marks(lines.encode(), path=WHERE) == {4: StepMark()}
    assert "not a mark" in caplog.text


def test_that_an_epoch_ended_stays_known_when_more_is_marked() -> None:
    lines = [mark_line(3, at_epoch_end=True), mark_line(3, keep=True), mark_line(4)]
    marks = read_marks("\n".join(lines).encode(), path=WHERE)
    assert marks == {3: StepMark(keep=True, at_epoch_end=True), 4: StepMark()}


def test_an_end_of_an_epoch_that_is_no_truth_value_is_not_a_mark(
    caplog: pytest.LogCaptureFixture,
) -> None:
    line = b'{"step": 3, "keep": null, "metrics": {}, "at_epoch_end": 1}'
    assert read_marks(line, path=WHERE) == {}
    assert "not a mark" in caplog.text
