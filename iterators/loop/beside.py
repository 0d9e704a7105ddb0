"""Ends the passes that advance together with one that ends, in a ``zip`` that a variable keeps.

``bar = tqdm(zip(train_loader, second))`` keeps both passes open after the loop was left. The next
epoch begins a new pass of each, so that of ``second`` is over too, and a position saved at the end
of the epoch must say so. Nothing but the ``zip`` knows that the two belong together. It is found
among all objects that the garbage collector knows, and looked for only where a variable keeps the
pass. Training thread only.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Generator, Iterator
from inspect import GEN_SUSPENDED, getgeneratorstate
from types import CodeType, FrameType, GeneratorType
from typing import Any

#: What draws from other iterators. A ``zip`` holds them in a tuple, a generator in its frame.
_DRAWING = (zip, map, enumerate, GeneratorType)
_MOST_NESTED = 4


def end_passes_beside(running: Generator[Any, None, None], code: CodeType) -> None:
    """End each generator of ``code`` to which only what also draws from ``running`` refers."""
    for holder in list(_drawing_from(running)):
        for inner, owner in _drawn_from_by(holder, code):
            # Three more references: of the pair, of `inner`, and of the call.
            is_kept = sys.getrefcount(inner) - 3 > _count(inner, owner)
            if inner is not running and _is_suspended(inner) and not is_kept:
                inner.close()


def _drawing_from(one: Any) -> Iterator[Any]:
    """What draws from a generator, directly or through others. None of it is running."""
    found = [one]
    for _ in range(_MOST_NESTED):
        found = [
            holder
            for holder in gc.get_referrers(*found)
            if type(holder) is tuple or (isinstance(holder, _DRAWING) and _is_suspended(holder))
        ]
        yield from (holder for holder in found if type(holder) is not tuple)
        if not found or any(type(holder) is zip for holder in found):
            return


def _drawn_from_by(holder: Any, code: CodeType) -> list[tuple[Any, Any]]:
    """The generators of ``code`` below ``holder``, each with what refers to it."""
    found: dict[int, tuple[Any, Any]] = {}
    owners = [holder]
    for _ in range(_MOST_NESTED):
        inner = [(one, owner) for owner in owners for one in gc.get_referents(owner)]
        owners = [one for one, _ in inner if isinstance(one, (tuple, FrameType, *_DRAWING))]
        generators = [(one, by) for one, by in inner if isinstance(one, GeneratorType)]
        found |= {id(one): (one, by) for one, by in generators if one.gi_code is code}
    return list(found.values())


def _is_suspended(one: Any) -> bool:
    return not isinstance(one, GeneratorType) or getgeneratorstate(one) == GEN_SUSPENDED


def _count(one: Any, owner: Any) -> int:
    return sum(other is one for other in gc.get_referents(owner))
