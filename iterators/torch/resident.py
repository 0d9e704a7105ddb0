"""A rank's share of a dataset, held in memory: loaded once, then served without any I/O.

Which samples a rank holds depends on the data's length, ``rank``, ``world`` and ``share`` alone:
a stretch of one fixed shuffle, so that a folder sorted by class is not shared out by class.
Shares cover the data together; larger ones than ``1 / world`` overlap.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any, TypeAlias, TypedDict, Unpack

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate

from iterators.order.environment import length_of, rank_and_world
from iterators.order.epoch import EpochOrder, Int64
from iterators.order.fingerprint import dataset_fingerprint

Transform: TypeAlias = Callable[[Any], Any]

_IMAGES = (".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")


class ResidentSettings(TypedDict, total=False):
    """How a ``ResidentDataset`` holds its share; meanings and defaults are given there."""

    rank: int | None
    world: int | None
    share: float | None
    load_transform: Transform | None
    transform: Transform | None
    device: torch.device | str | int | None


class ResidentDataset(Dataset[Any]):
    """This rank's share of the map-style ``dataset``, loaded now and held in memory.

    ``rank`` and ``world`` are the process group's unless given. ``share`` is the part of all
    samples that each rank holds, in [1 / world, 1]; by default shares are disjoint, and equal to
    within one sample. ``load_transform`` is applied once, when a sample is loaded (not at random,
    or a restart holds other data), ``transform`` each time it is asked for; both get the input:
    a tuple's first entry, or the whole sample.

    With a ``device`` samples are stacked there, one tensor ``[N, ...]`` per entry of a sample
    (any dtype; N = ``len(self)``); without one they are held as they are, in a list. Stacked
    samples without ``transform`` are fetched a batch at a time; ``collate_fn=resident.collate``
    then takes the batch as it is, on the device. Use 0 loader workers with a device that is not
    the CPU.

    On each rank it is a whole dataset of its own: give ``ResumableDataLoader`` ``rank=0,
    world=1``, or use ``ResumableSampler``, and save every rank's position. A position taken on
    another share is refused. Where shares differ by a sample, numbers of batches may differ by
    one.

    Raises ``ValueError`` for a share out of range, fewer samples than ranks, or samples that do
    not stack, ``NotResumableError`` for a dataset without a length.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        rank: int | None = None,
        world: int | None = None,
        share: float | None = None,
        load_transform: Transform | None = None,
        transform: Transform | None = None,
        device: torch.device | str | int | None = None,
    ) -> None:
        rank, world = rank_and_world(rank, world)
        n = length_of(dataset)
        self._global_ids = _share_ids(n, rank, world, share)
        self._transform = transform
        self._classes = tuple(getattr(dataset, "classes", ()))
        held = f"rank {rank} of {world}, {len(self._global_ids)} of {n}"
        self._fingerprint = f"resident({dataset_fingerprint(dataset)}, {held})"
        loaded = (_on_input(load_transform, dataset[one]) for one in self._global_ids.tolist())
        self._samples: _Stack | list[Any]
        if device is None:
            self._samples = list(loaded)
        else:
            self._samples = _Stack.of(loaded, self._global_ids, torch.device(device))

    @classmethod
    def from_folder(
        cls,
        root: str | os.PathLike[str],
        *,
        loader: Callable[[str], Any] | None = None,
        **settings: Unpack[ResidentSettings],
    ) -> ResidentDataset:
        """This rank's share of a folder of class folders of images: samples (image, class).

        Classes are numbered in the order of their names, as in torchvision's ``ImageFolder``.
        ``loader`` reads one path; by default an RGB image through PIL (``ImportError`` if that
        is not installed). ``FileNotFoundError`` if a class, or the folder, holds no image.
        """
        return cls(_Folder(os.fspath(root), loader or _pil_loader()), **settings)

    @property
    def global_ids(self) -> Int64:
        """The ids in the whole dataset of the samples held here, ascending, ``[N] int64``."""
        return self._global_ids

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the whole dataset's classes, if it has any."""
        return self._classes

    def data_fingerprint(self) -> str:
        """Names the whole data and the share of it, for ``dataset_fingerprint``."""
        return self._fingerprint

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return _on_input(self._transform, self._samples[index])

    @property
    def __getitems__(self) -> Callable[[Sequence[int]], _Stack] | None:
        """Fetches a whole batch; None where samples are transformed or held one by one.

        torch and ``ResumableDataLoader`` then ask for single samples, so that a random
        ``transform`` is seeded for each.
        """
        if self._transform is None and isinstance(self._samples, _Stack):
            return self._samples.gather
        return None

    @staticmethod
    def collate(samples: Any) -> Any:
        """A ``collate_fn``: a batch that is stacked already as it is, any other by default."""
        return samples.batch() if isinstance(samples, _Stack) else default_collate(samples)


