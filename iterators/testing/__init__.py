"""Conformance tests for resumable iterators, to run over your own datasets and adapters.

``check_resumable`` walks through an iterator, restores a fresh one from *every* state on the way,
and compares what it serves with the rest of the walk: the samples and their bits.
``check_elastic`` ends all ranks at random points and continues with a different world size and
batch size; ``check_lives`` does the same by a script. ``FakeManager`` takes the place of a
checkpoint manager and records the calls.

::

    from torch.utils.data import DataLoader

    from iterators import CFIterator
    from iterators.testing import check_resumable

    def test_my_dataset_resumes_exactly():
        check_resumable(lambda: CFIterator(DataLoader(MyDataset(), 4, num_workers=2), seed=1))
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
