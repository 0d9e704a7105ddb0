"""A minute of hostile directories, others at each run: see ``fuzz``.

CHECKFREQ_FUZZ_SEED repeats a run, CHECKFREQ_FUZZ_SECONDS lengthens it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.hostile.fuzz import Fuzzer


@pytest.mark.slow
def test_every_reader_withstands_whatever_is_in_a_directory(tmp_path: Path) -> None:
    seed = int(os.environ["CHECKFREQ_FUZZ_SEED"])  # tests/conftest.py draws one
    seconds = float(os.environ.get("CHECKFREQ_FUZZ_SECONDS") or 60)
    fuzzer = Fuzzer(tmp_path, seed=seed)
    case, end_s = 0, time.monotonic() + seconds
    while case == 0 or time.monotonic() < end_s:
        fuzzer.run(case)  # a failure names seed and case
        case += 1
