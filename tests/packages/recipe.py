"""What setup.py requires, and what the conda recipe in docs/packages.md requires."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "packages.md"
#: What a package of PyPI is called on conda-forge.
CALLED = {"torch": "pytorch", "xxhash": "python-xxhash"}
_REQUIREMENT = re.compile(r"([\w.-]+?)\s*((?:[<>=!~]=?[\w.*]+,?)*)$")


def _given(name: str) -> object:
    """An argument of ``setup``, which is a literal."""
    for node in ast.walk(ast.parse((ROOT / "setup.py").read_text())):
        if isinstance(node, ast.keyword) and node.arg == name:
            return ast.literal_eval(node.value)
    raise AssertionError(f"setup.py has no {name}")


def python_requires() -> str:
    """The versions of Python that setup.py takes."""
    return str(_given("python_requires"))


def required_by_setup() -> dict[str, str]:
    """Package as conda-forge calls it -> versions."""
    given = _given("install_requires")
    assert isinstance(given, list)
    pairs = [_REQUIREMENT.fullmatch(one) for one in given]
    found = {pair[1]: pair[2] for pair in pairs if pair is not None}
    assert len(found) == len(given)
    return {CALLED.get(name, name): versions for name, versions in found.items()}


def required_by_recipe() -> dict[str, str]:
    """Package -> versions, of the list ``run`` in the recipe."""
    text = PAGE.read_text().split("```yaml\n", 1)[1].split("```", 1)[0]
    run = text.split("\n  run:\n", 1)[1].split("\n\n", 1)[0]
    lines = [line.strip().removeprefix("- ") for line in run.splitlines()]
    return dict((*line.split(), "")[:2] for line in lines)  # type: ignore[misc]
