"""Files are opened, looked at, moved and removed by `checkfreq/store/fileops.py` alone.

A checkpoint directory is untrusted input, and that module is where it is treated as such. A
call of the operating system on a path, anywhere else, needs a reason here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.test_layering import MODULES

#: Modules that may, because what they name is no part of a checkpoint directory.
ALLOWED = {
    "checkfreq.store.fileops": "the one place",
    "checkfreq.store.mounts": "/proc, and the directory itself, to tell its file system",
    "checkfreq.run.checks": "the directory itself, which is the user's: whether it is writable",
    "checkfreq.pacing.environment": "/proc",
    "checkfreq.snapshot.memory": "/proc and /sys",
    "checkfreq.snapshot.node_turns": "a lock in the user's runtime folder",
    "checkfreq.snapshot.pin_failures": "/proc and /sys",
    **dict.fromkeys(
        ("checkfreq.persist.launch", "checkfreq.persist.lock", "checkfreq.persist.peers"), "/proc"
    ),
    "checkfreq.persist.pressure": "/proc and /sys",
    "checkfreq.faults": "paths that a test gives in the environment",
    "checkfreq.ranks.neighbours": "/proc",
    "checkfreq.ranks.store_thread": "/proc",
    "checkfreq.cli.group": "/dev/null",
    "checkfreq.doctor.machine": "/dev/shm, /proc and /sys",
    "checkfreq.doctor.storage": "the directory itself and those above: who may write to them",
    "checkfreq.supervisor.becoming": "the script, and the folder that it imports from",
    "checkfreq.supervisor.board": "/proc, where the supervisor's own memory is",
    "checkfreq.supervisor.processes": "/proc",
    "checkfreq.formats.numpy_reader": "stands alone: it may be copied out of the package",
    "checkfreq": "its own sources, and a user's iterators.py",
    "checkfreq.state.sharers": "/proc",
    "checkfreq.state.origin": "files that container runtimes leave at the root",
    "checkfreq.helpers.outputs": "what the user named, and the folders above it",
    "checkfreq.testing.contract": "links that a test plants",
}
#: A module's files are the business of these packages, which read no checkpoints.
OUTSIDE = (
    *("checkfreq.simulation", "checkfreq.cli.simulate", "checkfreq.crashtest"),
    *("checkfreq.story.report.writing", "checkfreq.story.watch.prometheus"),
)

_OS = {
    *("open", "stat", "lstat", "listdir", "scandir", "walk", "fwalk", "access", "statvfs"),
    *("mkdir", "makedirs", "rename", "renames", "replace", "unlink", "remove", "rmdir"),
    *("removedirs", "symlink", "link", "readlink", "truncate", "chmod", "chown", "utime"),
    *("mkfifo", "mknod"),
}
_PATH = {
    *("exists", "lexists", "isdir", "isfile", "islink", "getsize", "getmtime", "samefile"),
    *("realpath", "ismount"),
}
_METHODS = {
    *("read_text", "read_bytes", "write_text", "write_bytes", "open", "exists", "is_dir"),
    *("is_file", "is_symlink", "stat", "lstat", "iterdir", "glob", "rglob", "resolve"),
    *("unlink", "mkdir", "rmdir", "touch", "rename", "replace", "symlink_to", "hardlink_to"),
    *("samefile", "readlink", "chmod"),
}
_NAMED = {"io.open", *(f"os.{name}" for name in _OS), *(f"os.path.{name}" for name in _PATH)}
#: Objects whose methods of these names are not a path's.
_OTHERS = {"ops", "_ops", "store", "_store", "dataclasses", "self", "super()", "_persistence"}


def path_calls(tree: ast.Module) -> Iterator[str]:
    """What in a module touches a path by itself, as source text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in _NAMED:
            yield ast.unparse(node)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "open":
            yield "open"
        if isinstance(node, ast.ImportFrom) and node.module in ("os", "os.path", "shutil"):
            yield ast.unparse(node)
        if isinstance(node, ast.Import) and {a.name for a in node.names} & {"shutil", "tempfile"}:
            yield ast.unparse(node)
        if isinstance(node, ast.Call) and (text := _method(node.func)) is not None:
            yield text


def _method(function: ast.expr) -> str | None:
    """The text of ``path.read_bytes`` and the like."""
    if not isinstance(function, ast.Attribute) or function.attr not in _METHODS:
        return None
    owner = ast.unparse(function.value)
    is_other = owner.rpartition(".")[2] in _OTHERS or function.attr in ("replace", "open")
    return None if is_other else ast.unparse(function)


def test_only_the_file_operations_touch_paths_and_what_else_may_does() -> None:
    touching = {name for name, tree in MODULES.items() if set(path_calls(tree))}
    ours = {name for name in touching if name.startswith("checkfreq")}
    assert {name for name in ours if not name.startswith(OUTSIDE)} == {*ALLOWED}
