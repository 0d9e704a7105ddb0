"""Reads tensors of one checkpoint into their places, and verifies them on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from checkfreq.restore.stream import Wanted, stream
from checkfreq.restore.targets import wanted_of
from checkfreq.state.saved_tensor import Placement
from checkfreq.store.manifest import FileEntry
from checkfreq.store.source import CheckpointSource


class StreamReader:
    """The ``Reader`` of a step of a source."""

    def __init__(
        self,
        source: CheckpointSource,
        step: int,
        *,
        num_threads: int,
        on_read: Callable[[int], object] = lambda num_bytes: None,
    ) -> None:
        self._source = source
        self._step = step
        self._num_threads = num_threads
        self._on_read = on_read

    def read(self, placements: Sequence[Placement]) -> None:
        """See ``Reader``."""
        self._stream([wanted_of(placement) for placement in placements])
        devices = {p.target.device for p in placements if not p.target.is_cpu}
        for device in devices:
            torch.accelerator.synchronize(device)
        # As any write through torch does: autograd notices that saved tensors have changed.
        torch.autograd.graph.increment_version([p.target for p in placements])

    def verify(self, files: Iterable[FileEntry]) -> None:
        """Read all of some files and keep nothing; CorruptCheckpointError for damage."""
        self._stream([Wanted(file, tensor, None) for file in files for tensor in file.tensors])

    def _stream(self, wanted: Sequence[Wanted]) -> None:
        stream(
            self._source,
            self._step,
            wanted,
            num_threads=self._num_threads,
            on_read=self._on_read,
        )
