"""Datasets of `benchmarks.imagenet`: any folder of class folders of images."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.utils.data import Dataset, Subset

from benchmarks.models import import_torchvision

import_torchvision()
from torchvision import datasets, transforms  # noqa: E402  # needs import_torchvision() first

#: Mean and standard deviation of ImageNet's red, green and blue, from 0 to 1.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
#: Of a folder without train/ and val/, every tenth image is kept for validation.
HELD_OUT = 10

Images = Dataset[tuple[torch.Tensor, int]]


def train_transform(image_size: int) -> transforms.Compose:
    """Random crop, flip and normalisation; draws from torch's generator."""
    return transforms.Compose(
        [
            transforms.RandomResizedCrop(image_size, scale=(0.25, 1.0)),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )


def eval_transform(image_size: int) -> transforms.Compose:
    """The middle of the image, the same every time."""
    return transforms.Compose(
        [
            transforms.Resize(image_size * 8 // 7),
            transforms.CenterCrop(image_size),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, STD),
        ]
    )


def open_images(data: Path, *, image_size: int) -> tuple[Images, Images, int]:
    """(training set, validation set, number of classes) under ``data``.

    Raises FileNotFoundError where there is no class folder, or one holds no image.
    """
    train, val = train_transform(image_size), eval_transform(image_size)
    if (data / "train").is_dir():
        learn = datasets.ImageFolder(str(data / "train"), train)
        return learn, datasets.ImageFolder(str(data / "val"), val), len(learn.classes)
    learn = datasets.ImageFolder(str(data), train)
    held_out = range(HELD_OUT - 1, len(learn), HELD_OUT)
    kept = [index for index in range(len(learn)) if index not in held_out]
    checked = datasets.ImageFolder(str(data), val)
    return Subset(learn, kept), Subset(checked, held_out), len(learn.classes)
