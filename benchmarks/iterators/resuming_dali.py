"""The DALI arms of the resume table: our order, and DALI's own reader and checkpoints."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from nvidia.dali import fn, pipeline_def
from nvidia.dali.plugin.pytorch import DALIGenericIterator, LastBatchPolicy

from benchmarks.iterators.resuming_shared import (
    BATCH,
    Prepare,
    Resume,
    entering,
    require_memory,
)
from iterators.dali import DALILoader, FileReader
from iterators.protocol import Adapter

#: Memory that DALI's reader takes per path, as measured with a million.
BYTES_PER_PATH = 1_700


def dali_arms(scratch: Path) -> Iterator[tuple[str, Prepare]]:
    """Ours and DALI's, both with a list of paths, and ours without one: the order alone."""
    path = scratch / "sample.bin"
    path.write_bytes(bytes(64))
    yield "checkfreq, DALI, order only", lambda n, batches: order_only(n, batches, path)
    yield "checkfreq, DALI, with its list of files", lambda n, batches: listed(n, batches, path)
    yield "DALI's own checkpoint", lambda n, batches: native(n, batches, path)


def order_only(n: int, batches: int, path: Path) -> Resume:
    """Like ``listed``, but with a list of files that takes neither time nor memory."""
    reader = FileReader(files=[path], fingerprint="one file")
    reader._spec = dataclasses.replace(reader._spec, files=Repeated(n, path))
    return entering(lambda: loader_of(reader), batches)


def listed(n: int, batches: int, path: Path) -> Resume:
    """Our order through ``FileReader``, which loads its list and identifies it by a digest."""
    require_memory(n, bytes_each=12 + len(os.fspath(path)))
    paths = [os.fspath(path)] * n
    return entering(lambda: loader_of(FileReader(files=paths)), batches)


def loader_of(reader: FileReader) -> Adapter:
    """A pipeline that returns the files as they are."""

    @pipeline_def(batch_size=BATCH, num_threads=1, device_id=None)
    def pipeline() -> Any:
        return tuple(reader())

    return DALILoader(DALIGenericIterator([pipeline()], ["bytes", "label"]))


class Repeated:
    """The same file ``n`` times without memory: stands in for a ``FileList``."""

    def __init__(self, n: int, path: Path) -> None:
        self._n, self._path = n, np.frombuffer(os.fsencode(path), dtype=np.uint8)
        self.labels = self

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, ids: NDArray[np.int64]) -> NDArray[np.int32]:
        return ids.astype(np.int32)

    def path(self, index: int) -> NDArray[np.uint8]:
        """The path that DALI reads."""
        return self._path


def native(n: int, batches: int, path: Path) -> Resume:
    """DALI's own reader, which keeps every path in a list, and its own checkpoint."""
    require_memory(n, bytes_each=BYTES_PER_PATH)
    paths = [str(path)] * n

    def make(checkpoint: str | None) -> DALIGenericIterator:
        @pipeline_def(
            batch_size=BATCH,
            num_threads=1,
            device_id=None,
            enable_checkpointing=True,
            checkpoint=checkpoint,
        )
        def pipeline() -> Any:
            encoded, label = fn.readers.file(
                files=paths, shuffle_after_epoch=True, pad_last_batch=True, name="Reader"
            )
            return encoded, label

        return DALIGenericIterator(
            [pipeline()],
            ["bytes", "label"],
            reader_name="Reader",
            last_batch_policy=LastBatchPolicy.PARTIAL,
        )

    iterator = make(None)
    for _ in range(batches):
        next(iterator)
    (state,) = iterator.checkpoints()
    del iterator

    def resume() -> tuple[object, object]:
        fresh = make(state)
        return next(fresh), fresh

    return resume
