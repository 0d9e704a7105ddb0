"""How much host memory checkpointing takes, and whether it grows.

    python -m benchmarks.memory --mib 256 --saves 500

Changes a state of ``--mib`` and checkpoints it ``--saves`` times. One line: the trainer's growth
since before the manager was made (anonymous and shared pages, so the snapshot slots count), what
the worker has resident besides the slots, both against slots x state + 64 MiB, and how all of it
and the number of descriptors and threads grew from the first tenth of the saves to the end.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.record import emit, run
from benchmarks.states import Block, manual_manager
from checkfreq import CFManager

_MIB = 2**20
_ALLOWANCE_BYTES = 64 * _MIB


@dataclass(frozen=True)
class Usage:
    """What a process has resident, in bytes, and its descriptors and threads."""

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
    process = manager._persistence.persister._process
    assert process is not None
    return process.pid


def warm_block(num_bytes: int) -> Block:
    """A state; what making an optimizer imports is not held against checkpointing."""
    block = Block(num_bytes)
    torch.optim.SGD(block.parameters(), lr=0.1)
    block.change()
    return block


def save_once(manager: CFManager, block: Block) -> None:
    """One update and one durable checkpoint."""
    with manager.updating():
        block.change()
    manager.step()
    manager.save(wait=True)


def main() -> None:
    """Print one line."""
    args = _arguments()
    block = warm_block(int(args.mib * _MIB))
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="memory-") as scratch:
        before = Usage.of(os.getpid())
        with manual_manager(scratch, block) as manager:
            for _ in range(max(2, args.saves // 10)):
                save_once(manager, block)
            early = _usages(manager)
            for _ in range(args.saves - args.saves // 10):
                save_once(manager, block)
            late = _usages(manager)
            num_slots = len(manager._pipeline._arena.slots)
    _report(args, block, num_slots, before, early, late)


def _usages(manager: CFManager) -> tuple[Usage, Usage]:
    return Usage.of(os.getpid()), Usage.of(worker_pid(manager))


def _report(
    args: argparse.Namespace,
    block: Block,
    num_slots: int,
    before: Usage,
    early: tuple[Usage, Usage],
    late: tuple[Usage, Usage],
) -> None:
    trainer, worker = late
    trainer_bytes = trainer.anonymous + trainer.shared - before.anonymous - before.shared
    allowed_bytes = num_slots * block.state_bytes() + _ALLOWANCE_BYTES
    emit(
        "memory",
        mib=args.mib,
        saves=args.saves,
        num_slots=num_slots,
        trainer_growth_mib=_mib(trainer_bytes),
        worker_private_mib=_mib(worker.private),
        worker_anonymous_mib=_mib(worker.anonymous),
        total_mib=_mib(trainer_bytes + worker.private),
        allowed_mib=_mib(allowed_bytes),
        worker_allowed_mib=_mib(_ALLOWANCE_BYTES),
        trainer_grew_mib=_mib(trainer.anonymous - early[0].anonymous),
        worker_grew_mib=_mib(worker.anonymous - early[1].anonymous),
        fds_grew=trainer.num_fds + worker.num_fds - early[0].num_fds - early[1].num_fds,
        threads_grew=trainer.num_threads - early[0].num_threads,
    )


def _mib(num_bytes: int) -> float:
    return round(num_bytes / _MIB, 2)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--mib", type=float, default=256.0, help="size of the state")
    parser.add_argument("--saves", type=int, default=500, help="number of checkpoints")
    parser.add_argument("--folder", default=None, help="where to write (default: the system's)")
    return parser.parse_args()


if __name__ == "__main__":
    run(main)
