"""How long one checkpoint holds the training thread, and what it costs in all.

    python -m benchmarks.stall --gib 1 --checkpoints 12

Trains a multilayer perceptron whose parameters and momentum are ``--gib`` together, with a
batch large enough that forward and backward last longer than the copy. Every other iteration
takes a checkpoint (waited for between iterations, untimed, so that each is a fresh start).

held_ms: time in ``step()`` at a checkpoint, plus what its weight update took longer than one
without a checkpoint before it. added_ms: the whole iteration against the one before. Peers are
timed for as long as their call returns: torch.save and torch.distributed.checkpoint.async_save.
On a GPU the clock is read without synchronising for held_ms and after synchronising for added_ms.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from benchmarks.record import emit, run
from checkfreq import CFCheckpoint, CFManager, CFMode, KeepLast

_WIDTH = 4096


def main() -> None:
    """Print one line for checkfreq and one per peer."""
    args = _arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loop = Loop(int(args.gib * 2**30), batch=args.batch, device=device)
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="stall-") as scratch:
        times = run_checkfreq(loop, Path(scratch), checkpoints=args.checkpoints)
        peers = {
            name: run_peer(loop, save, Path(scratch), checkpoints=args.checkpoints)
            for name, save in (("torch.save", _torch_save), ("dcp.async_save", _dcp_async_save))
        }
    common = {
        "device": device.type,
        "gib": args.gib,
        "checkpoints": args.checkpoints,
        "iteration_ms": _ms(times.clean_s),
    }
    held_s = [step + max(0.0, late) for step, late in zip(times.step_s, times.late_s, strict=True)]
    emit(
        "stall",
        arm="checkfreq",
        **common,
        held_ms=_ms(held_s),
        step_ms=_ms(times.step_s),
        held_against_iteration=_ratio(held_s, times.clean_s),
        added_ms=_ms(times.added_s),
    )
    for name, held in peers.items():
        ratio = _ratio(held, times.clean_s)
        emit("stall", arm=name, **common, held_ms=_ms(held), held_against_iteration=ratio)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=1.0, help="parameters and momentum together")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--checkpoints", type=int, default=12)
    parser.add_argument("--folder", default=".", help="a folder on the disk to write to")
    return parser.parse_args()


def _ms(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 3)


def _ratio(seconds: list[float], clean_s: list[float]) -> float:
    return round(statistics.median(seconds) / statistics.median(clean_s), 4)


class Loop:
    """A training loop without a loader: the same batch every time."""

    def __init__(self, state_bytes: int, *, batch: int, device: torch.device) -> None:
        layers = max(1, round(state_bytes / 2 / 4 / _WIDTH**2))
        self.device = device
        self.model = nn.Sequential(
            *(nn.Linear(_WIDTH, _WIDTH, device=device) for _ in range(layers))
        )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6, momentum=0.9)
        self.batch = torch.randn(batch, _WIDTH, device=device)

    def backward(self) -> None:
        """Forward and backward."""
        self.optimizer.zero_grad(set_to_none=False)
        self.model(self.batch).square().mean().backward()

    def synchronize(self) -> None:
        """Wait for the device, if there is one to wait for."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


@dataclass
class Times:
    """Seconds, one value per checkpoint; ``clean_s`` per iteration without one."""

    clean_s: list[float] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)
    added_s: list[float] = field(default_factory=list)


def run_checkfreq(loop: Loop, scratch: Path, *, checkpoints: int) -> Times:
    """Alternate iterations without and with a checkpoint at the boundary before them."""
    times = Times()
    chk = CFCheckpoint(model=loop.model, optimizer=loop.optimizer)
    folder = scratch / "checkfreq"
    with CFManager(
        folder, chk, mode=CFMode.MANUAL, chk_freq=0, retention=KeepLast(1)
    ) as cf_manager:
        _iteration(loop, cf_manager, save=False)
        _iteration(loop, cf_manager, save=True)
        cf_manager.wait()
        for _ in range(checkpoints):
            clean = _iteration(loop, cf_manager, save=False)
            saved = _iteration(loop, cf_manager, save=True)
            cf_manager.wait()
            times.clean_s.append(clean.total_s)
            times.step_s.append(saved.boundary_s)
            times.late_s.append(saved.update_s - clean.update_s)
            times.added_s.append(saved.total_s - clean.total_s)
    return times


@dataclass(frozen=True)
class Iteration:
    """Seconds of the boundary, of the weight update and of everything together."""

    boundary_s: float
    update_s: float
    total_s: float


def _iteration(loop: Loop, cf_manager: CFManager, *, save: bool) -> Iteration:
    """A boundary, then forward, backward and update: what the snapshot overlaps with."""
    loop.synchronize()
    start_s = time.perf_counter()
    cf_manager.step()
    if save:
        cf_manager.save()
    boundary_s = time.perf_counter() - start_s
    loop.backward()
    update_start_s = time.perf_counter()
    cf_manager.weight_update()
    update_s = time.perf_counter() - update_start_s
    loop.synchronize()
    return Iteration(boundary_s, update_s, time.perf_counter() - start_s)


def run_peer(
    loop: Loop,
    save: Callable[[dict[str, object], Path], Callable[[], None]],
    scratch: Path,
    *,
    checkpoints: int,
) -> list[float]:
    """Seconds for which a peer's call holds the training thread."""
    held = []
    target = scratch / "peer"
    for _ in range(checkpoints + 1):
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        loop.backward()
        loop.optimizer.step()
        loop.synchronize()
        state = {"model": loop.model.state_dict(), "optimizer": loop.optimizer.state_dict()}
        start_s = time.perf_counter()
        wait = save(state, target)
        held.append(time.perf_counter() - start_s)
        wait()
    return held[1:]  # the first pays for start-up


def _torch_save(state: dict[str, object], target: Path) -> Callable[[], None]:
    torch.save(state, target / "state.pt")
    return lambda: None


def _dcp_async_save(state: dict[str, object], target: Path) -> Callable[[], None]:
    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    future = dcp.async_save(state, checkpoint_id=target)
    return lambda: (future.result(), None)[1]


if __name__ == "__main__":
    run(main)
