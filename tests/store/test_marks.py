"""Lines of marks are strict JSON, and malformed lines are skipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkfreq.store.marks import StepMark, mark_line, read_marks

WHERE = Path("marks.jsonl")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 0.25, -3.0])
def test_any_float_comes_back_from_strict_json(value: float) -> None:
    line = mark_line(3, keep=True, metrics={"loss": value})
    assert "NaN" not in line
    assert "Infinity" not in line
    (mark,) = read_marks(line.encode(), path=WHERE).values()
    assert mark.keep
    assert repr(mark.metrics["loss"]) == repr(value)


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "{}",
        '{"step": 3, "ke',
        '{"step": "3", "keep": true, "metrics": {}}',
        '{"step": 3, "keep": 1, "metrics": {}}',
        '{"step": 3, "keep": null, "metrics": 5}',
        '{"step": 3, "keep": null, "metrics": {"loss": true}}',
        f'{{"step": 3, "keep": null, "metrics": {{"loss": 1{400 * "0"}}}}}',
        '{"step": 3, "keep": null, "metrics": {}, "finished": 1}',
        '{"step": 3, "keep": null, "metrics": {}, "at_epoch_end": 1}',
    ],
    ids=lambda line: line[:40],
)
def test_a_line_that_is_no_mark_is_skipped_and_said(
    line: str, caplog: pytest.LogCaptureFixture
) -> None:
    lines = f"{line}\n{mark_line(4, keep=True)}"
    assert read_marks(lines.encode(), path=WHERE) == {4: StepMark(keep=True)}
    assert "skipped line 1, which is not a mark" in caplog.text


def test_that_an_epoch_ended_stays_known_when_more_is_marked() -> None:
    lines = [mark_line(3, at_epoch_end=True), mark_line(3, keep=True), mark_line(4)]
    lines += [mark_line(4, metrics={name: 0.5}) for name in ("loss", "accuracy")]
    marks = read_marks("\n".join(lines).encode(), path=WHERE)
    assert marks == {
        3: StepMark(keep=True, at_epoch_end=True),
        4: StepMark(metrics={"loss": 0.5, "accuracy": 0.5}),
    }
