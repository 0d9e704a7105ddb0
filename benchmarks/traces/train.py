"""A training that records its trace: a child process of ``benchmarks.traces record``.

A network of ``--layers`` square layers, under AUTO with ``record_trace``. It trains until
``--seconds`` have passed or ``--most`` iterations were done.
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from checkfreq import CFCheckpoint, CFConfig, CFManager, CFMode, KeepLast

_SAMPLES = 1 << 20


class Prepared(Dataset[torch.Tensor]):
    """Samples of ``width`` numbers that take ``seconds`` of a core's time each to prepare."""

    def __init__(self, width: int, seconds: float) -> None:
        self._width = width
        self._seconds = seconds

    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        until_s = time.thread_time() + self._seconds
        while time.thread_time() < until_s:
            sum(range(1000))
        return torch.full((self._width,), index / _SAMPLES)


def main() -> None:
    """Train, and leave ``trace.jsonl`` in the folder."""
    args = _arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        torch.distributed.init_process_group("gloo")
    model = nn.Sequential(*(nn.Linear(args.width, args.width) for _ in range(args.layers)))
    optimizer = torch.optim.AdamW(model.parameters())
    net = nn.parallel.DistributedDataParallel(model) if ranks > 1 else model
    manager = CFManager(
        args.folder,
        CFCheckpoint(model=model, optimizer=optimizer),
        mode=CFMode.AUTO,
        retention=KeepLast(1),
        config=CFConfig(
            stop_signals=(), record_trace=True, max_write_bytes_per_s=args.write_bytes_per_s
        ),
    )
    batches = _batches(args)
    with manager:
        began_s, is_over = time.monotonic(), torch.zeros(1)
        for step in range(args.most):
            for _ in range(args.accumulate):
                net(next(batches)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if args.evaluate_every and step % args.evaluate_every == 0:
                _evaluate(net, next(batches), times=args.evaluations)
            is_over[0] = time.monotonic() - began_s > args.seconds
            if ranks > 1:  # rank 0 decides
                torch.distributed.broadcast(is_over, 0)
            manager.step()
            if is_over:
                break
    if ranks > 1:
        torch.distributed.destroy_process_group()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--most", type=int, default=6000, help="iterations")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--accumulate", type=int, default=1, help="batches of an iteration")
    parser.add_argument("--loader-s", type=float, default=0.0, help="a core's time per sample")
    parser.add_argument("--evaluate-every", type=int, default=0, help="iterations")
    parser.add_argument("--evaluations", type=int, default=3, help="batches of an evaluation")
    parser.add_argument("--write-bytes-per-s", type=int, help="limit of the worker's writes")
    return parser.parse_args()


def _batches(args: argparse.Namespace) -> Iterator[torch.Tensor]:
    if not args.loader_s:
        return itertools.repeat(torch.randn(args.batch, args.width))
    samples = Prepared(args.width, args.loader_s)
    return iter(DataLoader(samples, batch_size=args.batch, num_workers=1))


def _evaluate(net: nn.Module, batch: torch.Tensor, *, times: int) -> None:
    with torch.no_grad():
        for _ in range(times):
            net(batch)


if __name__ == "__main__":
    main()
