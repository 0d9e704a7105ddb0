"""The development container names files, users and targets that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".devcontainer"
#: What the specification (containers.dev) allows beside ``build``, of what we use.
KNOWN = {
    *("name", "build", "remoteUser", "runArgs", "remoteEnv", "postCreateCommand"),
    "customizations",
}


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    """The file is JSON with comments on lines of their own."""
    text = (FOLDER / "devcontainer.json").read_text()
    loaded: dict[str, Any] = json.loads(re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE))
    return loaded


def instructions() -> str:
    """The Dockerfile without comments."""
    lines = (FOLDER / "Dockerfile").read_text().splitlines()
    return "\n".join(line for line in lines if not line.startswith("#"))


def test_each_setting_is_one_of_the_specification(settings: dict[str, Any]) -> None:
    assert set(settings) <= KNOWN
    assert set(settings["build"]) == {"dockerfile", "context"}
    assert all(isinstance(argument, str) for argument in settings["runArgs"])


def test_it_is_built_from_a_dockerfile_beside_it_with_the_checkout_as_context(
    settings: dict[str, Any],
) -> None:
    assert (FOLDER / settings["build"]["dockerfile"]).is_file()
    assert (FOLDER / settings["build"]["context"]).resolve() == ROOT


def test_its_user_is_made_by_the_dockerfile_and_is_not_root(settings: dict[str, Any]) -> None:
    made = re.search(r"useradd .*--uid (\d+) (\w+)", instructions())
    assert made is not None
    assert settings["remoteUser"] == made[2]
    assert f"USER {made[1]}:{made[1]}" in instructions()


def test_its_first_command_is_a_target_of_make(settings: dict[str, Any]) -> None:
    target = settings["postCreateCommand"].removeprefix("make ")
    makefile = (ROOT / "Makefile").read_text()
    assert target.replace(".venv", "$(VENV)") + ":" in makefile
