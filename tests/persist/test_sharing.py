"""What a worker links instead of writing, against a plain copy of everything it was given."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from checkfreq import faults
from checkfreq.persist import protocol as p
from checkfreq.persist.commit import OpenDirectory, task_for
from checkfreq.persist.writer import RateLimiter, SnapshotWriter
from checkfreq.store.joint import JointStore
from checkfreq.types import FileSpec, Role
from tests.persist.conftest import file_image, request, round_up

FROZEN, TRAINED = "model.frozen.safetensors", "model.safetensors"
_FULL = 4
ALONE = Role()
#: Of two ranks that have a directory each: commits as a leader does, and waits for nobody.
LEADER = Role(0, 2, (0,))


class AlwaysHeld:
    """A lock that nobody takes away."""

    def is_held(self) -> bool:
        return True


class Site:
    """A worker's directory and one slot, whose frozen file can be filled with a letter."""

    def __init__(self, root: Path, *, full_copy_every: int = _FULL, role: Role = ALONE) -> None:
        self.store = JointStore(root)
        self.store.open()
        self.frozen, image = file_image(FROZEN, 0, {"base": 20_000})
        at = round_up(self.frozen.num_bytes)
        self.trained, other = file_image(TRAINED, at, {"adapter": 3_000})
        self.memory = mmap.mmap(-1, at + round_up(self.trained.num_bytes))
        self.memory[: len(image)] = image
        self.memory[at : at + len(other)] = other
        self.full_copy_every = full_copy_every
        self.role = role
        self.restart()

    def restart(self) -> None:
        """Another worker takes its place."""
        self.site = OpenDirectory(
            self.role,
            self.store,
            SnapshotWriter(num_threads=1, chunk_bytes=1 << 20, limiter=RateLimiter(None)),
            AlwaysHeld(),  # type: ignore[arg-type]
            slots={0: self.memory},
            layouts={0: (self.frozen, self.trained)},
            full_copy_every=self.full_copy_every,
        )

    def fill(self, file: FileSpec, letter: int) -> None:
        begin, end = file.slot_offset + file.header_bytes, file.slot_offset + file.num_bytes
        self.memory[begin:end] = bytes([letter]) * (end - begin)

    def persist(self, step: int, content: tuple[str, int]) -> p.Committed:
        self.fill(self.trained, step % 256)
        task = task_for(self.site, request(step, world=self.role.world, contents={FROZEN: content}))
        try:
            return task.run()
        except Exception as error:
            task.clean_up(error)
            raise

    def image(self, file: FileSpec) -> bytes:
        return self.memory[file.slot_offset : file.slot_offset + file.num_bytes]

    def path(self, step: int, name: str = FROZEN) -> Path:
        return self.store.path(step) / name


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "chk")


def linked(reply: p.Committed) -> bool:
    return reply.linked_bytes > 0


def test_the_same_contents_are_written_again_after_so_many_checkpoints(site: Site) -> None:
    replies = [site.persist(step, ("a", 0)) for step in range(1, 6)]
    assert [linked(one) for one in replies] == [False, True, True, True, False]
    assert [os.stat(site.path(step)).st_nlink for step in (1, 5)] == [4, 1]


def test_a_change_that_nobody_saw_is_written_and_warned_of(site: Site) -> None:
    for step in (1, 2):
        site.persist(step, ("a", 0))
    site.fill(site.frozen, 7)
    reply = site.persist(3, ("a", 1))
    assert not linked(reply)
    assert "changed although no write to it was seen" in reply.warning
    assert "from step 1 on" in reply.warning
    assert site.path(3).read_bytes() == site.image(site.frozen)


def test_another_worker_writes_everything_first_and_through_no_link_that_a_killed_one_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path / "chk", role=LEADER)
    for step in (1, 2):
        site.persist(step, ("a", 0))
    before = site.image(site.frozen)
    monkeypatch.setenv("CHECKFREQ_FAULT", "commit.write_manifest:raise-EIO")
    faults.reload()
    with pytest.raises(OSError, match="commit.write_manifest"):  # nothing is removed, as by a kill
        task_for(site.site, request(3, world=2, contents={FROZEN: ("a", 0)})).run()
    monkeypatch.delenv("CHECKFREQ_FAULT")
    faults.reload()
    site.restart()
    site.fill(site.frozen, 7)
    assert [linked(site.persist(step, ("b", 0))) for step in (3, 4)] == [False, True]
    assert site.path(3).read_bytes() == site.image(site.frozen) != before
    assert [site.path(step).read_bytes() for step in (1, 2)] == [before, before]


def test_after_a_quarantine_everything_is_written(site: Site) -> None:
    for step in (1, 2):
        site.persist(step, ("a", 0))
    site.site.maintain(p.Quarantine(2, "for a test"))
    assert [linked(site.persist(step, ("a", 0))) for step in (3, 4)] == [False, True]


def test_the_newest_step_with_another_copy_is_not_pruned(site: Site) -> None:
    for step in range(1, 8):
        site.persist(step, ("a", 0))
    assert site.site.maintain(p.Prune((1, 2, 3, 4, 5))) == (1, 2, 3, 5)
    assert site.store.steps() == [4, 6, 7]
    site.persist(8, ("a", 0))
    site.persist(9, ("a", 0))  # a full copy: 8 has the one before
    site.persist(10, ("a", 0))
    assert site.site.maintain(p.Prune((4, 6, 7, 8))) == (4, 6, 7)


@pytest.mark.parametrize(("seed", "role"), [(0, ALONE), (1, LEADER), (2, ALONE)])
def test_any_history_leaves_what_a_plain_copy_would(tmp_path: Path, seed: int, role: Role) -> None:
    chance = random.Random(seed)
    site = Site(tmp_path / "chk", full_copy_every=chance.choice([2, 3, 5]), role=role)
    plain: dict[int, tuple[bytes, bytes]] = {}
    series, number = 0, 0

    def change() -> None:
        nonlocal series
        site.fill(site.frozen, chance.randrange(256))
        series += 1

    def renew() -> None:
        nonlocal number
        number += 1

    def prune() -> None:
        doomed = tuple(step for step in plain if chance.random() < 0.5)
        for step in site.site.maintain(p.Prune(doomed)):
            del plain[step]

    def set_aside() -> None:
        if len(plain) > 1:
            step = chance.choice([*plain])
            site.site.maintain(p.Quarantine(step, "for a test"))
            del plain[step]

    def lose() -> None:
        if plain:
            (site.path(max(plain))).unlink()
            del plain[max(plain)]

    def fail() -> None:
        broken = site.site.layouts
        site.site.layouts = {0: (*broken[0], FileSpec("x.safetensors", 1 << 40, 9000, 4096, ()))}
        with pytest.raises(Exception):  # noqa: B017, PT011
            site.persist(1000, (f"{series}", number))
        site.site.layouts = broken

    events: list[Callable[[], None]] = [change, renew, prune, set_aside, site.restart, lose, fail]
    for step in range(1, 25):
        if chance.random() < 0.4:
            chance.choice(events)()
        site.persist(step, (f"{series}", number))
        plain[step] = site.image(site.frozen), site.image(site.trained)
        for there, images in plain.items():
            found = tuple(site.path(there, name).read_bytes() for name in (FROZEN, TRAINED))
            assert found == images, there
        inodes = [os.stat(site.path(there)).st_ino for there in plain]
        assert max(map(inodes.count, inodes)) <= site.full_copy_every
