"""Imports point down only (ARCHITECTURE.md, Layers), and the torch-free part is torch-free.

Every import counts, also one inside a function, except under ``if TYPE_CHECKING:``.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

#: From the bottom up, as ARCHITECTURE.md lists them. A folder imports itself and what is above it
#: in this list; the modules of the base may import one another.
BASE = ("types", "errors", "console", "faults", "forks", "keyboard", "events", "config")
FOLDERS = {
    "checkfreq": (
        *("store", "policy", "mirror", "notices", "state", "snapshot", "persist", "supervisor"),
        *("restore", "pacing", "run", "ranks", "session", "crashtest"),
        *("manager", "helpers", "simulation", "story", "doctor"),
        *("integrations", "formats", "cli", "testing"),
    ),
    "iterators": (
        *("errors", "order", "protocol", "loop", "replay", "torch", "dali"),
        *("adapters", "cf_iterator", "testing"),
    ),
}
#: The only code that may import both packages.
EDGE = ("cli", "integrations", "testing")
TORCH_FREE = (
    *BASE,
    *("store", "policy", "mirror", "notices", "supervisor", "simulation", "story", "cli"),
    *("doctor", "persist.worker", "restore.stream", "crashtest.work"),
)
#: What pure decisions may not import: no torch, clock or I/O.
IMPURE = {"torch", "numpy", "os", "io", "pathlib", "shutil", "socket", "subprocess", "time"}


def modules(*packages: str) -> dict[str, ast.Module]:
    """Every module of the packages by dotted name."""
    found = {}
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = ast.parse(path.read_text(), filename=str(path))
    return found


#: Whole programs on top of both packages, which no layer may import.
EXAMPLES = modules("checkfreq/examples")
MODULES = {
    name: tree for name, tree in modules("checkfreq", "iterators").items() if name not in EXAMPLES
}
#: benchmarks/, from the bottom up: what benchmarks share. Every other folder is a benchmark.
SHARED = ("make_images", "lab", "peers")
#: What brings the benchmarks together may import all of them.
ABOVE = ("tables", "plots", "summary", "suite", "demo", "__main__")
BENCHMARKS = modules("benchmarks")
ALL = MODULES | EXAMPLES | BENCHMARKS


def is_package(name: str) -> bool:
    return (ROOT / Path(*name.split("."))).is_dir()


@functools.cache
def imported(name: str) -> frozenset[str]:
    """Dotted names that module ``name`` imports; for our own packages the module itself."""
    return frozenset(
        ours(target) or target
        for node in runtime_nodes(ALL[name])
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
        if target in ALL:
            return target
        target = target.rpartition(".")[0]
    return None


def folder_of(name: str) -> str:
    """The folder, or the module beside the folders, that a module of ours belongs to."""
    return name.split(".")[1]


def level_of(name: str) -> int:
    """How far up a module is within its package: 0 for the base."""
    package, folder = name.split(".")[:2]
    if package == "checkfreq" and folder in BASE:
        return 0
    assert folder in FOLDERS[package], f"{name} has no place: give it one here and in the docs"
    return 1 + FOLDERS[package].index(folder)


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


def test_imports_point_down_only() -> None:
    for name in MODULES:
        for target in sorted(imported(name) & set(MODULES)) if "." in name else ():
            if target.split(".")[0] != name.split(".")[0]:
                assert name.startswith("checkfreq"), f"{name} imports {target}: stand alone"
                assert folder_of(name) in EDGE, f"{name} imports {target}: only edge code may"
            elif "." in target:
                assert level_of(target) <= level_of(name), f"{name} imports {target}, above it"


def test_every_folder_has_a_place_and_every_place_a_folder() -> None:
    for package, folders in FOLDERS.items():
        listed = {*folders, *(BASE if package == "checkfreq" else ())}
        assert {folder_of(name) for name in MODULES if name.startswith(f"{package}.")} == listed


@pytest.mark.parametrize("package", FOLDERS)
def test_architecture_lists_the_folders_in_this_order(package: str) -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text().split("## Layers", 1)[1].split("\n## ", 1)[0]
    block = text.split(f"```text {package}\n", 1)[1].split("```", 1)[0]
    rows = [line.split()[0].removesuffix("/") for line in block.splitlines() if line[:1] != " "]
    base = [" ".join(BASE).split()[0]] if package == "checkfreq" else []
    assert rows == [*reversed(FOLDERS[package]), *base]


def test_decisions_are_pure() -> None:
    for name in names_in("checkfreq.policy"):
        assert not {target.split(".")[0] for target in imported(name)} & IMPURE, name


def test_no_module_imports_itself_in_a_circle() -> None:
    for name in ALL:
        for target in imported(name) & set(ALL):
            assert name not in reachable(target), f"{name} and {target} import each other"


def reachable(name: str) -> set[str]:
    """Modules of ours reached by import statements alone (parents left out)."""
    todo, done = [name], set()
    while todo:
        current = todo.pop()
        if current in ALL and current not in done:
            done.add(current)
            todo += imported(current)
    return done


def below_the_top() -> list[str]:
    return [name for name in BENCHMARKS if "." in name and folder_of(name) not in ABOVE]


def test_a_benchmark_imports_what_is_shared_and_itself() -> None:
    for name in below_the_top():
        folder = folder_of(name)
        allowed = SHARED[: SHARED.index(folder) + 1] if folder in SHARED else (*SHARED, folder)
        for target in sorted(imported(name) & set(BENCHMARKS)):
            assert folder_of(target) in allowed, f"{name} imports {target}"


def test_no_package_imports_a_benchmark_and_no_layer_an_example() -> None:
    for name in (*MODULES, *EXAMPLES):
        outside = {*BENCHMARKS, *EXAMPLES} if name in MODULES else {*BENCHMARKS}
        assert not imported(name) & outside, name


def test_torch_free_modules_reach_no_torch() -> None:
    for name in torch_free_modules():
        found = {found.split(".")[0] for found in everything_behind(name)}
        assert "torch" not in found, name


def test_fsync_is_called_in_fileops_only() -> None:
    callers = {
        name
        for name, tree in MODULES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in ("fsync", "fdatasync", "sync_file_range")
    }
    assert callers <= {"checkfreq.store.fileops"}


def test_cuda_is_named_in_one_file() -> None:
    """Everything else asks snapshot/backends.py, so that one class supports another accelerator."""
    naming = {
        str(path.relative_to(ROOT))
        for package in ("checkfreq", "iterators")
        for path in (ROOT / package).rglob("*.py")
        if "examples" not in path.parts
        and re.search(r"torch\.cuda\b|from torch import .*\bcuda\b|\bCuda[A-Z]", path.read_text())
    }
    # The second registers what the first defines.
    assert naming == {"checkfreq/snapshot/cuda.py", "checkfreq/snapshot/backends.py"}


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
