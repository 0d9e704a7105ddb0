"""The tests marked ``gpu``, with a line as each begins and ends, and one for all of them.

A test that kills its process, hangs, or leaves the device unusable is the last one there: those
that are left run in a new process. Without a device all of them are collected, and skip.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.gpu.outcomes import DONE, LINES, LOST

PATHS = ("tests/gpu", "tests/contract/test_state.py")
#: No test takes as long; one that does is killed.
TEST_LIMIT_S = 45.0
#: The statuses of pytest with which all tests were run: they passed, some failed, none was left.
_COMPLETE = (0, 1, 5)


def main(paths: Sequence[str] = PATHS, *, mark: str = "gpu", limit_s: float = TEST_LIMIT_S) -> None:
    """Run all tests."""
    results = Results()
    try:
        with tempfile.NamedTemporaryFile("w", prefix="checkfreq-tests-") as done:
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-rN",
                "--continue-on-collection-errors",
            ]
            command += ["-p", "no:cacheprovider", "-p", "tests.gpu.outcomes", "-m", mark, *paths]
            while results.go_on(_status_of(command, Path(done.name), results, limit_s)):
                done.seek(0)
                done.write("\n".join(results.outcomes))
                done.flush()
    finally:
        results.summarize()


class Results:
    """The outcome of each test that began; ``started`` is that of one that is running."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}
        self._num_collected: int | None = None
        self._num_before = 0

    def take(self, line: dict[str, Any]) -> None:
        """Print a line of the plugin, and note what it says."""
        if "collected" in line:
            self._num_collected = self._num_collected or line["collected"]
            return
        print(json.dumps(line), flush=True)
        self.outcomes[line["test"]] = line["outcome"]

    def go_on(self, problem: str | None) -> bool:
        """Whether tests are left, after a process that had ``problem``; None: it ran them all."""
        for test in [name for name, outcome in self.outcomes.items() if outcome == "started"]:
            self.take({"test": test, "outcome": "failed", "why": problem, "ok": False})
        is_further = len(self.outcomes) > self._num_before
        self._num_before = len(self.outcomes)
        return problem is not None and is_further

    def summarize(self) -> None:
        """Print how many there were."""
        ended = Counter(self.outcomes.values())
        collected = self._num_collected or 0
        counts = {name: ended[name] for name in ("passed", "failed", "skipped")}
        left = max(0, collected - len(self.outcomes) + ended["started"])
        are_run = counts["passed"] or ("--dry" in sys.argv and collected)
        is_good = bool(are_run) and not left and not counts["failed"]
        about = {"collected": collected, **counts, "not_reached": left, "ok": is_good}
        print(json.dumps({"what": "all tests", **about}), flush=True)


def _status_of(command: list[str], done: Path, results: Results, limit_s: float) -> str | None:
    """Why a process of pytest did not run all tests; None if it did."""
    readable, writable = os.pipe()
    process = subprocess.Popen(
        command,
        stdout=sys.stderr,
        env={**os.environ, LINES: str(writable), DONE: str(done)},
        pass_fds=[writable],
    )
    os.close(writable)
    try:
        for line in _until_silent(readable, process, limit_s):
            results.take(line)
        status = process.wait()
    finally:
        process.kill()
        process.wait()
    if status in _COMPLETE:
        return None
    if status == LOST:
        return "it left the device unusable"
    if status == -signal.SIGKILL:
        return f"it was killed: it did not end within {limit_s:.3g} s, or took too much memory"
    return f"its process ended with status {status}"


def _until_silent(
    readable: int, process: subprocess.Popen[bytes], limit_s: float
) -> Iterator[dict[str, Any]]:
    """The lines; the process is killed when no new one comes for so long."""
    with os.fdopen(readable) as lines:
        line = lines.readline()  # after the collection, which has the limit of the stage alone
        while line:
            yield json.loads(line)
            timer = threading.Timer(limit_s, process.kill)
            timer.start()
            line = lines.readline()
            timer.cancel()


if __name__ == "__main__":
    main()
