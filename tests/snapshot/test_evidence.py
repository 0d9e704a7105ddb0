"""When updates can be relied on to ask the fence."""

from __future__ import annotations

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
