"""Reads tensors of one checkpoint into their places, and verifies them on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from checkfreq.restore.buffers import Buffers
from checkfreq.restore.device_target import transfers_to
from checkfreq.restore.shared_reads import SharedReads
from checkfreq.restore.stream import Wanted, stream
from checkfreq.restore.targets import wanted_of
from checkfreq.snapshot.backends import owner_of
from checkfreq.state.saved_tensor import Placement
from checkfreq.store.manifest import FileEntry
from checkfreq.store.source import CheckpointSource

_HOST = torch.device("cpu")


class StreamReader:
    """The ``Reader`` of a step of a source. ``shared``: with ranks that may read the same."""

    def __init__(
        self,
        source: CheckpointSource,
        step: int,
        *,
        num_threads: int,
        on_read: Callable[[int], object] = lambda num_bytes: None,
        shared: SharedReads | None = None,
    ) -> None:
        self._source = source
        self._step = step
        self._num_threads = num_threads
        self._on_read = on_read
        self._shared = shared

    def read(self, placements: Sequence[Placement]) -> None:
        """See ``Reader``."""
        targets = [placement.target for placement in placements]
        with transfers_to(targets, read_bytes=self._source.read_bytes) as transfers:
            wanted = [wanted_of(placement, transfers) for placement in placements]
            self._stream(wanted, buffers=None if transfers is None else transfers.buffers)
        for device in {target.device for target in targets if owner_of(target) is None} - {_HOST}:
            torch.accelerator.synchronize(device)  # of a kind that we have no backend for
        # As any write through torch does: autograd notices that saved tensors have changed.
        torch.autograd.graph.increment_version(targets)

    def verify(self, files: Iterable[FileEntry]) -> None:
        """Read all of some files and keep nothing; CorruptCheckpointError for damage."""
        self._stream([Wanted(file, tensor, None) for file in files for tensor in file.tensors])

    def _stream(self, wanted: Sequence[Wanted], *, buffers: Buffers | None = None) -> None:
        stream(
            self._source,
            self._step,
            wanted,
            num_threads=self._num_threads,
            buffers=buffers,
            on_read=self._on_read,
            shared=self._shared,
        )
