"""A loader's workers are started: what is said where a forked one may hang."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

from iterators import CFIterator
from iterators.torch.common import warn_of_forks
from tests.iterators.datasets import Plain
from tests.iterators.streams import Stateful

SAID = "before 3.11.10 such a worker can hang when it starts"
FORKED = {"num_workers": 1, "multiprocessing_context": "fork"}


@pytest.fixture(autouse=True)
def _process_group() -> Iterator[None]:
    """One, and nothing was said yet."""
    warn_of_forks.cache_clear()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    warn_of_forks.cache_clear()


@pytest.mark.parametrize("dataset", [Plain(4), Stateful([2])], ids=["map-style", "iterable"])
@pytest.mark.parametrize(
    ("python", "how", "grouped", "times"),
    [
        ((3, 11, 9), FORKED, True, 1),
        ((3, 11, 9), FORKED, False, 0),
        ((3, 11, 10), FORKED, True, 0),
        ((3, 10, 15), FORKED, True, 0),
        ((3, 11, 9), {"num_workers": 0}, True, 0),
    ],
)
def test_forked_workers_that_may_hang_are_warned_about_once(
    dataset: Any,
    python: tuple[int, int, int],
    how: dict[str, Any],
    grouped: bool,
    times: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not grouped:
        dist.destroy_process_group()
    monkeypatch.setattr(sys, "version_info", (*python, "final", 0))
    iterator = CFIterator(DataLoader(dataset, 2, **how))
    for _ in iterator.epochs(2):
        list(iterator)
    assert caplog.text.count(SAID) == times
