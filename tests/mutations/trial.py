"""Runs tests on a copy of the checkout that has a break in it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutations.edits import Break
from tests.patience import slowness

ROOT = Path(__file__).resolve().parents[2]
_COPIED = ("checkfreq", "iterators", "tests", "pyproject.toml")
_LIMIT_S = 120.0
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Outcome:
    """``failed`` are the tests that failed; ``problem`` is why there is no answer."""

    failed: tuple[str, ...]
    num_passed: int
    problem: str = ""


def broken(text: str, edits: Sequence[tuple[str, str]]) -> str:
    """The text with all edits; ValueError unless each text to replace is there exactly once."""
    for old, new in edits:
        if (found := text.count(old)) != 1:
            raise ValueError(f"expected once, found {found} times: {old!r}")
        text = text.replace(old, new)
    return text


def in_turns(names: Sequence[str]) -> list[int]:
    """Where each stands in ``names``, in a new order: two of every name, then two more, ...

    A test that notices a break then comes after few cases of the others, which may have hundreds.
    """
    seen: Counter[str] = Counter()
    turns = []
    for at, name in enumerate(names):
        turns.append((seen[name] // 2, at))
        seen[name] += 1
    return [at for _, at in sorted(turns)]


def copy_checkout(folder: Path, *, breaking: Break | None) -> None:
    """The package and its tests in an empty folder, with the break in it."""
    for name in _COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    if breaking is not None:
        path = folder / breaking.file
        path.write_text(broken(path.read_text(), breaking.edits))


def run_tests(folder: Path, arguments: Sequence[str]) -> Outcome:
    """Run pytest on a copy until its first failure, in a fork that need not import torch again.

    No module of ours may be imported from the checkout in the calling process, and no device used.
    """
    report = folder / "outcome.json"
    child = os.fork()
    if child == 0:
        _in_child(folder, lambda: _tested(folder, arguments, report))
    if not _ends(child, within_s=_LIMIT_S * slowness()):
        return Outcome((), 0, "it did not end")
    if not report.exists():
        return Outcome((), 0, f"it crashed: {_last_lines(folder / 'output.txt')}")
    found = json.loads(report.read_text())
    return Outcome(tuple(found["failed"]), found["passed"])


def _in_child(folder: Path, run: Callable[[], None]) -> None:
    try:
        os.setsid()
        os.chdir(folder)
        _say_nothing(folder / "output.txt")
        _forget_the_checkout()
        run()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(0)


def _last_lines(output: Path) -> str:
    return "\n".join(output.read_text().splitlines()[-10:])


def _say_nothing(output: Path) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    fd = os.open(output, os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)


def _forget_the_checkout() -> None:
    """Have ``tests`` and ``checkfreq`` imported anew, from the copy, which leaves no bytecode."""
    sys.dont_write_bytecode = True
    for name in list(sys.modules):
        if name.partition(".")[0] in ("tests", "checkfreq", "iterators"):
            del sys.modules[name]
    sys.path[:] = [path for path in sys.path if path and Path(path).resolve() != ROOT]


def _tested(folder: Path, arguments: Sequence[str], report: Path) -> None:
    import pytest

    class Recorder:
        def __init__(self) -> None:
            self.failed: list[str] = []
            self.passed = 0

        def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
            names = [item.nodeid.partition("[")[0] for item in items]
            items[:] = [items[at] for at in in_turns(names)]

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                self.failed.append(report.nodeid)
            self.passed += report.when == "call" and report.passed

        def pytest_collectreport(self, report: pytest.CollectReport) -> None:
            if report.failed:
                raise SystemExit(f"cannot collect {report.nodeid}: {report.longrepr}")

    seen = Recorder()
    options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"--rootdir={folder}"]
    pytest.main([*options, *arguments], plugins=[seen])
    report.write_text(json.dumps({"failed": seen.failed, "passed": seen.passed}))


def _ends(child: int, *, within_s: float) -> bool:
    """Wait for a child; one that is late is killed with its process group."""
    until_s = time.monotonic() + within_s
    while time.monotonic() < until_s:
        if os.waitpid(child, os.WNOHANG)[0]:
            return True
        time.sleep(_POLL_S)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False
