"""A loader's workers are started: what is said where a forked one may hang."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader

from iterators import CFIterator
from iterators.torch.common import forks_workers, warn_of_forks
from tests.iterators.datasets import Plain
from tests.iterators.streams import Stateful

HANGS, MENDED = (3, 11, 9, "final", 0), (3, 11, 10, "final", 0)
SAID = "before 3.11.10 such a worker can hang when it starts"


@pytest.fixture(autouse=True)
def _nothing_said_yet() -> Iterator[None]:
    warn_of_forks.cache_clear()
    yield
    warn_of_forks.cache_clear()


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


ADAPTERS: dict[str, Callable[..., CFIterator]] = {
    "map-style": lambda **how: CFIterator(DataLoader(Plain(4), 2, **how)),
    "iterable": lambda **how: CFIterator(DataLoader(Stateful([2]), 2, **how)),
}


@pytest.fixture(params=ADAPTERS)
def said(
    request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[..., int]:
    """How often it is said while a loader serves two epochs."""

    def said(python: tuple[Any, ...], **how: Any) -> int:
        monkeypatch.setattr(sys, "version_info", python)
        iterator = ADAPTERS[request.param](**how)
        for _ in iterator.epochs(2):
            list(iterator)
        return caplog.text.count(SAID)

    return said


FORKED = {"num_workers": 1, "multiprocessing_context": "fork"}


@pytest.mark.parametrize(
    ("python", "how", "grouped", "times"),
    [
        (HANGS, FORKED, True, 1),
        (HANGS, FORKED, False, 0),
        (MENDED, FORKED, True, 0),
        ((3, 10, 15, "final", 0), FORKED, True, 0),
        (HANGS, {"num_workers": 0}, True, 0),
    ],
)
def test_forked_workers_that_may_hang_are_warned_about_once(
    python: tuple[Any, ...],
    how: dict[str, Any],
    grouped: bool,
    times: int,
    said: Callable[..., int],
    request: pytest.FixtureRequest,
) -> None:
    if grouped:
        request.getfixturevalue("process_group")
    assert said(python, **how) == times
    spawned = DataLoader(Plain(4), num_workers=1, multiprocessing_context="spawn")
    assert not forks_workers(spawned)
