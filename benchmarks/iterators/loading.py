"""Images per second of a loader with checkfreq, against the same loader without, in paired epochs.

Only loading: read, decode, augment, collate. Epochs of both alternate in random order in one
process, and each epoch with checkfreq is compared with the adjacent one without. Loaders:
torchvision's transforms under a DataLoader, and DALI's operators on the host. Images have the size
of ImageNet's, or are small, so that our cost per sample or batch is a larger fraction.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks.lab.estimate import Sample, estimate
from benchmarks.lab.record import emit
from benchmarks.make_images import ImageSet, make
from checkfreq.examples.imagenet.images import SCALE, open_images
from checkfreq.examples.imagenet.options import is_installed
from iterators import CFIterator

BATCH, CLASSES, ALLOWED = 32, 8, 0.03

#: The shortest and the longest side of a file, and the side of its crop, in pixels.
SIZES = {"375 to 500 pixels": (375, 500, 224), "160 to 320 pixels": (160, 320, 112)}

#: One epoch; returns the number of images.
Epoch = Callable[[], int]


def measure_throughput(args: argparse.Namespace, scratch: Path) -> None:
    """A line per kind of loader."""
    for name, (smallest, largest, size) in SIZES.items():
        train, data = max(1, args.images // CLASSES), scratch / name
        images = ImageSet(classes=CLASSES, train=train, val=1, smallest=smallest, largest=largest)
        make(data, images=images)
        for arm, plain, ours in pairs_of(data, size):
            emit(
                "iterators",
                what="throughput",
                arm=f"{arm}, {name}",
                **overhead_of(plain, ours, args.pairs),
            )


def pairs_of(data: Path, size: int) -> Iterator[tuple[str, Epoch, Epoch]]:
    """The same loader without and with checkfreq."""
    for workers in (0, 2):
        plain, ours = torch_epochs(data, size, workers)
        yield f"DataLoader, {workers} workers", plain, ours
    if is_installed("nvidia.dali"):
        yield "DALI, host", *dali_epochs(data, size)


def torch_epochs(data: Path, size: int, workers: int) -> tuple[Epoch, Epoch]:
    """torchvision's ImageFolder and transforms; workers persist in both."""
    images, _, _ = open_images(data, image_size=size)

    def loader() -> DataLoader[Any]:
        return DataLoader(
            images, BATCH, shuffle=True, num_workers=workers, persistent_workers=workers > 0
        )

    plain, ours = loader(), CFIterator(loader())
    return (
        lambda: sum(len(target) for _, target in plain),
        lambda: sum(len(target) for _, target in ours),
    )


def dali_epochs(data: Path, size: int) -> tuple[Epoch, Epoch]:
    """DALI's reader and random operators, and our reader and random numbers."""
    from checkfreq.examples.imagenet.dali_images import plain_train
    from iterators.dali import imagenet_train

    plain = plain_train(data / "train", BATCH, image_size=size)
    ours = CFIterator(
        imagenet_train(data / "train", BATCH, image_size=size, num_threads=2, scale=SCALE)
    )
    return (
        lambda: sum(len(batch[0]["label"]) for batch in plain),
        lambda: sum(len(batch[0]["label"]) for batch in ours),
    )


def overhead_of(plain: Epoch, ours: Epoch, pairs: int) -> dict[str, Any]:
    """Added time as a fraction of the plain loader's, with its 95 % interval."""
    plain(), ours()  # page cache, workers
    samples, seconds, count = [], 0.0, 0
    for _ in range(pairs):
        took = {"plain": 0.0, "ours": 0.0}
        for name, epoch in random.sample([("plain", plain), ("ours", ours)], 2):
            start_s = time.perf_counter()
            count = epoch()
            took[name] = time.perf_counter() - start_s
        samples.append(Sample(took["ours"] - took["plain"], took["plain"]))
        seconds += took["ours"]
    added = estimate(samples)
    return {
        "images_per_s": round(pairs * count / seconds, 1),
        "added": added.mean,
        "low": added.low,
        "high": added.high,
        "allowed": ALLOWED,
        "pairs": pairs,
        "batch": BATCH,
        "torch_threads": torch.get_num_threads(),
    }
