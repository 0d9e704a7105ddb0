"""A pytest plugin for the tests that need a GPU: one JSON line per test that began, and that ended.

``CHECKFREQ_TEST_OUTCOMES`` is the number of an open descriptor, to which each is written at once.
``CHECKFREQ_TESTS_DONE`` names a file of tests, one a line, that are not to run again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

LINES = "CHECKFREQ_TEST_OUTCOMES"
DONE = "CHECKFREQ_TESTS_DONE"
#: The exit status after a test that left the device unusable: all that follow would fail.
LOST = 70
#: Whatever the time ends, the order of copies and whole trainings were tested before it.
_FIRST = ("test_order", "test_device_engine", "test_training", "test_restoring")
_KEPT_LINES = 30

_failed: set[str] = set()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    done = set(Path(os.environ[DONE]).read_text().splitlines())
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in done])
    items[:] = sorted((item for item in items if item.nodeid not in done), key=_rank)


def _rank(item: pytest.Item) -> int:
    return _FIRST.index(item.path.stem) if item.path.stem in _FIRST else len(_FIRST)


def pytest_collection_finish(session: pytest.Session) -> None:
    _write(collected=len(session.items))


def pytest_runtest_logstart(nodeid: str) -> None:
    _write(test=nodeid, outcome="started")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _failed.add(report.nodeid)
    if report.when != "call" and report.passed:
        return
    about = {} if report.skipped else {"ok": report.passed}
    if report.failed:
        about["text"] = report.longreprtext.splitlines()[-_KEPT_LINES:]
    _write(test=report.nodeid, outcome=report.outcome, why=_why(report), **about)


def pytest_runtest_logfinish(nodeid: str) -> None:
    if nodeid in _failed and _is_lost():
        os._exit(LOST)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        why = _last_line(report.longreprtext)
        _write(test=report.nodeid, outcome="failed", why=why, ok=False)


def _is_lost() -> bool:
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


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


def _write(**line: Any) -> None:
    os.write(int(os.environ[LINES]), (json.dumps(line) + "\n").encode())
