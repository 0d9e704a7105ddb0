"""Hostile directories, others at each run: see ``fuzz``. CHECKFREQ_FUZZ_SEED repeats a run."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.hostile.fuzz import Fuzzer


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seconds", [0.0, pytest.param(60.0, marks=pytest.mark.more)])
def test_every_reader_withstands_whatever_is_in_a_directory(
    seconds: float,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Some cases in any case; CHECKFREQ_FUZZ_SECONDS lengthens it."""
    seconds = float(os.environ.get("CHECKFREQ_FUZZ_SECONDS") or seconds)
    caplog.set_level("DEBUG")

    def said() -> str:
        text = "".join([*capsys.readouterr(), *caplog.messages])
        caplog.clear()
        return text

    fuzzer = Fuzzer(tmp_path, said, seed=int(os.environ["CHECKFREQ_FUZZ_SEED"]))
    case, end_s = 0, time.monotonic() + seconds
    while case < 20 or time.monotonic() < end_s:
        fuzzer.run(case)  # a failure names seed and case
        case += 1
