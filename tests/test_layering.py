"""Imports point down only (ARCHITECTURE.md, Layers), and the torch-free part is torch-free.

Every import counts, also one inside a function, except under ``if TYPE_CHECKING:``.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

#: From the bottom up. A module belongs to the longest name that it begins with.
LAYERS = {
    "base": ("types", "config", "console", "errors", "events", "faults", "forks"),
    "store": ("store",),
    "decide": ("policy",),
    "act": (
        "state",
        "snapshot",
        "persist",
        "run",
        "ranks",
        "restore",
        "pacing",
        "simulation",
    ),
    "facade": ("manager",),
    "edge": ("cli", "integrations", "testing"),
}
RANKS = {name: rank for rank, names in enumerate(LAYERS.values()) for name in names}
EDGE = list(LAYERS).index("edge")
TORCH_FREE = (
    *LAYERS["base"],
    *LAYERS["store"],
    *LAYERS["decide"],
    *("persist.worker", "restore.images", "cli", "simulation"),
)
#: What pure decisions may not import: no torch, clock or I/O.
IMPURE = {"torch", "numpy", "os", "io", "pathlib", "shutil", "socket", "subprocess", "time"}


def modules() -> dict[str, ast.Module]:
    """Every module of both packages by dotted name."""
    found = {}
    for package in ("checkfreq", "iterators"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = ast.parse(path.read_text(), filename=str(path))
    return found


MODULES = modules()


def is_package(name: str) -> bool:
    return (ROOT / Path(*name.split("."))).is_dir()


@functools.cache
def imported(name: str) -> frozenset[str]:
    """Dotted names that module ``name`` imports; for our own packages the module itself."""
    return frozenset(
        ours(target) or target
        for node in runtime_nodes(MODULES[name])
        for target in targets(node, importer=name)
    )


def runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those that only a type checker sees."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        yield from runtime_nodes(node)


def targets(node: ast.AST, *, importer: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        package = importer if is_package(importer) else importer.rpartition(".")[0]
        base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1])
        prefix = ".".join(filter(None, (base if node.level else "", node.module)))
        yield from (f"{prefix}.{alias.name}" for alias in node.names)


def ours(target: str) -> str | None:
    """The module of ours that ``target`` names, or holds it; None for other packages."""
    while target:
        if target in MODULES:
            return target
        target = target.rpartition(".")[0]
    return None


def rank_of(name: str) -> int:
    """Layer of a module of checkfreq, 0 at the bottom."""
    parts = name.removeprefix("checkfreq.").split(".")
    assert parts[0] in RANKS, f"{name} has no layer: give it one here and in ARCHITECTURE.md"
    return RANKS[parts[0]]


def everything_behind(name: str) -> set[str]:
    """All modules that importing ``name`` imports, parents included."""
    todo, done = [name], set()
    while todo:
        current = todo.pop()
        if current in done:
            continue
        done.add(current)
        if current in MODULES:
            parents = [current.rpartition(".")[0]] if "." in current else []
            todo += [*imported(current), *parents]
    return done


def names_in(package: str) -> list[str]:
    return [name for name in MODULES if name == package or name.startswith(package + ".")]


def torch_free_modules() -> list[str]:
    return [name for part in TORCH_FREE for name in names_in(f"checkfreq.{part}")]


@pytest.mark.parametrize("name", [name for name in names_in("checkfreq") if "." in name])
def test_imports_point_down_only(name: str) -> None:
    for target in sorted(imported(name) & set(MODULES)):
        if target.split(".")[0] == "iterators":
            assert rank_of(name) == EDGE, f"{name} imports {target}: only edge code may"
        elif target != "checkfreq":
            assert rank_of(target) <= rank_of(name), f"{name} imports {target}, above it"


@pytest.mark.parametrize("name", names_in("iterators"))
def test_iterators_import_nothing_from_checkfreq(name: str) -> None:
    assert not {target for target in imported(name) if target.split(".")[0] == "checkfreq"}


@pytest.mark.parametrize("name", names_in("checkfreq.policy"))
def test_decisions_are_pure(name: str) -> None:
    assert not {target.split(".")[0] for target in imported(name)} & IMPURE


def test_no_module_imports_itself_in_a_circle() -> None:
    for name in MODULES:
        for target in imported(name) & set(MODULES):
            assert name not in reachable(target), f"{name} and {target} import each other"


def reachable(name: str) -> set[str]:
    """Modules of ours reached by import statements alone (parents left out)."""
    todo, done = [name], set()
    while todo:
        current = todo.pop()
        if current in MODULES and current not in done:
            done.add(current)
            todo += imported(current)
    return done


@pytest.mark.parametrize("name", torch_free_modules())
def test_torch_free_modules_reach_no_torch(name: str) -> None:
    assert "torch" not in {found.split(".")[0] for found in everything_behind(name)}


def test_fsync_is_called_in_fileops_only() -> None:
    callers = {
        name
        for name, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in ("fsync", "fdatasync", "sync_file_range")
    }
    assert callers <= {"checkfreq.store.fileops"}


def test_torch_free_modules_run_in_a_python_without_torch() -> None:
    program = "\n".join(
        [
            "import importlib, sys",
            "class NoTorch:",
            "    def find_spec(self, name, path=None, target=None):",
            "        if name.split('.')[0] == 'torch':",
            "            raise ImportError('torch is not here')",
            "sys.meta_path.insert(0, NoTorch())",
            "for name in sys.argv[1:]:",
            "    importlib.import_module(name)",
        ]
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, "checkfreq", *torch_free_modules()],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert (done.returncode, done.stderr) == (0, "")
