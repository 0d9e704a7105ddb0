"""One trained state, whose checkpoint each test has a copy of."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.formats.support import save, states_of


@pytest.fixture(scope="session")
def _trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("formats") / "chk"
    return folder, states_of(save(folder))


@pytest.fixture
def live(tmp_path: Path, _trained: tuple[Path, dict[str, Any]]) -> dict[str, Any]:
    """State dicts of the live objects, whose checkpoint of step 3 is in ``tmp_path / "chk"``."""
    folder, states = _trained
    shutil.copytree(folder, tmp_path / "chk")
    return states
