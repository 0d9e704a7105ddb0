"""Time to durable: how fast a state becomes a synced checkpoint, beside the disk and peers.

    python -m benchmarks.persist --gib 1 --rounds 5 --folder /mnt/disk/scratch

Arms run interleaved in random order on one disk; ratios are taken within a round. ``raw`` is a
direct write of the same number of bytes with the same threads. ``checkfreq`` counts from the
complete snapshot to the committed checkpoint, which is what training never waits for;
``checkfreq_call`` is ``save(wait=True)``, snapshot included. Peers are timed from the call to
their data being synced; where a peer does not sync, its files are synced after it.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from benchmarks.rawio import raw_write
from benchmarks.states import Block, manual_manager
from benchmarks.throughput import Arm, Seconds, interleaved, report


def measure(scratch: Path, num_bytes: int, rounds: int) -> Seconds:
    """Seconds of every arm, a value per round."""
    block = Block(num_bytes)
    manager = manual_manager(str(scratch / "chk"), block)
    arms: list[Arm] = [
        lambda: {"raw": _raw(scratch, num_bytes)},
        lambda: _checkfreq(manager, block, scratch),
        lambda: {"torch.save": _timed(scratch, lambda to: _torch_save(block, to))},
        lambda: {"safetensors": _timed(scratch, lambda to: _safetensors(block, to))},
        lambda: {"dcp.save": _timed(scratch, lambda to: _dcp_save(block, to))},
        lambda: {"dcp.async_save": _timed(scratch, lambda to: _dcp_async_save(block, to))},
    ]
    _join_alone()
    _checkfreq(manager, block, scratch)  # start-up: arena and worker
    seconds = interleaved(arms, rounds=rounds)
    manager.close()
    torch.distributed.destroy_process_group()
    return seconds


def _raw(scratch: Path, num_bytes: int) -> float:
    return num_bytes / raw_write(scratch, num_bytes=num_bytes, rounds=1).bytes_per_s


def _checkfreq(manager: Any, block: Block, scratch: Path) -> dict[str, float]:
    with manager.updating():
        block.change()
    manager.step()
    start_s = time.perf_counter()
    manager.save(wait=True)
    call_s = time.perf_counter() - start_s
    manager.wait()
    lines = (scratch / "chk" / "events.jsonl").read_text().splitlines()
    commits = [event for event in map(json.loads, lines) if event["kind"] == "committed"]
    return {"checkfreq": commits[-1]["persist_s"], "checkfreq_call": call_s}


def _timed(scratch: Path, save: Callable[[Path], None]) -> float:
    target = scratch / "peer"
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    start_s = time.perf_counter()
    save(target)
    seconds = time.perf_counter() - start_s
    shutil.rmtree(target)
    return seconds


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def _torch_save(block: Block, target: Path) -> None:
    torch.save(block.state_dict(), target / "model.pt")
    _sync(target / "model.pt")


def _safetensors(block: Block, target: Path) -> None:
    save_file(block.state_dict(), target / "model.safetensors")
    _sync(target / "model.safetensors")


def _dcp_save(block: Block, target: Path) -> None:
    dcp.save(block.state_dict(), checkpoint_id=target)  # syncs its files itself


def _dcp_async_save(block: Block, target: Path) -> None:
    dcp.async_save(block.state_dict(), checkpoint_id=target).result()


def _join_alone() -> None:
    """torch.distributed.checkpoint's async_save wants a process group: one of one."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)


if __name__ == "__main__":
    report("persist", __doc__.splitlines()[0], measure, baselines={"raw": "raw"})
