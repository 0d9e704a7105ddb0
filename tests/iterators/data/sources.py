"""Small data in the formats of other libraries, and the loaders that users would make of it.

Every sample has its number, and noise from the three global generators. A library is imported where
it is used.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from iterators import ShardedDataset, ShuffledStream
from tests.required import require

NUM_SHARDS, PER_SHARD = 4, 10
NUM_SAMPLES = NUM_SHARDS * PER_SHARD
BATCH_SIZE = 3


def noised(sample: dict[str, Any]) -> dict[str, Any]:
    """The sample with random numbers of all three generators."""
    drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    return {"id": int(sample["id"]), "x": [float(sample["id"]) / NUM_SAMPLES, *drawn]}


def noised_batch(samples: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The same for Hugging Face's batches of columns."""
    made = [noised({"id": one}) for one in samples["id"]]
    return {"id": [one["id"] for one in made], "x": [one["x"] for one in made]}


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Ids and inputs of one batch."""
    return {
        "id": torch.tensor([int(one["id"]) for one in samples]),
        "x": torch.tensor([one["x"] for one in samples], dtype=torch.float32),
    }


# Hugging Face's datasets


def in_memory() -> Any:
    """A map-style dataset."""
    from datasets import Dataset

    return Dataset.from_dict({"id": list(range(NUM_SAMPLES))})


def streamed() -> Any:
    """A streaming dataset of Arrow tables."""
    return in_memory().to_iterable_dataset(num_shards=NUM_SHARDS)


def _generated(shards: list[int]) -> Iterator[dict[str, int]]:
    for shard in shards:
        yield from ({"id": PER_SHARD * shard + index} for index in range(PER_SHARD))


def generated() -> Any:
    """A streaming dataset of Python objects."""
    from datasets import IterableDataset

    return IterableDataset.from_generator(
        _generated, gen_kwargs={"shards": list(range(NUM_SHARDS))}
    )


# webdataset


def write_tars(folder: Path) -> list[str]:
    """The shards of a WebDataset."""
    import webdataset

    folder.mkdir(exist_ok=True)
    paths = [folder / f"{shard}.tar" for shard in range(NUM_SHARDS)]
    for shard, path in enumerate(paths):
        if path.exists():
            continue
        with webdataset.TarWriter(str(path)) as writer:
            for index in range(PER_SHARD):
                number = shard * PER_SHARD + index
                writer.write({"__key__": f"{number:06d}", "cls": number})
    return [str(path) for path in paths]


def read_tar(shard: str, start: int) -> Iterator[dict[str, Any]]:
    """The samples of one shard from number ``start`` on, not decoded."""
    import webdataset as wds

    tar = wds.SimpleShardList([shard])
    return iter(wds.DataPipeline(tar, wds.tarfile_to_samples(), wds.slice(start, None)))


def decode_tar(sample: dict[str, Any]) -> dict[str, Any]:
    """A sample of a shard."""
    return noised({"id": int(sample["cls"])})


def tar_shards(folder: Path) -> ShardedDataset:
    """Shards in any order, entered anywhere."""
    lengths = [PER_SHARD] * NUM_SHARDS
    return ShardedDataset(write_tars(folder), read_tar, lengths=lengths, decode=decode_tar, lanes=2)


def pipeline(folder: Path, *stages: Any, **settings: Any) -> Any:
    """A WebDataset as people write it."""
    import webdataset as wds

    settings = {"shardshuffle": False, "nodesplitter": wds.split_by_node, **settings}
    made = wds.WebDataset(write_tars(folder), **settings)
    return made.compose(*stages, wds.decode(), wds.map(decode_tar))


# torchdata


class Numbers(torch.utils.data.Dataset[dict[str, int]]):
    """A map-style dataset of its indices."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"id": index}


def node(rank: int, world: int, *, workers: int = 0) -> Any:
    """A graph of nodes: in the training process, or with a thread that prefetches."""
    from torch.utils.data.distributed import DistributedSampler
    from torchdata.nodes import Batcher, Mapper, Prefetcher, SamplerWrapper

    sampler = DistributedSampler(Numbers(), world, rank, shuffle=True, seed=7)
    made: Any = Mapper(SamplerWrapper(sampler), Numbers().__getitem__)
    if workers:  # a thread draws from generators that nobody seeds
        return Prefetcher(Mapper(Batcher(made, BATCH_SIZE, drop_last=False), plain), 2)
    return Mapper(Batcher(Mapper(made, noised), BATCH_SIZE, drop_last=False), collate)


def plain(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch without random numbers."""
    return collate([{"id": one["id"], "x": [one["id"] / NUM_SAMPLES] * 4} for one in samples])


# MosaicML's streaming


def write_mds(folder: Path) -> Path:
    """A folder of MDS shards."""
    from streaming import MDSWriter

    if not folder.exists():
        size = 8 * PER_SHARD + 4 * PER_SHARD + 90  # some bytes over what a shard may have
        with MDSWriter(out=str(folder), columns={"id": "int"}, size_limit=size) as writer:
            for number in range(NUM_SAMPLES):
                writer.write({"id": number})
    return folder


class LocalMds(torch.utils.data.Dataset[dict[str, Any]]):
    """MosaicML's LocalDataset with augmentation."""

    def __init__(self, folder: Path) -> None:
        from streaming import LocalDataset

        self._samples = LocalDataset(str(write_mds(folder)))

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return noised(self._samples[index])


# The loaders


def batched(dataset: Any, **settings: Any) -> DataLoader[Any]:
    """A loader of batches."""
    return DataLoader(dataset, BATCH_SIZE, collate_fn=collate, **settings)


def _tar_pipeline(folder: Path, **settings: Any) -> Any:
    import webdataset as wds

    return batched(pipeline(folder / "tar", wds.detshuffle(10, 5, seed=3)), **settings)


def _nodes(folder: Path, *, num_workers: int = 0) -> Any:
    from torchdata.nodes import Loader

    return Loader(node(0, 1, workers=num_workers))


def _mds(folder: Path, **settings: Any) -> Any:
    import tests.integrations.vision  # noqa: F401  # it imports torchvision

    return batched(LocalMds(folder / "mds"), shuffle=True, **settings)


#: What users write, by a name that begins with the package's: (folder, num_workers=) -> loader.
LOADERS: dict[str, Callable[..., Any]] = {
    "datasets map-style": lambda folder, **settings: batched(
        in_memory().with_transform(noised_batch), shuffle=True, **settings
    ),
    "datasets streaming": lambda folder, **settings: batched(streamed().map(noised), **settings),
    "datasets streaming, shuffled": lambda folder, **settings: batched(
        ShuffledStream(generated().map(noised), buffer_size=7), **settings
    ),
    "webdataset shards": lambda folder, **settings: batched(
        tar_shards(folder / "tar"), shuffle=True, **settings
    ),
    "webdataset pipeline": _tar_pipeline,
    "torchdata nodes": _nodes,
    "streaming of mosaicml": _mds,
}


def require_installed(kind: str) -> None:
    """Skip the test where the library is not installed. Does not import it."""
    package = kind.split()[0]
    if importlib.util.find_spec(package) is None:
        require("data", f"{package} is not installed")


def make(kind: str, folder: Path, *, workers: int = 0) -> Any:
    """The loader of a kind, with its data in ``folder``."""
    return LOADERS[kind](folder, num_workers=workers)
