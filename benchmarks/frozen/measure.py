"""What a checkpoint of a fine-tune costs: a frozen base that is large, and a small trained part.

    python -m benchmarks.frozen --frozen-mib 1024 --trained-mib 10

Three arms in turn, ``--rounds`` times: the trained part alone; with the base, of which each
checkpoint but the first shares the file; and with the base written each time
(``full_copy_every=1``). Each takes ``--saves`` durable checkpoints. Per arm one line: the medians
over all checkpoints but the first of what the worker wrote (``write_bytes`` in /proc) and of the
seconds from the request until the checkpoint is durable, and their ratios to those of the trained
part alone, each in the same round.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from benchmarks.lab.record import emit, median_ratio
from benchmarks.lab.states import Block
from benchmarks.lab.usage import worker_pid
from checkfreq import CFCheckpoint, CFConfig, CFManager, CFMode, KeepLast

_MIB = 2**20
ALONE, SHARED, WRITTEN = (
    "trained part alone",
    "with the frozen base",
    "with the frozen base, each written",
)


class FineTune(nn.Module):
    """A frozen block, if any, and a trained one."""

    def __init__(self, frozen: Block | None, trained: Block) -> None:
        super().__init__()
        self.frozen = frozen
        self.trained = trained


def main() -> None:
    """Print a line per arm."""
    args = _arguments()
    trained = Block(int(args.trained_mib * _MIB), num_tensors=16)
    base = Block(int(args.frozen_mib * _MIB)).requires_grad_(False)
    arms = {ALONE: (None, 20), SHARED: (base, 20), WRITTEN: (base, 1)}
    found: dict[str, list[tuple[float, float]]] = {arm: [] for arm in arms}
    for _ in range(args.rounds):
        for arm, (frozen, every) in arms.items():
            model = FineTune(frozen, trained)
            found[arm].append(_costs(args, model, full_copy_every=every))
    for arm, costs in found.items():
        written, durable_s = zip(*costs, strict=True)
        base_written, base_s = zip(*found[ALONE], strict=True)
        emit(
            "frozen",
            folder=Path(args.folder),
            arm=arm,
            frozen_mib=args.frozen_mib,
            trained_mib=args.trained_mib,
            saves=args.saves,
            rounds=args.rounds,
            written_mib=statistics.median(written) / _MIB,
            durable_s=statistics.median(durable_s),
            bytes_ratio=median_ratio(written, base_written),
            time_ratio=median_ratio(durable_s, base_s),
        )


def _costs(
    args: argparse.Namespace, model: FineTune, *, full_copy_every: int
) -> tuple[float, float]:
    """Bytes and seconds of a checkpoint after the first, both medians."""
    optimizer = torch.optim.SGD(model.trained.parameters(), lr=0.1)
    with (
        tempfile.TemporaryDirectory(dir=args.folder, prefix="frozen-") as scratch,
        CFManager(
            scratch,
            CFCheckpoint(model=model, optimizer=optimizer),
            mode=CFMode.MANUAL,
            chk_freq=0,
            retention=KeepLast(2),
            config=CFConfig(full_copy_every=full_copy_every, keep_in_memory_s=0),
        ) as manager,
    ):
        taken = [_save(manager, model) for _ in range(args.saves)]
    written, seconds = zip(*taken[1:], strict=True)
    return statistics.median(written), statistics.median(seconds)


def _save(manager: CFManager, model: FineTune) -> tuple[int, float]:
    """Bytes that the worker wrote, and seconds, of one durable checkpoint."""
    with manager.updating():
        model.trained.change()
    manager.step()
    pid, start_s = worker_pid(manager), time.perf_counter()
    before = _written_by(pid)
    manager.save(wait=True)
    seconds = time.perf_counter() - start_s
    return _written_by(pid) - before, seconds


def _written_by(pid: int) -> int:
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["write_bytes"])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--frozen-mib", type=float, default=1024.0, help="size of the base")
    parser.add_argument("--trained-mib", type=float, default=10.0, help="size of the rest")
    parser.add_argument("--saves", type=int, default=12, help="checkpoints in each round")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of all arms")
    parser.add_argument("--folder", default=".", help="a folder on the disk to write to")
    args = parser.parse_args()
    if args.saves < 2:
        parser.error("--saves: expected at least 2: the first has nothing to share")
    return args
