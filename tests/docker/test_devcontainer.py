"""The development container names files, users and targets that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".devcontainer"


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    """The file is JSON with comments on lines of their own."""
    text = (FOLDER / "devcontainer.json").read_text()
    loaded: dict[str, Any] = json.loads(re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE))
    return loaded


def test_it_is_built_from_a_dockerfile_beside_it_with_the_checkout_as_context(
    settings: dict[str, Any],
) -> None:
    assert (FOLDER / settings["build"]["dockerfile"]).is_file()
    assert (FOLDER / settings["build"]["context"]).resolve() == ROOT


def test_its_first_command_is_a_target_of_make(settings: dict[str, Any]) -> None:
    target = settings["postCreateCommand"].removeprefix("make ")
    makefile = (ROOT / "Makefile").read_text()
    assert target.replace(".venv", "$(VENV)") + ":" in makefile
