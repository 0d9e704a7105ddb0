"""Examples and recipes belong together."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "docs/recipes"
EXAMPLES = {path.name for path in (ROOT / "checkfreq/examples").glob("[!_]*.py")}


def linked(page: Path) -> set[str]:
    return set(re.findall(r"\]\(\.\./\.\./checkfreq/examples/(\w+\.py)\)", page.read_text()))


def test_every_example_is_explained_by_a_recipe() -> None:
    assert set().union(*map(linked, RECIPES.glob("*.md"))) == EXAMPLES


def test_the_index_lists_every_recipe_once_in_its_table_and_in_its_toctree() -> None:
    index = (RECIPES / "index.md").read_text()
    pages = sorted(path.stem for path in RECIPES.glob("*.md") if path.stem != "index")
    assert sorted(re.findall(r"\]\((\w+)\.md\) \|$", index, re.MULTILINE)) == pages
    assert sorted(re.findall(r"^(\w+)$", index, re.MULTILINE)) == pages
