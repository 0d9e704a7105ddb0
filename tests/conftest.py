"""What every tier shares: no test is timed, and those of a device skip where there is none."""

from __future__ import annotations

import os
import random

import pytest
import torch
from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def pytest_configure() -> None:
    """One seed for the hostile directories of tests/hostile, in all processes of a run."""
    os.environ.setdefault("CHECKFREQ_FUZZ_SEED", str(random.SystemRandom().getrandbits(32)))


def pytest_report_header() -> str:
    """It is printed, so that a failure can be repeated."""
    return f"CHECKFREQ_FUZZ_SEED={os.environ['CHECKFREQ_FUZZ_SEED']}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` without a CUDA device."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
