"""Boxes to draw, and the elements that they have."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import strategies as st

from checkfreq.store.boxes import Box


def boxes_of(shape: Sequence[int]) -> st.SearchStrategy[Box]:
    """Boxes within a shape, also empty ones."""

    def dim(length: int) -> st.SearchStrategy[tuple[int, int]]:
        return st.integers(0, length).flatmap(
            lambda offset: st.tuples(st.just(offset), st.integers(0, length - offset))
        )

    return st.tuples(*map(dim, shape)).map(
        lambda pairs: Box(tuple(p[0] for p in pairs), tuple(p[1] for p in pairs))
    )


def elements(box: Box) -> list[tuple[int, ...]]:
    """The places of its elements, in row-major order."""
    ranges = (range(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
    return list(itertools.product(*ranges))
