"""Ranks of one machine restore together: what all of them need is read from the disk once."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from checkfreq import CFCheckpoint, CFManager, CFMode, faults
from checkfreq.ranks.meetings import Meetings
from checkfreq.ranks.neighbours import SMALLEST_BYTES, shared_reads
from checkfreq.restore.buffers import MemoryTarget
from checkfreq.restore.stream import Wanted, stream
from checkfreq.store.store import CheckpointStore
from checkfreq.types import round_up_to_page
from tests.acceptance.ranks import Heard, Life, Rank, Ranks, run, run_well
from tests.patience import slowness
from tests.ranks import tiny
from tests.restore.written import Watched

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


def read_file(rank: Rank) -> None:
    """Read the shared file of step 1 with the other ranks; say which reads this one made."""
    ops = Watched(rank.chk_dir)
    store = CheckpointStore(rank.chk_dir, ops=ops)
    manifest = store.manifest(1)
    (file,) = (file for file in manifest.files if file.name == FILE)
    arrived = {tensor.name: bytearray(tensor.num_bytes) for tensor in file.tensors}
    wanted = [
        Wanted(file, tensor, MemoryTarget.of(memoryview(arrived[tensor.name])))
        for tensor in file.tensors
    ]
    meetings = Meetings.of_process_group(timeout_s=60.0 * slowness())
    with shared_reads(meetings, store, 1, [file]) as shared:
        assert shared is not None
        with shared.stage():
            stream(store, 1, wanted, shared=shared)
        meetings.act("the end", lambda: None)
    meetings.close()
    path = store.path(1) / FILE
    whole = path.read_bytes()
    right = all(arrived[t.name] == whole[t.offset : t.offset + t.num_bytes] for t in file.tensors)
    rank.send("read", ops.reads, right)


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


@pytest.mark.parametrize("world", [2])
def test_each_byte_of_a_file_that_all_ranks_need_is_read_once_in_all(
    world: int, saved: Callable[[int], Path]
) -> None:
    heard = [one.last("read") for one in run_well(Life(read_file, saved(2), world))]
    assert all(is_right for _, is_right in heard)
    reads = sorted(read for own, _ in heard for read in own)
    ends = [start + num_bytes for start, num_bytes in reads]
    assert [start for start, _ in reads] == [0, *ends[:-1]]  # without a gap, and nothing twice
    path = CheckpointStore(saved(2) / "chk").path(1) / FILE
    assert ends[-1] == round_up_to_page(path.stat().st_size)
    assert min(len(own) for own, _ in heard) >= len(reads) // world


@pytest.mark.parametrize("world", [3])
def test_a_restore_that_is_shared_brings_every_rank_the_saved_bits(
    world: int, saved: Callable[[int], Path], tmp_path: Path
) -> None:
    log = tmp_path / "points"
    heard = run_well(Life(load, saved(world), world, fault_log=log))
    assert [one.last("restored") for one in heard] == [(1, True)] * world
    passed = [
        line for rank in range(world) for line in Path(f"{log}-trainer-{rank}").read_text().split()
    ]
    shared = passed.count("restore.hand_on")
    assert passed.count("restore.take") == (world - 1) * shared
    assert {*faults.POINTS_OF_A_SHARED_READ} <= {*passed}


def flip(folder: Path, step: int, at: float) -> None:
    """Damage a byte of the shared file."""
    path = CheckpointStore(folder / "chk").path(step) / FILE
    data = bytearray(path.read_bytes())
    data[int(at * len(data))] ^= 1
    path.unlink()  # the file that it was copied from stays as it is
    path.write_bytes(data)


def test_damage_in_what_one_rank_reads_for_all_has_all_load_the_older_step(folder: Path) -> None:
    flip(folder, 1, 0.5)
    heard = run_well(Life(load, folder))
    assert [one.last("restored") for one in heard] == [(0, True)] * 2


def test_a_disk_that_fails_under_the_reading_rank_ends_the_restore_of_all(folder: Path) -> None:
    failing = Life(load, folder, trainer_faults={1: "restore.read:raise-EIO:6+"})
    for one in run(failing):
        assert one.failure is not None
        assert one.failure.kind == "StorageError"
        assert "rank 1: " in one.failure.text
    again = run_well(Life(load, folder, number=1))
    assert [one.last("restored") for one in again] == [(1, True)] * 2


# ---- a rank that is lost

#: Where a rank is lost: a fault point, and its pass; of meetings, counted back from the last one
#: before anything is read, in which the checkpoint is compared.
LOSSES = {
    "looking for neighbours": ("meeting.say", -2),
    "connecting": ("meeting.say", -1),
    "reading": ("restore.read", 6),
    "handing on": ("restore.hand_on", 1),
    "taking a later piece": ("restore.take", 9),
}

#: Each of them on one rank: rank 0 brings the memory.
LOST = [*zip(LOSSES, (2, 0, 2, 0, 2), strict=True)]


def num_meetings(folder: Path) -> int:
    """How often ranks meet before one of them reads anything."""
    log = folder / "points"
    run_well(Life(load, folder, 3, fault_log=log))
    passed = Path(f"{log}-trainer-0").read_text().split()
    return passed[: passed.index("restore.read")].count("meeting.say")


@pytest.fixture(scope="module")
def lost(
    saved: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[tuple[str, int], Future[list[Heard]]]]:
    """Every loss among three ranks, several at a time."""
    last = num_meetings(saved(3))

    def lose(point: str, hit: int, rank: int) -> list[Heard]:
        folder = copied(saved(3), tmp_path_factory.mktemp("lost"))
        script = f"{point}:kill-self:{hit if hit > 0 else last + hit}"
        settings = {"config": {"rank_timeout_s": 4.0 * slowness()}}
        return run(Life(load, folder, 3, 1, 1, settings, {rank: script}, store="agent"))

    with ThreadPoolExecutor(4) as pool:
        yield {(what, rank): pool.submit(lose, *LOSSES[what], rank) for what, rank in LOST}
        pool.shutdown(cancel_futures=True)


@pytest.mark.crash
@pytest.mark.parametrize(("what", "rank"), LOST)
def test_a_rank_killed_while_reads_are_shared_is_named_on_all_others(
    what: str, rank: int, lost: dict[tuple[str, int], Future[list[Heard]]]
) -> None:
    heard = lost[what, rank].result()
    assert heard[rank].exit_code == -signal.SIGKILL, heard
    for other in {0, 1, 2} - {rank}:
        require_named(heard[other], rank)


def require_named(heard: Heard, rank: int) -> None:
    """It failed because of that rank: a StateError if its state was half restored by then."""
    assert heard.failure is not None, heard
    assert heard.failure.kind in ("RankError", "StateError"), heard.failure.trace
    assert f"rank {rank} did not come within" in heard.failure.text


@pytest.mark.crash
@pytest.mark.parametrize("point", faults.POINTS_OF_A_SHARED_READ)
def test_a_rank_that_hangs_while_reads_are_shared_is_named_on_all_others(
    folder: Path, point: str
) -> None:
    gate = folder / "gate"
    hangs = Life(load, folder, trainer_faults={0: f"{point}:pause-{gate}"}, store="agent")
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


def answers(folder: Path, world: int, **settings: Any) -> list[bool]:
    heard = run_well(Life(ask_for_neighbours, folder, world, settings=settings))
    return [one.last("shares") for one in heard]


def test_ranks_share_beside_one_that_does_not(saved: Callable[[int], Path]) -> None:
    assert answers(saved(2), 3, large=[0, 2]) == [True, False, True]


def test_a_rank_that_cannot_listen_reads_for_itself_and_the_others_share(
    saved: Callable[[int], Path],
) -> None:
    assert answers(saved(2), 3, large=[0, 1, 2], deaf=1) == [True, False, True]


def test_ranks_with_directories_of_their_own_share_nothing(
    saved: Callable[[int], Path], tmp_path: Path
) -> None:
    for rank in range(2):
        copied(saved(2), tmp_path, f"chk-{rank}")
    assert answers(tmp_path, 2, large=[0, 1], local=True) == [False, False]
