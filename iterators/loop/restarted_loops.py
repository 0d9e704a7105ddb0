"""Finds the ``for epoch in range(n)`` that begins again in a restored run, by reading its source.

Around a ``CFIterator`` such a loop trains ``n`` more epochs after each restart. It shows at the
first pass of a restored run: all loops around it are over ranges from a constant, and in their
first iteration, while the run is in a later epoch. Training thread only.
"""

from __future__ import annotations

import ast
import linecache
import logging
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import TypeAlias

logger = logging.getLogger(__name__)

#: The code that runs and its line, from the innermost frame on.
CallStack: TypeAlias = list[tuple[CodeType, int]]


@dataclass(frozen=True, slots=True)
class RestartedLoop:
    """A loop ``for target in range(..., stop)``, as it is written at ``where``, from ``first``."""

    where: str
    written: str
    target: str
    first: int
    stop: str


class EpochsWatch:
    """Warns once of such a loop around the iterator ``name``, which is made as this is."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._made_at = [(frame.f_code, frame.f_lineno) for frame in _frames()]
        self._resumed_in = 0

    def resumed(self, epoch: int) -> None:
        """A position in ``epoch`` was restored."""
        self._resumed_in = epoch

    def asked(self) -> None:
        """The script knows which epoch it is in."""
        self._resumed_in = 0

    def pass_starts(self, epoch: int) -> None:
        """A loop over the batches of ``epoch`` begins, which our own loops are not around."""
        if not self._resumed_in:
            return
        if epoch != self._resumed_in:
            self._resumed_in = 0
            return
        loop = restarted_loop(self._made_at)
        if loop is None:
            return
        self._resumed_in = 0
        logger.warning(
            "iterator %r: the run goes on in epoch %d, but `for %s in %s` (%s) begins at %d again, "
            "and trains all of its epochs once more. Write `for %s in %s:`",
            self._name,
            epoch,
            loop.target,
            loop.written,
            loop.where,
            loop.first,
            loop.target,
            f"train_loader.epochs({loop.stop})"
            if not loop.first
            else f"range(train_loader.epoch + {loop.first}, {loop.stop})",
        )


def restarted_loop(made_at: CallStack) -> RestartedLoop | None:
    """The outermost loop around the script's line, if all of them have just begun.

    ``made_at`` is where the iterator was made: loops around that are not over its epochs. None
    where the source cannot be read.
    """
    found = None
    for frame in _frames():
        lines_before = [line for code, line in made_at if code is frame.f_code]
        for loop in _loops_around(frame):
            if any(_contains(loop, line) for line in lines_before):
                continue
            begun = _begun(loop, frame)
            if begun is None and isinstance(loop, ast.For) and loop.lineno == frame.f_lineno:
                continue  # written on one line: the loop over the batches, which has not begun
            found = begun
            if found is None:
                return None
        if lines_before:
            break  # what is above was there when the iterator was made
    return found


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith("iterators."):
            yield frame
        frame = frame.f_back


def _loops_around(frame: FrameType) -> Iterator[ast.For | ast.AsyncFor | ast.While]:
    """The loops whose bodies contain the line that the frame is at, the innermost first."""
    lines = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError):
        return
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.For | ast.AsyncFor | ast.While)
        and _contains(node, frame.f_lineno)
        and node.lineno >= frame.f_code.co_firstlineno
    ]
    yield from sorted(around, key=lambda node: -node.lineno)


def _contains(loop: ast.For | ast.AsyncFor | ast.While, line: int) -> bool:
    return loop.body[0].lineno <= line <= (loop.body[-1].end_lineno or 0)


def _begun(loop: ast.AST, frame: FrameType) -> RestartedLoop | None:
    """``loop`` if it is over a range from a constant and in its first iteration.

    Not if the range may be of what is left, or the loop ends by a count of the run's.
    """
    if not isinstance(loop, ast.For) or not isinstance(loop.target, ast.Name):
        return None
    if any(_ends_by_steps(node) for node in ast.walk(loop)):
        return None
    for call in ast.walk(loop.iter):
        if (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Name)
            and call.func.id in ("range", "trange")
            and 1 <= len(call.args) <= 2
        ):
            first = call.args[0] if len(call.args) == 2 else ast.Constant(0)
            if not isinstance(first, ast.Constant) or not isinstance(first.value, int):
                return None
            now = frame.f_locals.get(loop.target.id)
            if not isinstance(now, int) or now != first.value or _is_difference(call.args[-1]):
                return None
            return RestartedLoop(
                f"{frame.f_code.co_filename}:{loop.lineno}",
                ast.unparse(loop.iter),
                loop.target.id,
                first.value,
                ast.unparse(call.args[-1]),
            )
    return None


def _is_difference(stop: ast.expr) -> bool:
    """``TOTAL - done``; but not ``TOTAL - 1``."""
    if not isinstance(stop, ast.BinOp) or not isinstance(stop.op, ast.Sub):
        return False
    return not isinstance(stop.right, ast.Constant)


def _ends_by_steps(node: ast.AST) -> bool:
    """``if cf_manager.global_step >= n: break``, or ``train_loader.step``, or a return."""
    if not isinstance(node, ast.If) or not isinstance(node.test, ast.Compare):
        return False
    ordered = isinstance(node.test.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE)
    sides = (node.test.left, *node.test.comparators)
    counts = any(isinstance(s, ast.Attribute) and s.attr in ("global_step", "step") for s in sides)
    leaves = any(isinstance(one, ast.Break | ast.Return | ast.Raise) for one in node.body)
    return ordered and counts and leaves
