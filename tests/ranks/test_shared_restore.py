"""Ranks of one machine restore together: what all of them need is read from the disk once."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from checkfreq import CFCheckpoint, CFManager, CFMode, faults
from checkfreq.ranks.meetings import Meetings
from checkfreq.ranks.neighbours import SMALLEST_BYTES, shared_reads
from checkfreq.store.store import CheckpointStore
from tests.acceptance.ranks import Heard, Life, Rank, Ranks, run, run_well
from tests.patience import slowness
from tests.ranks import tiny

pytestmark = [pytest.mark.dist, pytest.mark.more]

NUM_TENSORS = 8
ELEMENTS = SMALLEST_BYTES // 4 // NUM_TENSORS
FILE = "table.safetensors"


def table(seed: int | None) -> dict[str, torch.Tensor]:
    """State that is the same on all ranks, large enough to be shared; zeros without a seed."""
    generator = torch.Generator().manual_seed(seed or 0)
    made = {f"t{n}": torch.zeros(ELEMENTS) for n in range(NUM_TENSORS)}
    if seed is not None:
        for tensor in made.values():
            tensor.uniform_(generator=generator)
    return made


def managed(rank: Rank, tracked: dict[str, torch.Tensor]) -> CFManager:
    own = {"number": torch.full((3,), float(rank.rank))}
    chk = CFCheckpoint(table=tracked, own=own, per_rank=("own",))
    return CFManager(rank.chk_dir, chk, mode=CFMode.MANUAL, chk_freq=0, config=tiny.config(rank))


def save(rank: Rank) -> None:
    """Steps 0 and 1, of other values each."""
    tracked = table(0)
    with managed(rank, tracked) as manager:
        manager.save(wait=True)
        with manager.updating():
            for name, tensor in table(1).items():
                tracked[name].copy_(tensor)
        manager.step()
        manager.save(wait=True)


def load(rank: Rank) -> None:
    """Restore; say which step it was, and whether it arrived."""
    rank.arm_trainer()
    tracked = table(None)
    with managed(rank, tracked) as manager:
        assert manager.restore()
        step = manager.global_step
    expected = table(step)
    right = all(torch.equal(tracked[name], expected[name]) for name in expected)
    rank.send("restored", step, right)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The folder of a run of so many ranks that saved."""

    @cache
    def make(world: int) -> Path:
        folder = tmp_path_factory.mktemp(f"saved-{world}")
        run_well(Life(save, folder, world))
        return folder

    return make


@pytest.fixture
def folder(saved: Callable[[int], Path], tmp_path: Path) -> Path:
    """A copy of what two ranks saved."""
    return copied(saved(2), tmp_path)


def copied(source: Path, folder: Path, name: str = "chk") -> Path:
    """A copy of a run's directory in ``folder``; payloads, which nobody changes, are the same."""
    shutil.copytree(source / "chk", folder / name, copy_function=_copy)
    return folder


def _copy(source: str, target: str) -> None:
    (os.link if source.endswith(".safetensors") else shutil.copy2)(source, target)


def test_a_restore_that_is_shared_reads_once_and_brings_every_rank_the_saved_bits(
    saved: Callable[[int], Path], tmp_path: Path
) -> None:
    world, log = 3, tmp_path / "points"
    heard = run_well(Life(load, saved(world), world, fault_log=log))
    assert [one.last("restored") for one in heard] == [(1, True)] * world
    passed = [
        line for rank in range(world) for line in Path(f"{log}-trainer-{rank}").read_text().split()
    ]
    shared = passed.count("restore.hand_on")
    assert passed.count("restore.take") == (world - 1) * shared
    assert passed.count("restore.read") == shared + 2 * world  # and each rank its own
    assert {*faults.POINTS_OF_A_SHARED_READ} <= {*passed}


# ---- a rank that is lost


@pytest.mark.crash
@pytest.mark.parametrize(("script", "lost"), [("hand_on:kill-self:1", 0), ("take:kill-self:9", 2)])
def test_a_rank_killed_while_reads_are_shared_is_named_on_all_others(
    script: str, lost: int, saved: Callable[[int], Path], tmp_path: Path
) -> None:
    copied(saved(3), tmp_path)
    settings = {"config": {"rank_timeout_s": 4.0 * slowness()}}
    scripts = {lost: f"restore.{script}"}
    heard = run(Life(load, tmp_path, 3, 1, 1, settings, scripts, store="agent"))
    assert heard[lost].exit_code == -signal.SIGKILL, heard
    for other in {0, 1, 2} - {lost}:
        require_named(heard[other], lost)


def require_named(heard: Heard, rank: int) -> None:
    """It failed because of that rank: a StateError if its state was half restored by then."""
    assert heard.failure is not None, heard
    assert heard.failure.kind in ("RankError", "StateError"), heard.failure.trace
    assert f"rank {rank} did not come within" in heard.failure.text


@pytest.mark.crash
def test_a_rank_that_hangs_while_reads_are_shared_is_named_on_all_others(folder: Path) -> None:
    gate = folder / "gate"
    hangs = Life(load, folder, trainer_faults={0: f"restore.take:pause-{gate}"}, store="agent")
    hangs = replace(hangs, settings={"config": {"rank_timeout_s": 4.0 * slowness()}})
    with Ranks(hangs) as ranks:
        ranks.read_until(lambda: ranks.heard[1].failure is not None)
        assert ranks.heard[0].failure is None
        gate.touch()
        ranks.kill([0])
        ranks.finish()
        require_named(ranks.heard[1], 0)


# ---- who shares


def ask_for_neighbours(rank: Rank) -> None:
    """Say whether reads of some bytes would be shared."""
    store = CheckpointStore(rank.chk_dir)
    manifest = store.manifest(1)
    meetings = Meetings.of_process_group(timeout_s=60.0 * slowness())
    files = manifest.files if rank.rank in rank.settings["large"] else manifest.files[:0]
    with contextlib.ExitStack() as stack:
        if rank.rank == rank.settings.get("deaf"):
            taken = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            taken.bind(f"\0{meetings.name}/{rank.rank}")
        shared = stack.enter_context(shared_reads(meetings, store, 1, files))
        rank.send("shares", shared is not None)
    meetings.close()


@pytest.mark.parametrize(
    ("settings", "shares"),
    [
        ({"large": [0, 2]}, [True, False, True]),
        ({"large": [0, 1, 2], "deaf": 1}, [True, False, True]),
        ({"large": [0, 1], "local": True}, [False, False]),
    ],
    ids=["one needs nothing", "one cannot listen", "a directory for each rank"],
)
def test_ranks_share_beside_one_that_does_not(
    settings: dict[str, Any], shares: list[bool], saved: Callable[[int], Path], tmp_path: Path
) -> None:
    for name in ("chk", "chk-0", "chk-1"):
        copied(saved(2), tmp_path, name)
    heard = run_well(Life(ask_for_neighbours, tmp_path, len(shares), settings=settings))
    assert [one.last("shares") for one in heard] == shares
