"""Reads chosen tensors of a checkpoint with direct I/O, each one whole, and checks its digest.

Neighbours in a file are read together. Several threads read and digest. Results come in the order
of files and offsets, and only a bounded number of reads runs ahead, which bounds the memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from checkfreq.errors import CorruptCheckpointError
from checkfreq.restore.buffers import new_buffer
from checkfreq.store.digests import digest_pieces
from checkfreq.store.fileops import ReadFile
from checkfreq.store.manifest import Manifest, TensorEntry
from checkfreq.store.store import CheckpointStore
from checkfreq.types import PAGE_BYTES, round_up_to_page

#: Small tensors are read together up to so many bytes.
_RUN_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Place:
    """One tensor of a payload file."""

    file: str
    entry: TensorEntry

    @property
    def end(self) -> int:
        """Offset of the byte after its last."""
        return self.entry.offset + self.entry.num_bytes


def read_verified(
    store: CheckpointStore, manifest: Manifest, places: Iterable[Place], *, num_threads: int = 4
) -> Iterator[tuple[Place, memoryview]]:
    """Yield each place once, with its bytes, which stay valid as long as the view lives.

    Raises CorruptCheckpointError at the first missing file, wrong size or digest.
    """
    runs = list(_runs(places))
    sizes = {entry.name: entry for entry in manifest.files}
    with ExitStack() as stack, ThreadPoolExecutor(num_threads, "checkfreq-dcp-read") as pool:
        files: dict[str, ReadFile] = {}
        for name in dict.fromkeys(run[0].file for run in runs):
            files[name] = store.open_payload(manifest.step, sizes[name])
            stack.callback(files[name].close)
        folder = store.path(manifest.step)
        ahead: deque[Future[list[tuple[Place, memoryview]]]] = deque()
        for run in runs:
            ahead.append(pool.submit(_read_run, folder, files[run[0].file], run))
            if len(ahead) > num_threads:
                yield from ahead.popleft().result()
        while ahead:
            yield from ahead.popleft().result()


def _runs(places: Iterable[Place]) -> Iterator[list[Place]]:
    """Group neighbours in a file, up to a bound; a larger tensor is a group by itself."""
    run: list[Place] = []
    for place in sorted({*places}, key=lambda p: (p.file, p.entry.offset, p.entry.num_bytes)):
        if run and not _belongs(place, run):
            yield run
            run = []
        run.append(place)
    if run:
        yield run


def _belongs(place: Place, run: list[Place]) -> bool:
    return (
        place.file == run[0].file
        and place.entry.offset - run[-1].end < PAGE_BYTES
        and place.end - run[0].entry.offset <= _RUN_BYTES
    )


def _read_run(folder: Path, file: ReadFile, run: list[Place]) -> list[tuple[Place, memoryview]]:
    start = run[0].entry.offset // PAGE_BYTES * PAGE_BYTES
    end = min(round_up_to_page(run[-1].end), file.size)
    buffer = new_buffer(round_up_to_page(end - start))
    got = file.preadinto(buffer[: round_up_to_page(end - start)], start)
    if got != end - start:
        raise OSError(f"expected {end - start} bytes at byte {start}, got {got}: the file shrank")
    found = []
    for place in run:
        view = buffer[place.entry.offset - start : place.end - start]
        _check(folder / place.file, place.entry, view)
        found.append((place, view))
    return found


def _check(path: Path, entry: TensorEntry, view: memoryview) -> None:
    got = digest_pieces(view, entry)
    if got != entry.digest:
        raise CorruptCheckpointError(
            str(path), check=f"digest of tensor {entry.name}", expected=entry.digest, got=got
        )
