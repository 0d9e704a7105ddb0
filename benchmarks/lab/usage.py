"""Memory, descriptors and threads of the trainer and its worker, as the kernel counts them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.lab.states import Block
from checkfreq import CFManager

_PARTS = 10


@dataclass(frozen=True)
class Usage:
    """Resident memory of a process in bytes, and its descriptors and threads."""

    anonymous: int
    files: int
    shared: int
    num_fds: int
    num_threads: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        """Read it from the kernel."""
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        rows = dict(line.split(":", 1) for line in lines)

        def kib(name: str) -> int:
            return int(rows[name].split()[0]) * 1024

        num_fds = len(os.listdir(f"/proc/{pid}/fd"))
        return cls(kib("RssAnon"), kib("RssFile"), kib("RssShmem"), num_fds, int(rows["Threads"]))

    @property
    def private(self) -> int:
        """Resident besides shared memory: the snapshot slots are that."""
        return self.anonymous + self.files


def worker_pid(manager: CFManager) -> int:
    """The persist worker of a manager whose directory is locked by it."""
    process = manager._persistence._client._process
    assert process is not None
    return process.pid


def warm_block(num_bytes: int) -> Block:
    """A state, after the imports that creating an optimizer causes: they do not count."""
    block = Block(num_bytes)
    torch.optim.SGD(block.parameters(), lr=0.1)
    block.change()
    return block


def tenths(saves: int) -> list[int]:
    """How many saves each tenth has; the first has at least two."""
    first = max(2, saves // _PARTS)
    rest, parts = max(1, saves - first), _PARTS - 1
    sizes = [(index + 1) * rest // parts - index * rest // parts for index in range(parts)]
    return [first, *(size for size in sizes if size)]
