"""DALI iterators for the tests: tiny pictures, augmented by what comes in as data."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from typing import Any

from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.plugin.pytorch import DALIGenericIterator

from iterators import CFIterator
from iterators.dali import DALILoader, FileReader
from iterators.dali.crops import NUM_UNIFORMS, random_window
from iterators.testing import digest

KEYS = ["data", "label", "id", "weight"]
WINDOW: dict[str, Any] = {"scale": (0.08, 1.0), "ratio": (3 / 4, 4 / 3)}


def reader(files: list[str], **settings: Any) -> FileReader:
    return FileReader(
        files=files,
        num_uniforms=NUM_UNIFORMS + 1,
        outputs=("label", "uniforms", "id", "weight"),
        **settings,
    )


def augmented(reader: FileReader, batch: int, **settings: Any) -> Any:
    """A pipeline of pictures of 6 x 6, randomly cropped and flipped."""

    def define() -> Any:
        encoded, label, uniforms, ids, weight = reader()
        start, shape = random_window(encoded, uniforms, **WINDOW)
        pictures = fn.decoders.image_slice(encoded, start=start, shape=shape, axes=[0, 1])
        pictures = fn.resize(pictures, size=[6, 6])
        mirror = fn.cast(uniforms[NUM_UNIFORMS] < 0.5, dtype=types.INT32)
        return fn.flip(pictures, horizontal=mirror), label, ids, weight

    made: Callable[[], Any] = pipeline_def(
        define, batch_size=batch, num_threads=1, device_id=None, **settings
    )
    return made()


def built(
    files: list[str],
    batch: int,
    *,
    iterator: dict[str, Any] | None = None,
    pipeline: dict[str, Any] | None = None,
    **settings: Any,
) -> DALIGenericIterator:
    """A built DALI iterator over ``files``; ``settings`` are the reader's."""
    pipe = augmented(reader(files, **settings), batch, **(pipeline or {}))
    return DALIGenericIterator(pipe, KEYS, **(iterator or {}))


def resumable(files: list[str], batch: int, **settings: Any) -> CFIterator:
    return CFIterator(built(files, batch, **settings), seed=9)


def samples(data: Any) -> list[str]:
    """A digest for each sample of a batch."""
    (batch,) = data
    return [digest([batch[key][index] for key in KEYS]) for index in range(len(batch["id"]))]


def served(loader: DALILoader, *, epoch: int, start: int = 0, at_most: int = 1000) -> list[str]:
    """A digest for each sample from a place on, of at most so many batches."""
    opened = loader.open(epoch=epoch, start=start)
    taken: Iterable[Any] = (next(opened) for _ in range(min(at_most, loader.batches_left(start))))
    return [one for delivery in taken for one in samples(delivery.data)]


def last_line_of(error: BaseException) -> str:
    """What a traceback ends with: the note, if the error has one."""
    return "".join(traceback.format_exception_only(error)).splitlines()[-1]
