"""A directory for real runs."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def chk_dir(tmp_path: Path) -> Path:
    """Where a manager keeps its checkpoints; it makes the directory."""
    return tmp_path / "chk"
