"""Conformance tests for resumable iterators, for users to run over their own datasets.

``check_resumable`` walks an iterator, records its state before each batch, restores a fresh one
from *every* recorded state, and compares the rest exactly: which samples, and their bits.
``check_elastic`` drops all ranks at random points and goes on at another world and batch size;
``check_lives`` does so by a script. ``FakeManager`` stands in for a checkpoint manager and writes
down what it was told.
"""

from __future__ import annotations

from iterators.testing.contract import (
    FakeManager,
    MakeIterator,
    Served,
    check_elastic,
    check_lives,
    check_resumable,
    walk,
)
from iterators.testing.digest import digest
from iterators.testing.lives import End, Life, MakeRank, SamplesOf

__all__ = [
    "End",
    "FakeManager",
    "Life",
    "MakeIterator",
    "MakeRank",
    "SamplesOf",
    "Served",
    "check_elastic",
    "check_lives",
    "check_resumable",
    "digest",
    "walk",
]
