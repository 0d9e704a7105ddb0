"""A pytest plugin: one JSON line per test that ended, written at once, so that a crash loses none.

``CHECKFREQ_TEST_OUTCOMES`` names the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

VARIABLE = "CHECKFREQ_TEST_OUTCOMES"


def pytest_runtest_logstart(nodeid: str) -> None:
    _write({"test": nodeid, "outcome": "started"})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.passed:
        return
    _write({"test": report.nodeid, "outcome": report.outcome, "why": _why(report)})


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write({"test": report.nodeid, "outcome": "failed", "why": _last_line(report.longreprtext)})


def _why(report: pytest.TestReport) -> str:
    if report.skipped and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    return "" if report.passed else _first_error(report.longreprtext)


def _first_error(text: str) -> str:
    errors = [line[1:].strip() for line in text.splitlines() if line.startswith("E ")]
    return errors[0] if errors else _last_line(text)


def _last_line(text: str) -> str:
    return next(_filled_backwards(text), "")


def _filled_backwards(text: str) -> Iterator[str]:
    return (line.strip() for line in reversed(text.splitlines()) if line.strip())


def _write(line: dict[str, Any]) -> None:
    with open(os.environ[VARIABLE], "a") as file:
        file.write(json.dumps(line) + "\n")
