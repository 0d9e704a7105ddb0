"""The seed of a loader that was given none."""

from __future__ import annotations

import logging
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from iterators import (
    CFIterator,
    ResumableDataLoader,
    ResumableIterableLoader,
    ResumableSampler,
    ResumeMismatchError,
)
from tests.iterators.datasets import Augmented, Plain
from tests.iterators.streams import Opaque
from tests.state.ranks import run_ranks

_SHORT = timedelta(seconds=0.5)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def seed_of(iterator: CFIterator) -> int:
    seed: int = iterator.state_dict()["seed"]
    return seed


def served(iterator: CFIterator) -> list[Any]:
    """Order and augmentation of an epoch."""
    return [(batch["id"].tolist(), batch["torch"].tolist()) for batch in iterator]


def loader(**settings: Any) -> DataLoader[Any]:
    return DataLoader(Augmented(40), 8, **{"shuffle": True, **settings})


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(5)


@pytest.mark.parametrize(
    ("make", "seed"),
    [
        (lambda: loader(), 5),
        (lambda: ResumableDataLoader(Plain(4), 2), 5),
        (lambda: ResumableIterableLoader(Opaque([4]), 2), 5),
        (lambda: loader(generator=generator(8)), 8),
        (lambda: sampled(RandomSampler(Augmented(40), generator=generator(9))), 9),
        (lambda: sampled(DistributedSampler(Augmented(40), 1, 0, seed=4)), 4),
        (lambda: sampled(DistributedSampler(Augmented(40), 1, 0)), 5),
        (lambda: sampled(ResumableSampler(Augmented(40))), 0),
    ],
)
def test_the_generator_or_seed_of_the_loader_or_its_sampler_goes_before_torchs(
    make: Any, seed: int
) -> None:
    before = torch.get_rng_state()
    assert seed_of(CFIterator(make())) == seed
    assert torch.equal(torch.get_rng_state(), before)
    assert seed_of(CFIterator(loader(generator=generator(8)), seed=3)) == 3


def sampled(sampler: Any) -> DataLoader[Any]:
    return loader(shuffle=False, sampler=sampler)


def test_a_loader_takes_the_iterators_seed_only_if_it_has_none() -> None:
    made = CFIterator(ResumableDataLoader(Plain(40), 2, shuffle=True), seed=7)
    expected = CFIterator(ResumableDataLoader(Plain(40), 2, shuffle=True, seed=7))
    assert [batch.tolist() for batch in made] == [batch.tolist() for batch in expected]
    with pytest.raises(ValueError, match="seed must lie in"):
        CFIterator(ResumableDataLoader(Plain(40), 2), seed=-1)


@pytest.mark.parametrize(("seed", "level"), [(6, "WARNING"), (2**40, "INFO"), (5, None)])
def test_a_restored_run_keeps_its_seed_and_logs_that_the_scripts_differs(
    seed: int, level: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    expected = served(CFIterator(loader()))
    position = CFIterator(loader())
    for _ in position.steps(2):
        pass
    torch.manual_seed(seed)  # 2**40: as in a script that sets none
    caplog.set_level(logging.INFO)
    resumed = CFIterator(loader())
    resumed.load_state_dict(position.state_dict())
    said = f"its own seed, 5, not with this script's, {seed}"
    found = [(one.levelname, said in one.message) for one in caplog.records]
    assert found == ([(level, True)] if level else [])
    assert served(resumed) == expected[2:]
    assert seed_of(resumed) == 5
    resumed.finish()
    assert resumed.last_report is not None
    assert resumed.last_report.exact


def test_a_seed_that_was_given_must_be_that_of_the_restored_run() -> None:
    saved = CFIterator(loader(), seed=3).state_dict()
    for given in (
        CFIterator(loader(), seed=4),
        CFIterator(ResumableDataLoader(Augmented(40), 8, shuffle=True, seed=4)),
    ):
        with pytest.raises(ResumeMismatchError, match="seed"):
            given.load_state_dict(saved)
        assert seed_of(given) == 4


def _seeds_of_a_rank(role: Any) -> tuple[list[int], str]:
    torch.manual_seed(100 + role.rank)  # as scripts do for dropout
    both = [CFIterator(ResumableDataLoader(Plain(9), 2)) for _ in range(2)]
    torch.manual_seed(200 + role.rank)
    both.append(CFIterator(ResumableDataLoader(Plain(9), 2)))
    alone = ResumableDataLoader(Plain(9), 2, rank=0, world=1)  # shared with nobody
    seeds = [*map(seed_of, both), alone.identity.seed]
    if role.rank == 0:
        return seeds, ""
    torch.distributed.distributed_c10d._get_default_store().set_timeout(_SHORT)
    with pytest.raises(RuntimeError) as failure:
        ResumableDataLoader(Plain(9), 2)
    return seeds, str(failure.value)


@pytest.mark.dist
def test_ranks_take_the_first_ones_seed_and_wait_for_it_no_longer_than_the_group(
    tmp_path: Path,
) -> None:
    (first, _), (second, said) = run_ranks(tmp_path, 2, _seeds_of_a_rank)
    assert first == [100, 100, 200, 200]
    assert second == [100, 100, 200, 201]
    assert "rank 1 waited 0.5 s" in said
    assert "or pass seed=" in said
