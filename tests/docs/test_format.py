"""The page on the format names every field, tag and event that is written."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkfreq.store.manifest import FileEntry, Manifest, TensorEntry
from checkfreq.store.store import CheckpointStore

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "format.md").read_text()
#: What is set as code, outside of fences.
CODE = set(re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", PAGE, flags=re.M | re.S)))
TAG = re.compile(r"\$[A-Za-z_]+(?:\.[A-Za-z_]+)?")
FIXTURES = ROOT / "tests" / "fixtures"


def strings_in(path: Path) -> set[str]:
    """Every string constant of a module but docstrings."""
    tree = ast.parse(path.read_text())
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs
    }


def modules() -> Iterator[Path]:
    return (ROOT / "checkfreq").rglob("*.py")


def test_the_tags_on_the_page_are_those_that_are_written() -> None:
    written = {text for path in modules() for text in strings_in(path) if TAG.fullmatch(text)}
    written |= {f"$torch.{name}" for name in ("dtype", "memory_format", "layout")}
    assert {"$tensor", "$tuple", "$numpy"} <= written
    assert set(TAG.findall(PAGE)) == written


@pytest.mark.parametrize("record", [Manifest, FileEntry, TensorEntry])
def test_every_field_of_the_manifest_is_on_the_page(record: type) -> None:
    assert {*record.__slots__} <= CODE  # type: ignore[attr-defined]


@pytest.mark.parametrize("version", [1, 2])
def test_every_field_and_kind_of_the_objects_in_the_fixtures_is_on_the_page(version: int) -> None:
    manifest = CheckpointStore(FIXTURES / f"format-{version}").manifest(2)
    assert manifest.format_version == version
    for objects in (manifest.objects, *manifest.ranks.values()):
        for json in objects.values():
            assert {*json} <= CODE
            assert json.get("kind", "module") in CODE


def test_every_kind_of_event_is_on_the_page() -> None:
    kinds = {
        value.value
        for path in modules()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and node.args and _name(node.func) == "record"
        for value in (node.args[0], *vars(node.args[0]).values())  # "this" if ... else "that"
        if isinstance(value, ast.Constant) and isinstance(value.value, str)
    }
    assert {"committed", "restored", "reopened", "ranks differ"} <= kinds
    assert kinds <= CODE


def _name(function: ast.expr) -> str:
    return getattr(function, "attr", getattr(function, "id", ""))
