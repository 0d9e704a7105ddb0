"""Data of ``--dali``: the same folders, read and augmented by NVIDIA DALI."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.plugin.pytorch import DALIClassificationIterator, LastBatchPolicy

from checkfreq.examples.imagenet.images import MEAN, SCALE, STD, Data, class_names
from checkfreq.examples.imagenet.ranks import Ranks
from iterators import CFIterator
from iterators.dali import imagenet_train, imagenet_val


def dali_data(args: argparse.Namespace, ranks: Ranks) -> Data:
    """DALI loaders over ``train/`` and ``val/``; in a resumable order under ``--cf_iterator``."""
    train, val = args.data / "train", args.data / "val"
    if not train.is_dir() or not val.is_dir():
        raise FileNotFoundError("--dali needs the folders train/ and val/ in it")
    classes, place = class_names(args.data), place_of(args, ranks)
    checked = CFIterator(imagenet_val(val, args.batch_size, image_size=args.image_size, **place))
    return Data(train_loader(train, args, place), lambda: checked, len(classes))


def train_loader(train: Path, args: argparse.Namespace, place: dict[str, Any]) -> Any:
    """The loader that CFIterator wraps, or a DALI loader as in its documentation."""
    if args.cf_iterator:
        return imagenet_train(
            train,
            args.batch_size,
            image_size=args.image_size,
            seed=args.seed,
            scale=SCALE,
            **place,
        )
    return plain_train(train, args.batch_size, image_size=args.image_size, seed=args.seed, **place)


def place_of(args: argparse.Namespace, ranks: Ranks) -> dict[str, Any]:
    """Where DALI decodes, on the device that trains or else on the host, and which share."""
    on_gpu = torch.cuda.is_available() and torch.device(args.device or "cuda").type == "cuda"
    return {
        "device": "mixed" if on_gpu else "cpu",
        "device_id": torch.device(args.device or "cuda").index or 0 if on_gpu else None,
        "num_threads": max(1, args.workers),
        "rank": ranks.rank,
        "world": ranks.world,
    }


def plain_train(
    train: Path,
    batch_size: int,
    *,
    image_size: int,
    seed: int = 0,
    device: str = "cpu",
    device_id: int | None = None,
    num_threads: int = 2,
    rank: int = 0,
    world: int = 1,
) -> DALIClassificationIterator:
    """DALI's own reader and random operators, with the only settings that serve all samples."""

    @pipeline_def
    def pipeline() -> Any:
        encoded, labels = fn.readers.file(
            file_root=str(train),
            shuffle_after_epoch=True,
            pad_last_batch=True,
            shard_id=rank,
            num_shards=world,
            name="Reader",
        )
        images = fn.decoders.image_random_crop(encoded, device=device, random_area=list(SCALE))
        images = fn.resize(images, size=(image_size, image_size))
        images = fn.crop_mirror_normalize(
            images,
            dtype=types.FLOAT,
            mirror=fn.random.coin_flip(),
            mean=[255 * value for value in MEAN],
            std=[255 * value for value in STD],
        )
        return images, labels

    built = pipeline(batch_size=batch_size, num_threads=num_threads, device_id=device_id, seed=seed)
    return DALIClassificationIterator(
        built,
        reader_name="Reader",
        last_batch_policy=LastBatchPolicy.PARTIAL,
        auto_reset=True,
    )
