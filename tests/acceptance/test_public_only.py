"""These tests hold for any inside: they import and touch what users may, and nothing else."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PUBLIC = {
    *("checkfreq", "checkfreq.cli", "checkfreq.config", "checkfreq.errors", "checkfreq.events"),
    *("checkfreq.helpers", "checkfreq.testing", "iterators", "iterators.errors"),
    *("iterators.testing", "iterators.dali"),
    "checkfreq.faults",  # the instants of a checkpoint, which outlast any code around them
}
BELOW = (
    *("checkfreq.examples.", "checkfreq.integrations.", "checkfreq.formats."),
    *(
        "tests.acceptance",
        "tests.fork_server",
        "tests.leftovers",
        "tests.patience",
        "tests.required",
    ),
)
FILES = sorted(Path(__file__).parent.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_imports_nothing_that_is_not_public(path: Path) -> None:
    named = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            named.add(node.module or "")
    ours = {name for name in named if name.partition(".")[0] in ("checkfreq", "iterators", "tests")}
    assert {name for name in ours - PUBLIC if not name.startswith(BELOW)} == set()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_touches_no_private_attribute_but_its_own(path: Path) -> None:
    touched = {
        ast.unparse(node)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and ast.unparse(node.value) not in ("self", "os")
    }
    assert touched == set()
