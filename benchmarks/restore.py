"""Time to restore: verified, into live tensors, beside a raw read and peers.

    python -m benchmarks.restore --gib 1 --rounds 5 --folder /mnt/disk/scratch

Arms run interleaved in random order; ratios are taken within a round. ``raw`` reads the same
files with direct I/O and the same threads into memory that is already there; ``raw_fresh`` into
new memory, as any restore must (its first touch can cost more than the read, on a virtual
machine). ``checkfreq`` is ``CFManager.restore()``: list, read, verify every digest, copy into the
live tensors. Peers read their own file of the same state and load it into the live module; their
files are dropped from the page cache first, and they verify nothing.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from benchmarks.states import Block, manual_manager
from benchmarks.throughput import Arm, Seconds, interleaved, report
from checkfreq.store.images import new_buffer

_CHUNK_BYTES = 8 << 20
_THREADS = 4


def measure(scratch: Path, num_bytes: int, rounds: int) -> Seconds:
    """Seconds of every arm, a value per round."""
    block = Block(num_bytes)
    _write_all(block, scratch)
    files = sorted((scratch / "chk").glob("step-*/*.safetensors"))
    memory = _touched(sum(file.stat().st_size for file in files) + len(files) * mmap.PAGESIZE)
    arms: dict[str, Callable[[], float]] = {
        "raw": lambda: _raw(files, memory),
        "raw_fresh": lambda: _raw(files, new_buffer(len(memory))),
        "checkfreq": lambda: _checkfreq(block, scratch),
        "torch.load": lambda: _timed(scratch / "model.pt", lambda f: _torch_load(block, f)),
        "safetensors": lambda: _timed(
            scratch / "model.safetensors", lambda f: block.load_state_dict(load_file(f))
        ),
        "dcp.load": lambda: _timed(
            scratch / "dcp", lambda f: dcp.load(block.state_dict(), checkpoint_id=f)
        ),
    }
    named: list[Arm] = [lambda n=name, arm=arm: {n: arm()} for name, arm in arms.items()]  # type: ignore[misc]
    interleaved(named, rounds=1)  # warms up
    return interleaved(named, rounds=rounds)


def _write_all(block: Block, scratch: Path) -> None:
    with manual_manager(str(scratch / "chk"), block) as manager:
        manager.save(wait=True)
    torch.save(block.state_dict(), scratch / "model.pt")
    save_file(block.state_dict(), scratch / "model.safetensors")
    dcp.save(block.state_dict(), checkpoint_id=scratch / "dcp")


def _touched(num_bytes: int) -> memoryview:
    memory = mmap.mmap(
        -1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
    )
    return memoryview(memory)


def _raw(files: list[Path], memory: memoryview) -> float:
    start_s = time.perf_counter()
    with ThreadPoolExecutor(_THREADS) as pool:
        at = 0
        for file in files:
            fd = os.open(file, os.O_RDONLY | os.O_DIRECT)
            size = os.fstat(fd).st_size

            def read(offset: int, fd: int = fd, at: int = at) -> None:
                area = memory[at + offset : at + offset + _CHUNK_BYTES]
                os.preadv(fd, [area[: len(area) // mmap.PAGESIZE * mmap.PAGESIZE]], offset)

            list(pool.map(read, range(0, size, _CHUNK_BYTES)))
            os.close(fd)
            at += -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    return time.perf_counter() - start_s


def _checkfreq(block: Block, scratch: Path) -> float:
    manager = manual_manager(str(scratch / "chk"), block)
    start_s = time.perf_counter()
    assert manager.restore()
    seconds = time.perf_counter() - start_s
    manager.close()
    return seconds


def _timed(path: Path, load: Callable[[Path], object]) -> float:
    for file in [path, *path.rglob("*")]:
        if file.is_file():
            _drop_from_cache(file)
    start_s = time.perf_counter()
    load(path)
    return time.perf_counter() - start_s


def _drop_from_cache(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def _torch_load(block: Block, path: Path) -> None:
    block.load_state_dict(torch.load(path, weights_only=True))


if __name__ == "__main__":
    report(
        "restore",
        __doc__.splitlines()[0],
        measure,
        baselines={"raw": "raw", "raw_fresh": "raw_fresh"},
    )
