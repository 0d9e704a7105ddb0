"""When updates can be relied on to ask the fence."""

from __future__ import annotations

import pytest

from checkfreq.snapshot.evidence import Evidence, Sample


def test_what_is_new_was_restored_or_changed_by_an_attempt_refutes_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    evidence = Evidence()
    evidence.compare(Sample(0, {"weight": b"1"}))
    evidence.forget()
    evidence.compare(Sample(0, {"weight": b"2"}))
    evidence.compare(Sample(1, {"weight": b"3"}))
    evidence.compare(Sample(1, {"weight": b"3", "momentum": b"9"}))
    assert evidence.holds
    assert caplog.records == []
