"""How much host memory checkpointing takes, and whether it grows.

    python -m benchmarks.memory --mib 256 --saves 500

Changes a state of ``--mib`` and checkpoints it ``--saves`` times. One line: the growth of the
trainer since before the manager was made (anonymous and shared pages, so the snapshot slots count),
the resident memory of the worker besides the slots, both against slots x state + 64 MiB, and the
growth of all of it and of the number of descriptors and threads from the first tenth of the saves
to the end. ``low`` and ``high`` are the quartiles over the ends of the later tenths.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.lab.estimate import quartiles
from benchmarks.lab.record import emit
from benchmarks.lab.states import Block, manual_manager
from benchmarks.lab.usage import Usage, tenths, warm_block, worker_pid
from checkfreq import CFManager

_MIB = 2**20
_ALLOWANCE_BYTES = 64 * _MIB


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
            seen = [_usages(manager, block, count) for count in tenths(args.saves)]
            num_slots = len(manager._pipeline._arena.slots)
    _report(args, block, num_slots, before, seen)


def _usages(manager: CFManager, block: Block, saves: int) -> tuple[Usage, Usage]:
    """The usage of trainer and worker after that many more saves."""
    for _ in range(saves):
        save_once(manager, block)
    return Usage.of(os.getpid()), Usage.of(worker_pid(manager))


def _report(
    args: argparse.Namespace,
    block: Block,
    num_slots: int,
    before: Usage,
    seen: Sequence[tuple[Usage, Usage]],
) -> None:
    early, *later = seen
    trainer, worker = later[-1]
    trainer_bytes = _growth(before, trainer)
    allowed_bytes = num_slots * block.state_bytes() + _ALLOWANCE_BYTES
    emit(
        "memory",
        folder=Path(args.folder),
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
        **_spread(before, later),
    )


def _growth(before: Usage, trainer: Usage) -> int:
    return trainer.anonymous + trainer.shared - before.anonymous - before.shared


def _spread(before: Usage, later: Sequence[tuple[Usage, Usage]]) -> dict[str, dict[str, float]]:
    values = {
        "total_mib": [_growth(before, trainer) + worker.private for trainer, worker in later],
        "worker_private_mib": [worker.private for _, worker in later],
    }
    limits = {name: quartiles(each) for name, each in values.items()}
    return {
        "low": {name: _mib(low) for name, (low, _) in limits.items()},
        "high": {name: _mib(high) for name, (_, high) in limits.items()},
    }


def _mib(num_bytes: float) -> float:
    return round(num_bytes / _MIB, 2)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--mib", type=float, default=256.0, help="size of the state")
    parser.add_argument("--saves", type=int, default=500, help="number of checkpoints")
    parser.add_argument("--folder", default=".", help="a folder on the disk to write to")
    return parser.parse_args()
