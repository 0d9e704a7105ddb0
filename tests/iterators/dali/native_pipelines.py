"""Small pipelines of DALI's own readers and random operators, on tiny images."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy
from PIL import Image

Make = Callable[[bytes | None], Any]


def write_images(root: Path, n: int) -> list[str]:
    """``n`` different JPEGs in three class folders below ``root``; their paths."""
    drawn = np.random.default_rng(0)
    paths = []
    for index in range(n):
        path = root / f"class{index % 3}" / f"{index:03d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = drawn.integers(0, 255, (9 + index % 5, 12, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(path)
        paths.append(str(path))
    return paths


def put(path: str | Path, content: bytes) -> None:
    """Give a file other content, as a new file: DALI may have the old one mapped into memory."""
    new = Path(f"{path}.new")
    new.write_bytes(content)
    new.replace(path)


@pipeline_def
def augmented(reader: dict[str, Any], size: int = 6) -> Any:
    """Read, decode, crop, resize and flip at random. The label is the file's number."""
    encoded, labels = fn.readers.file(name="Reader", **reader)
    images = fn.random_resized_crop(fn.decoders.image(encoded), size=size)
    return fn.flip(images, horizontal=fn.random.coin_flip()), labels


@pipeline_def
def plain(reader: dict[str, Any]) -> Any:
    """Other operators than ``augmented``."""
    encoded, labels = fn.readers.file(name="Reader", **reader)
    return fn.resize(fn.decoders.image(encoded), size=6), labels


@dataclass(frozen=True)
class Spec:
    """Everything that makes an iterator; ``but`` changes some of it."""

    paths: list[str]
    batch: int = 4
    shard: int = 0
    shards: int = 1
    pipeline: Any = augmented
    reader: dict[str, Any] = field(default_factory=lambda: {"shuffle_after_epoch": True})
    iterator: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def but(self, **changes: Any) -> Spec:
        return replace(self, **changes)

    def build(self, checkpoint: bytes | None) -> Any:
        """The pipeline alone."""
        reader = {
            "files": self.paths,
            "labels": list(range(len(self.paths))),
            "shard_id": self.shard,
            "num_shards": self.shards,
            "pad_last_batch": True,
            **self.reader,
        }
        return self.pipeline(reader, **settings_of(self, checkpoint))

    def __call__(self, checkpoint: bytes | None) -> DALIGenericIterator:
        return iterator_over(self.build(checkpoint), **self.iterator)


def labels_of(batch: Any) -> list[int]:
    """The numbers of the files in a batch."""
    numbers: list[int] = batch[0]["label"].flatten().tolist()
    return numbers


@pipeline_def
def with_source(reader: dict[str, Any], source: Any = None) -> Any:
    """Adds data of ``fn.external_source`` to what the reader reads."""
    encoded, labels = fn.readers.file(name="Reader", **reader)
    extra = fn.external_source(source=source, dtype=types.INT64, ndim=1)
    return fn.resize(fn.decoders.image(encoded), size=6), labels + extra


def settings_of(spec: Spec, checkpoint: bytes | None) -> dict[str, Any]:
    """What every pipeline here is built with."""
    return {
        "batch_size": spec.batch,
        "num_threads": 1,
        "device_id": None,
        "seed": 5,
        "enable_checkpointing": True,
        "checkpoint": checkpoint,
        **spec.settings,
    }


def iterator_over(pipeline: Any, kind: Any = DALIGenericIterator, **options: Any) -> Any:
    """An iterator with the settings that are exact."""
    return kind(
        pipeline,
        ["data", "label"],
        **{
            "reader_name": "Reader",
            "last_batch_policy": LastBatchPolicy.PARTIAL,
            "auto_reset": True,
            **options,
        },
    )
