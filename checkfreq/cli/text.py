"""How the command line writes times, marks and tables."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from checkfreq.errors import printable
from checkfreq.store.digests import DIGEST_DIGITS, num_pieces
from checkfreq.store.manifest import TensorEntry
from checkfreq.store.marks import StepMark
from checkfreq.types import Json


def mark(given: StepMark | None) -> str:
    """``keep finished accuracy=0.91``, or nothing."""
    if given is None:
        return ""
    metrics = [f"{name}={value}" for name, value in sorted(given.metrics.items())]
    words = ["keep"] * given.keep + ["finished"] * given.finished
    return " ".join(words + metrics)


def shape(sizes: Sequence[int]) -> str:
    """``[64, 3, 7, 7]``."""
    return f"[{', '.join(map(str, sizes))}]"


def digest(tensor: TensorEntry) -> str:
    """The digest, or the first one of several: ``0123456789abcdef, first of 16``."""
    if not tensor.piece_bytes:
        return tensor.digest
    return f"{tensor.digest[:DIGEST_DIGITS]}, first of {num_pieces(tensor)}"


def names(found: Iterable[str]) -> str:
    """``model, optimizer``, or ``none``."""
    return printable(", ".join(found)) or "none"


def json_of(value: Json, *, indent: int | None = 2) -> str:
    """JSON without control characters; the only one that ``json`` does not escape is delete."""
    return json.dumps(value, indent=indent).replace("\x7f", "\\u007f")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; no blanks after the last one."""
    lines = [[printable(cell) for cell in line] for line in (head, *rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    padded = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )
    return "\n".join(line.rstrip() for line in padded)
