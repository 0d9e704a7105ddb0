"""A disk in memory that forgets what was not synced."""

from __future__ import annotations

import pytest

from checkfreq.testing import CrashingFileOps


@pytest.fixture
def disk() -> CrashingFileOps:
    return CrashingFileOps()
