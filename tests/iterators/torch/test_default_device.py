"""A default device of the user's changes neither what is served nor what is drawn.

"meta" stands for any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from iterators import CFIterator, ResidentDataset
from iterators.torch.encoding import decode, encode
from tests.iterators.datasets import Plain

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

NUM_SAMPLES = 20
DATA = Plain(NUM_SAMPLES)


class Stream(IterableDataset[int]):
    """The ids, in order."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(NUM_SAMPLES))


def listed(samples: list[int]) -> list[int]:
    """A ``collate_fn`` that makes no tensor."""
    return samples


def loader(data: Any = DATA, kind: type[DataLoader[Any]] = DataLoader, **settings: Any) -> Any:
    return kind(data, 3, collate_fn=listed, **settings)


LOADERS: dict[str, Callable[[], DataLoader[Any]]] = {
    "shuffled": lambda: loader(shuffle=True),
    "with workers that stay": lambda: loader(num_workers=1, persistent_workers=True),
    "iterable with workers": lambda: loader(Stream(), num_workers=1),
    "stateful": lambda: loader(shuffle=True, kind=StatefulDataLoader),
    "drawn": lambda: loader(sampler=RandomSampler(DATA, replacement=True, num_samples=13)),
}


def served(users: DataLoader[Any]) -> list[list[int]]:
    """The batches of two epochs."""
    batches = CFIterator(users, seed=7)
    return [batch for _ in batches.epochs(2) for batch in batches]


@pytest.mark.parametrize("kind", LOADERS)
def test_batches_and_the_users_numbers_are_the_same(kind: str) -> None:
    expected = served(LOADERS[kind]())
    users = LOADERS[kind]()
    before = torch.get_rng_state()
    with torch.device("meta"):
        found = served(users)
        assert torch.get_default_device().type == "meta"
    assert found == expected
    assert torch.equal(torch.get_rng_state(), before)


@pytest.fixture
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def named(samples: list[object]) -> str:
    """A ``collate_fn`` that tells which device is the default where it runs."""
    return str(torch.get_default_device())


def on_the_gpu(worker: int) -> None:
    torch.set_default_device("cuda:3")


@pytest.mark.usefixtures("default_device")
@pytest.mark.parametrize(
    ("start", "init", "found"),
    [
        ("fork", None, "cpu"),
        ("fork", on_the_gpu, "cuda:3"),
        pytest.param("spawn", on_the_gpu, "cuda:3", marks=pytest.mark.more),
    ],
)
def test_workers_have_the_cpu_or_what_their_init_function_says(
    start: str, init: Callable[[int], None] | None, found: str
) -> None:
    settings = {"num_workers": 1, "multiprocessing_context": start, "worker_init_fn": init}
    users: DataLoader[Any] = DataLoader(DATA, 20, collate_fn=named, **settings)
    assert [*CFIterator(users)] == [found]
    assert torch.get_default_device().type == "meta"


def test_resident_samples_are_where_they_should_be() -> None:
    with torch.device("meta"):
        resident = ResidentDataset(DATA, device="cpu", rank=0, world=1)
        fetch = resident.__getitems__
        assert fetch is not None
        batch = resident.collate(fetch([3, 1]))
    assert batch.tolist() == [3, 1]


def test_saved_tensors_are_read_to_the_host() -> None:
    state = encode({"seen": torch.tensor([1, 2])})
    with torch.device("meta"):
        read = decode(state)
    assert read["seen"].tolist() == [1, 2]
