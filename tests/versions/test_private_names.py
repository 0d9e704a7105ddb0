"""What checkfreq uses of the insides of torch, DALI, NumPy and Python is there, and is listed."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeGuard

import pytest
import torch

from tests.versions.private_names import Made, PrivateName, listed

ROOT = Path(__file__).resolve().parents[2]
HAS_DALI = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.dali")
#: Private by their name only: they are documented.
DOCUMENTED = {"_exit", "_replace", "_asdict", "_fields", "_getframe"}
#: A module of torch named in a text, which is how modules that may not be imported are looked up.
_MODULE = re.compile(r"torch(?:\.\w+)*\._\w+(?:\.\w+)*\.?")


NAMES = listed()
DALI = [one for one in NAMES if one.owner == "DALI"]
OTHERS = [one for one in NAMES if one.owner != "DALI"]


def expect(one: PrivateName, version: str, made: Made | None = None) -> None:
    try:
        is_there, how = one.is_there(made), "it means something else"
    except (AttributeError, ImportError, KeyError, TypeError, ValueError) as error:
        is_there, how = False, f"{type(error).__name__}: {error}"
    assert is_there, (
        f"{one.owner} {version} has no {one.name} as {one.used} uses it ({how}). "
        f"Without it, {one.breaks}. Instead: {one.instead}"
    )


@pytest.mark.parametrize("one", OTHERS, ids=lambda one: one.name)
@pytest.mark.filterwarnings("default")
def test_a_private_name_that_we_use_means_what_it_did(one: PrivateName) -> None:
    expect(one, torch.__version__ if one.owner == "torch" else "")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("files")
    files = [folder / f"{number}.bin" for number in range(4)]
    for file in files:
        file.write_bytes(b"four")
    return Made([str(file) for file in files])


@pytest.mark.dali
@pytest.mark.skipif(not HAS_DALI, reason="NVIDIA DALI is not installed")
@pytest.mark.parametrize("one", DALI, ids=lambda one: one.name)
def test_a_private_name_of_dali_means_what_it_did(one: PrivateName, made: Made) -> None:
    from nvidia.dali import __version__

    expect(one, __version__, made)


def sources() -> Iterator[tuple[str, str]]:
    """Every file of both packages, but for the frameworks under integrations/."""
    for package in ("checkfreq", "iterators"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith("checkfreq/integrations/") or "/dcp/" in name:
                yield name, path.read_text()


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith(("__", "_cf_"))


def is_set_on_self(node: ast.AST) -> TypeGuard[ast.Attribute]:
    is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    return is_set and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def names_a_module(node: ast.AST) -> TypeGuard[ast.Constant]:
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_text and _MODULE.fullmatch(node.value) is not None


def defined_in(tree: ast.AST) -> Iterator[str]:
    """What a module of ours defines or sets under a private name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif is_set_on_self(node):
            yield node.attr


def used_in(tree: ast.AST) -> Iterator[str]:
    """Private attributes, names that are imported, and modules of torch that are looked up."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)
        elif names_a_module(node):
            yield str(node.value)


def test_every_private_name_in_use_is_listed() -> None:
    trees = {name: ast.parse(text) for name, text in sources()}
    ours = {name for tree in trees.values() for name in defined_in(tree)}
    known = {one.name for one in NAMES} | DOCUMENTED
    missing = {
        (found, file)
        for file, tree in trees.items()
        for found in used_in(tree)
        if (is_private(found) or _MODULE.fullmatch(found)) and found not in ours | known
    }
    assert missing == set(), "give each an entry in tests/versions/private_names.json"


@pytest.mark.parametrize("one", NAMES, ids=lambda one: one.name)
def test_what_is_listed_is_used_where_it_is_said_to_be(one: PrivateName) -> None:
    text = (ROOT / one.used).read_text()
    stem = one.name.removeprefix("_growth_") if one.name == "_growth_factor" else one.name
    assert stem in text, f"{one.used} does not use {one.name}: take it from the list"
