"""Loaders of other libraries resume from every place; what cannot is refused by name."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from iterators import CFIterator, NotResumableError, ResumableSampler, ShuffledStream
from iterators.errors import CorruptPositionError, ResumeMismatchError
from iterators.testing import check_resumable, digest
from tests.fork_server import FORK_SERVER
from tests.iterators.data import sources
from tests.iterators.data.sources import LOADERS, NUM_SAMPLES, make, require_installed

pytestmark = [
    pytest.mark.more,
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata 0.11, torch 2.13
    pytest.mark.filterwarnings(
        "ignore:unclosed file:ResourceWarning"
    ),  # webdataset leaves tars open
]


@pytest.mark.parametrize("kind", [one for one in LOADERS if "mosaicml" not in one])
def test_a_loader_resumes_from_every_place(kind: str, tmp_path: Path) -> None:
    require_installed(kind)
    assert check_resumable(lambda: CFIterator(make(kind, tmp_path), seed=5)) > NUM_SAMPLES / 2


def rest_after(reports: Connection, kind: str, folder: Path, batches: int) -> None:
    """Send the state after some batches, and digests of the rest of the epoch."""
    iterator = CFIterator(make(kind, folder, workers=2), seed=5)
    for _ in iterator.steps(batches):
        pass
    reports.send(json.dumps(iterator.state_dict()))
    reports.send([digest(batch) for batch in iterator])


@pytest.mark.crash
@pytest.mark.parametrize("kind", [one for one in LOADERS if "mosaicml" not in one])
def test_a_process_goes_on_where_another_with_workers_was(kind: str, tmp_path: Path) -> None:
    require_installed(kind)
    reports, theirs = FORK_SERVER.Pipe(duplex=False)
    process = FORK_SERVER.Process(target=rest_after, args=(theirs, kind, tmp_path, 4))
    process.start()
    theirs.close()
    state, rest = json.loads(reports.recv()), reports.recv()
    process.join()
    iterator = CFIterator(make(kind, tmp_path, workers=2), seed=5)
    iterator.load_state_dict(state)
    assert len(rest) > 2
    assert [digest(batch) for batch in iterator] == rest


# Hugging Face's datasets


def _doubled(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {"id": [one for one in batch["id"] for _ in range(2)]}


def _interleaved(seed: int | None = 3) -> Any:
    from datasets import interleave_datasets

    halves = [sources.streamed(), sources.generated()]
    return interleave_datasets(halves, probabilities=[0.3, 0.7], seed=seed)


def _part_of_one_rank_of_three() -> Any:
    from datasets.distributed import split_dataset_by_node

    return split_dataset_by_node(sources.streamed(), 1, 3).skip(3).take(5)


STREAMS: dict[str, Callable[[], Any]] = {
    "mapped in batches": lambda: sources.streamed().map(_doubled, batched=True, batch_size=4),
    "filtered": lambda: sources.streamed().filter(lambda one: one["id"] % 3 > 0),
    "interleaved at random": _interleaved,
    "part of one rank of three": _part_of_one_rank_of_three,
    "formatted, with shuffled shards": lambda: (
        sources.streamed().with_format("torch").shuffle(seed=3, buffer_size=1)
    ),
}


@pytest.mark.parametrize("kind", STREAMS)
def test_a_streaming_dataset_resumes_from_every_place(kind: str) -> None:
    require_installed("datasets")
    assert check_resumable(
        lambda: CFIterator(DataLoader(STREAMS[kind](), 5, collate_fn=list), seed=5)
    )


@pytest.mark.parametrize("made", [sources.streamed, sources.generated])
def test_a_shuffle_buffer_is_refused(made: Callable[[], Any]) -> None:
    require_installed("datasets")
    dataset = made().shuffle(seed=1, buffer_size=6)
    for stream in (dataset, dataset.map(sources.noised), dataset.take(5)):
        with pytest.raises(NotResumableError, match=r"would be lost. Use ShuffledStream\(dataset"):
            CFIterator(DataLoader(stream))
    with pytest.raises(NotResumableError, match="would be lost"):
        ShuffledStream(dataset)


def test_a_batched_map_of_tables_is_refused() -> None:
    require_installed("datasets")
    dataset = sources.streamed().with_format("arrow").map(lambda table: table, batched=True)
    with pytest.raises(NotResumableError, match=r"with_format\('arrow'\)\) may skip a batch"):
        CFIterator(DataLoader(dataset.with_format(None)))


def test_a_stream_that_was_mixed_with_another_seed_is_refused() -> None:
    require_installed("datasets")
    made, other = (CFIterator(DataLoader(_interleaved(None), 5), seed=5) for _ in range(2))
    with pytest.raises(ResumeMismatchError, match="seed-"):  # of the system's
        made.load_state_dict(other.state_dict())


# A shuffled stream


class Counting(IterableDataset[int]):
    """Numbers with a state, which notes how many are read."""

    def __init__(self, num: int) -> None:
        self.num, self.next = num, 0

    def __iter__(self) -> Iterator[int]:
        while self.next < self.num:
            self.next += 1
            yield self.next - 1

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


@pytest.mark.parametrize(("num", "buffer_size"), [(0, 7), (1, 1), (14, 7), (20, 7), (20, 50)])
def test_a_shuffled_stream_serves_each_sample_once_from_any_place(
    num: int, buffer_size: int
) -> None:
    whole = list(ShuffledStream(Counting(num), buffer_size, seed=3))
    assert sorted(whole) == list(range(num))
    for served in range(1, num + 1):
        stream = ShuffledStream(Counting(num), buffer_size, seed=3)
        samples = iter(stream)
        assert [next(samples) for _ in range(served)] == whole[:served]
        resumed = ShuffledStream(Counting(num), buffer_size, seed=3)
        resumed.load_state_dict(stream.state_dict())
        assert list(resumed) == whole[served:]
        assert list(resumed) == whole, "the second epoch is not whole"


def test_a_shuffled_stream_has_another_order_in_each_epoch_and_block_and_draws_from_its_own() -> (
    None
):
    before = random.getstate()
    stream = ShuffledStream(Counting(100), 50)
    first = list(stream)
    stream.set_epoch(1)
    assert list(stream) != first
    assert [one - 50 for one in first[50:]] != first[:50] != list(range(50))
    assert random.getstate() == before


# webdataset


def test_a_shuffle_by_the_clock_is_refused(tmp_path: Path) -> None:
    require_installed("webdataset")
    import webdataset as wds

    for stream, reason in [
        (sources.pipeline(tmp_path, wds.shuffle(10)), r"shuffle\(10\) without a seed"),
        (wds.DataPipeline(sources.pipeline(tmp_path, wds.shuffle(10))), "without a seed"),
        (wds.RandomMix([sources.pipeline(tmp_path, wds.shuffle(10))]), "without a seed"),
        (sources.pipeline(tmp_path, resampled=True), "resampled shards"),
        (wds.DataPipeline(wds.SimpleShardList(["a"]), wds.resampled()), "resampled shards"),
        (wds.DataPipeline(wds.shardlists.DirectoryShardList(f"{tmp_path}/")), "a list of shards"),
    ]:
        with pytest.raises(NotResumableError, match=reason):
            CFIterator(DataLoader(stream))


def test_a_pipeline_that_was_built_with_another_seed_is_refused(tmp_path: Path) -> None:
    require_installed("webdataset")

    def made(seed: int) -> CFIterator:
        dataset = sources.pipeline(tmp_path, shardshuffle=10, seed=seed)
        return CFIterator(DataLoader(dataset), seed=5)

    saved = made(1).state_dict()
    made(1).load_state_dict(saved)
    with pytest.raises(ResumeMismatchError, match=r"shuffle\(2\)"):
        made(2).load_state_dict(saved)


# torchdata's nodes


def _over(sampler: Any) -> Any:
    from torchdata.nodes import SamplerWrapper

    return SamplerWrapper(sampler)


def test_samplers_that_begin_elsewhere_in_a_new_process_are_refused() -> None:
    require_installed("torchdata")
    from torchdata.stateful_dataloader.sampler import RandomSampler as Theirs
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    data = sources.Numbers()
    theirs = (RandomSampler(data), Theirs(data), StatefulDistributedSampler(data, 1, 0))
    for sampler in (*theirs, ResumableSampler(data)):
        reason = f"{type(sampler).__name__} in a SamplerWrapper"
        with pytest.raises(NotResumableError, match=reason):
            CFIterator(_over(sampler))


def test_nodes_that_are_not_exact_are_refused() -> None:
    require_installed("datasets")
    from torchdata.nodes import IterableWrapper, Loader, ParallelMapper

    numbers = _over(DistributedSampler(sources.Numbers(), 1, 0))
    overtaking = ParallelMapper(numbers, str, num_workers=1, in_order=False)
    with pytest.raises(NotResumableError, match="Use in_order=True"):
        CFIterator(Loader(overtaking))
    with pytest.raises(NotResumableError, match="begins each later epoch where it was restored"):
        CFIterator(IterableWrapper(sources.generated()))
    with pytest.raises(NotResumableError, match="would be lost"):
        CFIterator(IterableWrapper(sources.generated().shuffle(buffer_size=3)))


def test_an_iterable_in_a_node_resumes_from_every_place() -> None:
    require_installed("datasets")
    from torchdata.nodes import Batcher, IterableWrapper

    def made(iterable: Any, **settings: Any) -> CFIterator:
        return CFIterator(Batcher(IterableWrapper(iterable), 7, **settings), seed=5)

    def shuffled() -> ShuffledStream:
        return ShuffledStream(sources.generated(), buffer_size=7)

    assert check_resumable(lambda: made(shuffled(), drop_last=False)) > 3
    assert check_resumable(lambda: made(range(23), drop_last=True)) > 3


def test_nodes_resume_with_as_many_ranks_as_before() -> None:
    require_installed("torchdata")
    iterators = [CFIterator(_loader_of_rank(rank)) for rank in range(2)]
    for one in iterators:
        assert len(list(one.steps(2))) == 2
    merged = iterators[0].merged_state([one.state_dict() for one in iterators])
    assert merged is not None
    for rank in range(2):
        CFIterator(_loader_of_rank(rank)).load_state_dict(merged)
    from iterators import ResumableNodeLoader

    alone = CFIterator(ResumableNodeLoader(sources.node(0, 1), seed=5, rank=0, world=1))
    with pytest.raises(ResumeMismatchError, match="same number of ranks"):
        alone.load_state_dict(merged)
    with pytest.raises(CorruptPositionError, match="state of nodes is damaged|digest|damaged"):
        CFIterator(_loader_of_rank(0)).load_state_dict({**merged, "states": ["{", "{"]})


def _loader_of_rank(rank: int) -> Any:
    from iterators import ResumableNodeLoader

    return ResumableNodeLoader(sources.node(rank, 2), seed=5, rank=rank, world=2)


# MosaicML's streaming


def test_a_streaming_dataset_of_mosaicml_is_refused_and_read_by_number(tmp_path: Path) -> None:
    require_installed("streaming")
    kind = "streaming of mosaicml"
    assert check_resumable(lambda: CFIterator(make(kind, tmp_path), seed=5)) > 20
    from streaming import StreamingDataLoader, StreamingDataset

    stream = object.__new__(StreamingDataset)  # none of its shared memory
    for refused in (StreamingDataLoader, DataLoader):
        with pytest.raises(NotResumableError, match="keeps its place in memory"):
            CFIterator(refused(stream, batch_size=2))