class _Stack(Sequence[Any]):
    """Samples as one tensor per entry, ``[N, ...]``; ``single`` if a sample is not a tuple."""

    def __init__(self, columns: tuple[torch.Tensor, ...], single: bool) -> None:
        self._columns, self._single = columns, single

    @classmethod
    def of(cls, samples: Iterator[Any], ids: Int64, device: torch.device) -> _Stack:
        """Copy one sample after the other to ``device``, so that nothing is held twice."""
        columns: tuple[torch.Tensor, ...] = ()
        single = False
        for place, sample in enumerate(samples):
            row = tuple(_tensor(entry) for entry in _entries(sample))
            if not columns:
                single = not isinstance(sample, (tuple, list))
                columns = tuple(one.new_empty((len(ids), *one.shape), device=device) for one in row)
            _require_alike(row, columns, int(ids[place]), int(ids[0]))
            for column, one in zip(columns, row, strict=True):
                column[place].copy_(one)
        return cls(columns, single)

    def __len__(self) -> int:
        return len(self._columns[0])

    def __getitem__(self, index: Any) -> Any:
        entries = tuple(column[index] for column in self._columns)
        return entries[0] if self._single else entries

    def gather(self, indices: Sequence[int]) -> _Stack:
        """The samples at ``indices``, still stacked."""
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        rows = (column[chosen.to(column.device)] for column in self._columns)
        return _Stack(tuple(rows), self._single)

    def batch(self) -> Any:
        """All of it as what ``default_collate`` would make of its samples."""
        return self._columns[0] if self._single else list(self._columns)


class _Folder:
    """Paths and classes of a folder of class folders, shaped like torchvision's."""

    def __init__(self, root: str, loader: Callable[[str], Any]) -> None:
        self.root, self._loader = root, loader
        self.classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
        self.samples = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in _images_below(os.path.join(root, name))
        ]
        if not self.samples:
            raise FileNotFoundError(f"{root} holds no folder of images for any class")

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, label = self.samples[index]
        return self._loader(path), label


def _share_ids(n: int, rank: int, world: int, share: float | None) -> Int64:
    """The ids that ``rank`` holds, ascending: its stretch of a fixed shuffle, wrapped around."""
    if share is not None and not 1 / world <= share <= 1:
        raise ValueError(
            f"share must lie in [1 / world, 1] = [{1 / world:.4g}, 1], so that every sample is "
            f"held by one of {world} ranks; got {share}"
        )
    if n < world:
        raise ValueError(f"{n} samples are too few for {world} ranks to hold one each")
    start, stop = rank * n // world, (rank + 1) * n // world
    count = max(stop - start, int(n * share) if share else 0)
    ids = EpochOrder(n, 0, 0).ids((start + np.arange(count)) % n)
    return np.sort(ids)


def _on_input(transform: Transform | None, sample: Any) -> Any:
    if transform is None:
        return sample
    if isinstance(sample, (tuple, list)):
        return (transform(sample[0]), *sample[1:])
    return transform(sample)


def _entries(sample: Any) -> tuple[Any, ...]:
    return tuple(sample) if isinstance(sample, (tuple, list)) else (sample,)


def _tensor(entry: Any) -> torch.Tensor:
    """As ``default_collate`` would have it."""
    if isinstance(entry, torch.Tensor):
        return entry
    try:
        return torch.tensor(entry, dtype=torch.float64 if isinstance(entry, float) else None)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"a {type(entry).__name__} cannot be stacked on a device: make it a tensor in "
            "load_transform, or give no device"
        ) from error


def _require_alike(
    row: tuple[torch.Tensor, ...], columns: tuple[torch.Tensor, ...], sample: int, first: int
) -> None:
    found = [(tuple(one.shape), one.dtype) for one in row]
    expected = [(tuple(column.shape[1:]), column.dtype) for column in columns]
    if found != expected:
        raise ValueError(
            f"samples do not stack: sample {sample} is {found}, sample {first} is {expected}. "
            "Make them alike in load_transform, or give no device"
        )


def _images_below(folder: str) -> list[str]:
    """Paths of the images at any depth, in the order of ``ImageFolder``."""
    found = [
        os.path.join(path, name)
        for path, _, names in sorted(os.walk(folder, followlinks=True))
        for name in sorted(names)
        if name.lower().endswith(_IMAGES)
    ]
    if not found:
        raise FileNotFoundError(f"the class folder {folder} holds no image of a known type")
    return found


def _pil_loader() -> Callable[[str], Any]:
    try:
        image = import_module("PIL.Image")
    except ImportError as error:
        raise ImportError(
            "from_folder reads images with PIL, which is not installed: install pillow, or give "
            "a loader"
        ) from error

    def load(path: str) -> Any:
        with image.open(path) as opened:
            return opened.convert("RGB")

    return load
