"""The data: any folder of class folders of images, read by torchvision."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

from checkfreq.examples.imagenet.models import import_torchvision
from checkfreq.examples.imagenet.ranks import Ranks
from iterators import CFIterator

import_torchvision()
from torchvision import datasets, transforms  # noqa: E402  # needs import_torchvision() first

#: Mean and standard deviation of ImageNet's red, green and blue, from 0 to 1.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
#: How much of an image's area a random crop keeps.
SCALE = (0.25, 1.0)
#: Of a folder without train/ and val/, every tenth image is kept for validation.
HELD_OUT = 10

Images = Dataset[tuple[torch.Tensor, int]]


@dataclass(frozen=True, slots=True)
class Data:
    """The data of a run: ``train`` is a loader, of torch or DALI; ``val`` begins a pass over the
    validation images. ``images_and_target`` takes a batch of either.
    """

    train: Any
    val: Callable[[], Iterable[Any]]
    num_classes: int


def images_and_target(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Images [N, 3, H, W] and classes [N] int64 of a batch of a torch or DALI loader."""
    first = batch[0]
    if isinstance(first, dict):  # DALI's: one dictionary per pipeline
        return first["data"], first["label"].squeeze(1).long()
    return first, batch[1]


def torch_data(args: argparse.Namespace, ranks: Ranks) -> Data:
    """Plain loaders of this rank's share; CFIterator replaces their order by a resumable one."""
    train, val, num_classes = open_images(args.data, image_size=args.image_size)
    sampler = None if ranks.is_alone else DistributedSampler(train, seed=args.seed)
    loader = DataLoader(
        train,
        batch_size=args.batch_size,
        shuffle=True if sampler is None else None,
        sampler=sampler,
        num_workers=args.workers,
        pin_memory=torch.cuda.is_available(),
    )
    share = Subset(val, range(ranks.rank, len(val), ranks.world))  # type: ignore[arg-type]
    return Data(loader, lambda: eval_loader(share, args), num_classes)


def eval_loader(images: Images, args: argparse.Namespace) -> DataLoader[Any]:
    """In order. It has its own generator: iterating a DataLoader draws from the default one."""
    return DataLoader(
        images,
        batch_size=args.batch_size,
        num_workers=args.workers,
        generator=torch.Generator().manual_seed(args.seed),
    )


def class_names(data: Path) -> list[str]:
    """The class folders of ``train/`` and ``val/``, which must match, or labels would differ."""
    train, val = (
        {path.name for path in (data / split).iterdir() if path.is_dir()}
        for split in ("train", "val")
    )
    if train != val:
        raise FileNotFoundError(
            f"train/ and val/ must hold the same class folders; only one of them has "
            f"{', '.join(sorted(train ^ val)[:5])}"
        )
    return sorted(train)


def train_transform(image_size: int) -> transforms.Compose:
    """Random crop, flip and normalisation; draws from torch's generator."""
    return transforms.Compose(
        [
            transforms.RandomResizedCrop(image_size, scale=SCALE),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )


def eval_transform(image_size: int) -> transforms.Compose:
    """The centre of the image, always the same."""
    return transforms.Compose(
        [
            transforms.Resize(image_size * 8 // 7),
            transforms.CenterCrop(image_size),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )


@dataclass(frozen=True, slots=True)
class Stream:
    """Endless batches of training images, in a resumable order."""

    batches: Iterator[Any]
    num_classes: int
    batches_per_epoch: int

    @classmethod
    def of(cls, data: Path, *, image_size: int, batch: int, workers: int, seed: int) -> Stream:
        """Read by ``workers`` processes; the incomplete last batch of an epoch is dropped."""
        images, _, num_classes = open_images(data, image_size=image_size)
        loader = DataLoader(
            images,
            batch_size=batch,
            shuffle=True,
            drop_last=True,
            num_workers=workers,
            pin_memory=torch.cuda.is_available(),
        )
        iterator = CFIterator(loader, seed=seed)
        batches = map(images_and_target, iterator.steps(sys.maxsize))
        return cls(batches, num_classes, len(loader))


def open_images(data: Path, *, image_size: int) -> tuple[Images, Images, int]:
    """(training set, validation set, number of classes) under ``data``.

    Raises FileNotFoundError if there is no class folder, one has no image, or the two sets have
    different classes.
    """
    train, val = train_transform(image_size), eval_transform(image_size)
    if (data / "train").is_dir():
        class_names(data)
        learn = datasets.ImageFolder(str(data / "train"), train)
        return learn, datasets.ImageFolder(str(data / "val"), val), len(learn.classes)
    learn = datasets.ImageFolder(str(data), train)
    held_out = range(HELD_OUT - 1, len(learn), HELD_OUT)
    kept = [index for index in range(len(learn)) if index not in held_out]
    checked = datasets.ImageFolder(str(data), val)
    return Subset(learn, kept), Subset(checked, held_out), len(learn.classes)
