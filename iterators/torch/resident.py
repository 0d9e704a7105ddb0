"""A rank's share of a dataset, loaded into memory once and then served without I/O.

Which samples a rank holds depends on the length of the data, ``rank``, ``world`` and ``share``
alone. Shares are consecutive parts of one fixed shuffle, so that a folder sorted by class is not
split by class. Together they cover the data; shares larger than ``1 / world`` overlap.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any, TypeAlias, TypedDict

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate
from typing_extensions import Unpack

from iterators.order.environment import length_of, rank_and_world
from iterators.order.epoch import EpochOrder, Int64
from iterators.order.fingerprint import dataset_fingerprint

Transform: TypeAlias = Callable[[Any], Any]

_IMAGES = (".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")


class ResidentSettings(TypedDict, total=False):
    """The settings of ``ResidentDataset``; see there for their meanings and defaults."""

    rank: int | None
    world: int | None
    share: float | None
    load_transform: Transform | None
    transform: Transform | None
    device: torch.device | str | int | None


class ResidentDataset(Dataset[Any]):
    """This rank's share of a map-style dataset, loaded at once and held in memory.

    ::

        resident = ResidentDataset(dataset, device="cuda", load_transform=to_tensor)
        loader = ResumableDataLoader(
            resident, 256, shuffle=True, rank=0, world=1, collate_fn=resident.collate
        )

    Each rank treats its share as a complete dataset of its own: give ``ResumableDataLoader``
    ``rank=0, world=1``, or use ``ResumableSampler``, and save the position of every rank. A
    position of a different share is refused. Shares may differ by one sample, and so the numbers
    of batches by one.

    With a ``device``, samples are stacked there, as one tensor ``[N, ...]`` per entry of a sample
    (any dtype; N = ``len(self)``). Without one they are kept in a list as they are. Stacked samples
    without ``transform`` are fetched a batch at a time, and ``collate_fn=resident.collate`` keeps
    that batch on the device. Use ``num_workers=0`` with a device other than the CPU.

    Arguments
        rank, world: default: those of the process group.
        share: the fraction of all samples that each rank holds, in [1 / world, 1]. Default:
            disjoint shares, of equal size to within one sample.
        load_transform: applied once, when a sample is loaded. Must not be random: a restarted
            process would hold different data.
        transform: applied each time a sample is asked for. Both transforms get the input: the
            first entry of a tuple, or the whole sample.
        device: where to stack the samples; None keeps them in a list.

    Raises ``ValueError`` for a share out of range, fewer samples than ranks, or samples that cannot
    be stacked, and ``NotResumableError`` for a dataset without a length.
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
        """This rank's share of a folder with one folder of images per class.

        A sample is (image, class number). Classes are numbered in the order of their names, as by
        torchvision's ``ImageFolder``. ``loader`` reads one path; by default it returns an RGB image
        from PIL (``ImportError`` if pillow is not installed). Raises ``FileNotFoundError`` if the
        folder, or the folder of a class, contains no image.
        """
        return cls(_Folder(os.fspath(root), loader or _pil_loader()), **settings)

    @property
    def global_ids(self) -> Int64:
        """The ids of the samples held here in the whole dataset, ascending, ``[N] int64``."""
        return self._global_ids

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes of the whole dataset, if it has any."""
        return self._classes

    def data_fingerprint(self) -> str:
        """Identifies the whole data and this share of it, for ``dataset_fingerprint``."""
        return self._fingerprint

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return _on_input(self._transform, self._samples[index])

    @property
    def __getitems__(self) -> Callable[[Sequence[int]], _Stack] | None:
        """A function that fetches a whole batch; None if samples are transformed or not stacked.

        With None, torch and ``ResumableDataLoader`` ask for single samples, so that a random
        ``transform`` can be seeded for each.
        """
        if self._transform is None and isinstance(self._samples, _Stack):
            return self._samples.gather
        return None

    @staticmethod
    def collate(samples: Any) -> Any:
        """A ``collate_fn`` that leaves a stacked batch as it is; otherwise torch's default."""
        return samples.batch() if isinstance(samples, _Stack) else default_collate(samples)


class _Stack(Sequence[Any]):
    """Samples as one tensor ``[N, ...]`` per entry; ``single`` if a sample is not a tuple."""

    def __init__(self, columns: tuple[torch.Tensor, ...], single: bool) -> None:
        self._columns, self._single = columns, single

    @classmethod
    def of(cls, samples: Iterator[Any], ids: Int64, device: torch.device) -> _Stack:
        """Copy the samples to ``device`` one by one, so that the data is never in memory twice."""
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
        chosen = torch.as_tensor(indices, dtype=torch.int64, device="cpu")
        rows = (column[chosen.to(column.device)] for column in self._columns)
        return _Stack(tuple(rows), self._single)

    def batch(self) -> Any:
        """The batch that ``default_collate`` would make of these samples."""
        return self._columns[0] if self._single else list(self._columns)


class _Folder:
    """The images below a folder of class folders, with the attributes of torchvision's class."""

    def __init__(self, root: str, loader: Callable[[str], Any]) -> None:
        self.root, self._loader = root, loader
        self.classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
        self.samples = [
            (path, label)
            for label, name in enumerate(self.classes)
            for path in _images_below(os.path.join(root, name))
        ]
        if not self.samples:
            raise FileNotFoundError(f"{root} contains no class folder with images")

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        path, label = self.samples[index]
        return self._loader(path), label


def _share_ids(n: int, rank: int, world: int, share: float | None) -> Int64:
    """The ids that ``rank`` holds, ascending: its part of a fixed shuffle, which wraps around."""
    if share is not None and not 1 / world <= share <= 1:
        raise ValueError(
            f"share must lie in [1 / world, 1] = [{1 / world:.4g}, 1], so that the {world} ranks "
            f"together hold every sample; got {share}"
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
    """``entry`` as a tensor, with the dtype that ``default_collate`` would give it."""
    if isinstance(entry, torch.Tensor):
        return entry
    try:
        dtype = torch.float64 if isinstance(entry, float) else None
        return torch.tensor(entry, dtype=dtype, device="cpu")
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
        raise FileNotFoundError(f"the class folder {folder} contains no image of a known type")
    return found


def _pil_loader() -> Callable[[str], Any]:
    try:
        image = import_module("PIL.Image")
    except ImportError as error:
        raise ImportError(
            "from_folder reads images with PIL, which is not installed: install pillow, or pass "
            "loader="
        ) from error

    def load(path: str) -> Any:
        with image.open(path) as opened:
            return opened.convert("RGB")

    return load
