"""When updates can be relied on to ask the fence."""

from __future__ import annotations

import logging

import pytest

from checkfreq.snapshot.evidence import Evidence, Sample


@pytest.fixture
def evidence() -> Evidence:
    return Evidence()


def sample(attempts: int, weight: bytes, **more: bytes) -> Sample:
    return Sample(attempts, {"weight": weight, **more})


def test_only_after_an_iteration_with_an_attempt_are_they_relied_on(evidence: Evidence) -> None:
    assert evidence.holds, "before the first boundary"
    for attempts, holds in ((0, False), (1, True), (1, False), (3, True), (4, True), (4, False)):
        evidence.pass_boundary(attempts)
        assert evidence.holds is holds
        assert evidence.attempts == attempts


def test_a_write_that_nobody_announced_counts_for_the_rest_of_the_run(evidence: Evidence) -> None:
    evidence.pass_boundary(1)
    evidence.refute()
    evidence.pass_boundary(2)
    assert not evidence.holds


def test_a_change_without_an_attempt_refutes_with_one_warning_that_names_it(
    evidence: Evidence, caplog: pytest.LogCaptureFixture
) -> None:
    evidence.compare(sample(0, b"1", bias=b"5"))
    evidence.compare(sample(0, b"2", bias=b"5"))
    evidence.compare(sample(0, b"3", bias=b"5"))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "weight" in record.getMessage()
    assert "bias" not in record.getMessage()
    assert "updating()" in record.getMessage()
    assert not evidence.holds


def test_what_is_new_was_restored_or_changed_by_an_attempt_refutes_nothing(
    evidence: Evidence, caplog: pytest.LogCaptureFixture
) -> None:
    evidence.compare(sample(0, b"1"))
    evidence.forget()
    evidence.compare(sample(0, b"2"))
    evidence.compare(sample(1, b"3"))
    evidence.compare(sample(1, b"3", momentum=b"9"))
    assert evidence.holds
    assert caplog.records == []
