"""The page on errors quotes messages that the source has, and leaves none out.

A message is compared by its constant parts: what an f-string or a ``%`` format fills in is ``…`` in
the source's messages, and on the page ``…`` stands for anything.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import checkfreq.errors
import iterators.errors

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
#: A message stands alone in bold code at the beginning of a line.
QUOTED = re.findall(r"^\*\*`(.+?)`\*\*", PAGE, re.MULTILINE)
FILLED_IN = "…"
_FORMAT = re.compile(r"%(?:\.\d)?[a-z]")

#: Errors whose message is the first text among their arguments. Others build it: their classes
#: are on the page, and what they check.
SAID_IN_WORDS = {
    *("ConfigError", "StateError", "SnapshotError", "PersistError", "WorkerDiedError"),
    *("RankError", "StorageError", "NoCheckpointError"),
    *("NotResumableError", "CorruptPositionError", "IterationStateError"),
}
LOGGED = {"warning", "error", "exception"}
#: Training runs on paper: their errors name an argument and what was expected.
NOT_OF_A_RUN = ("checkfreq/simulation/", "checkfreq/cli/")


def text_of(node: ast.expr | None) -> str | None:
    """The message that an expression makes; None if it makes none."""
    match node:
        case ast.Constant(value=str(text)):
            return _FORMAT.sub(FILLED_IN, text)
        case ast.JoinedStr(values=parts):
            return "".join(text_of(part) or FILLED_IN for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return f"{text_of(left) or FILLED_IN}{text_of(right) or FILLED_IN}"
    return None


@cache
def trees() -> tuple[tuple[str, ast.Module], ...]:
    """Every module of both packages, by path."""
    paths = sorted(
        path for root in ("checkfreq", "iterators") for path in (ROOT / root).rglob("*.py")
    )
    return tuple((str(path.relative_to(ROOT)), ast.parse(path.read_text())) for path in paths)


@cache
def texts() -> tuple[str, ...]:
    """Every text in the source but docstrings."""
    found = {text_of(node) for _, tree in trees() for node in _texts_in(tree)}
    return tuple(text for text in found if text)


def _texts_in(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Expr):  # a docstring is a statement of its own
            children = ast.iter_child_nodes(node)
            yield from (
                c for c in children if isinstance(c, ast.Constant | ast.JoinedStr | ast.BinOp)
            )


def messages() -> Iterator[tuple[str, str]]:
    """Where, and what, of every error by class and of every line logged as a warning or worse."""
    for path, tree in trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or path.startswith(NOT_OF_A_RUN):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            is_logged = isinstance(node.func, ast.Attribute) and name in LOGGED
            if is_logged or name in SAID_IN_WORDS or (name == "log" and _is_warning(node)):
                said = next(filter(None, map(text_of, node.args)), "")
                if len(re.findall(r"[a-z]{2,}", said)) > 1:
                    yield f"{path}:{node.lineno}", said


def _is_warning(call: ast.Call) -> bool:
    """``logger.log(logging.WARNING if ... else logging.INFO, ...)``."""
    return ast.unparse(call.args[0]).startswith("logging.WARNING") if call.args else False


def is_in(fragment: str, said: str) -> bool:
    """Whether the constant parts of ``fragment`` come in ``said``, in order and apart."""
    parts = fragment.split(FILLED_IN)
    if max(parts, key=len) not in said:  # nearly always: there are thousands of texts
        return False
    return re.search(".+?".join(map(re.escape, parts)), said, re.DOTALL) is not None


def is_quoted(said: str) -> bool:
    return any(is_in(fragment, said) for fragment in QUOTED)


def test_every_message_on_the_page_is_in_the_source() -> None:
    gone = [one for one in QUOTED if not any(is_in(one, text) for text in texts())]
    assert QUOTED
    assert gone == [], "reworded or removed in the source"


def test_every_warning_and_error_of_a_run_is_on_the_page() -> None:
    missing = [f"{where}: {said}" for where, said in messages() if not is_quoted(said)]
    assert missing == [], "not in docs/troubleshooting.md:\n" + "\n".join(missing)


@pytest.mark.parametrize("module", [checkfreq.errors, iterators.errors])
def test_every_class_of_errors_is_on_the_page(module: ModuleType) -> None:
    classes = {
        name
        for name, value in inspect.getmembers(module, inspect.isclass)
        if value.__module__ == module.__name__
    }
    assert classes
    assert {name for name in classes if f"`{name}`" not in PAGE} == set()
