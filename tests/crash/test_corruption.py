"""Every way to damage a small checkpoint is noticed, or provably changes nothing."""

from __future__ import annotations

import logging
import os
import random
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import checkfreq
from checkfreq import CFCheckpoint, CFConfig, CFManager, CFMode
from checkfreq.restore.restorer import Restorer
from tests.restore.whole import contents

pytestmark = pytest.mark.crash

OLD_STEP, NEW_STEP = 1, 2


def build() -> CFCheckpoint:
    """The smallest state that has two files and most kinds of manifest entries."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    extra = {"best": float("inf"), 3: ("a", b"b")}
    return CFCheckpoint(rng=False, model=model, optimizer=optimizer, extra=extra)


def update(chk: CFCheckpoint) -> None:
    model, optimizer = chk.tracked["model"], chk.tracked["optimizer"]
    optimizer.zero_grad()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def manager_of(chk_dir: Path, chk: CFCheckpoint) -> CFManager:
    return CFManager(chk_dir, chk, mode=CFMode.MANUAL, chk_freq=1, config=CFConfig(nice=0))


class Reader:
    """Reads the newest valid checkpoint without a worker."""

    def __init__(self, chk_dir: Path) -> None:
        self._restorer = Restorer(chk_dir, num_threads=1)

    def read(self, step: int | None = None) -> tuple[int, list[tuple[str, bytes]], object]:
        """The step found, and everything that a restore would use of it."""
        done = self._restorer.find(step, contents)
        assert done is not None
        found, files = done
        return found.step, sorted(files.items()), found.manifest.objects


@dataclass
class Sound:
    """A directory with two checkpoints, and what reading each of them gives."""

    chk_dir: Path
    by_step: dict[int, object]

    @property
    def newest(self) -> Path:
        return self.chk_dir / f"step-{NEW_STEP:08d}"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Sound:
    chk_dir = tmp_path_factory.mktemp("corruption") / "chk"
    chk = build()
    with manager_of(chk_dir, chk) as manager:
        for _ in range(2):
            update(chk)
            manager.step()
            manager.wait()
    reader = Reader(chk_dir)
    return Sound(chk_dir, {step: reader.read(step) for step in (OLD_STEP, NEW_STEP)})


def expect_noticed_or_harmless(reader: Reader, sound: Sound, what: str) -> bool:
    """True if the damage was noticed and walked past; any error fails the test."""
    found = reader.read()
    assert found == sound.by_step[found[0]], f"{what}: restored something that was never saved"
    return found[0] == OLD_STEP


@pytest.fixture
def damaged(sound: Sound, tmp_path: Path) -> Sound:
    """A copy to be damaged."""
    shutil.copytree(sound.chk_dir, tmp_path / "chk")
    return Sound(tmp_path / "chk", sound.by_step)


def telling_places(data: bytes) -> list[int]:
    """Every offset in a file; of long runs of one byte (padding) the edges and a few."""
    places, start = [], 0
    for run in re.finditer(rb"(.)\1{64,}", data, re.DOTALL):
        places += [*range(start, run.start() + 8), *range(run.start() + 8, run.end() - 8, 97)]
        start = run.end() - 8
    return [*places, *range(start, len(data))]


#: Of the places in a file: all, or a few quickly.
EVERY = pytest.mark.parametrize("every", [29, pytest.param(1, marks=pytest.mark.more)])
NAMES = pytest.mark.parametrize("name", ["manifest.json", "model.safetensors"])


@EVERY
@NAMES
def test_one_flipped_bit_in_any_byte_is_noticed(name: str, every: int, damaged: Sound) -> None:
    bits = random.Random(name)
    path, reader = damaged.newest / name, Reader(damaged.chk_dir)
    data = path.read_bytes()
    fd = os.open(path, os.O_WRONLY)
    for index in telling_places(data)[::every]:
        byte, bit = data[index], bits.randrange(8)
        os.pwrite(fd, bytes([byte ^ 1 << bit]), index)
        what = f"bit {bit} of byte {index} of {name}"
        assert expect_noticed_or_harmless(reader, damaged, what), f"{what} was not noticed"
        os.pwrite(fd, bytes([byte]), index)
    os.close(fd)
    assert reader.read() == damaged.by_step[NEW_STEP]


@EVERY
@NAMES
def test_a_file_cut_at_any_length_is_noticed(name: str, every: int, damaged: Sound) -> None:
    path, reader = damaged.newest / name, Reader(damaged.chk_dir)
    for length in telling_places(path.read_bytes())[::-every]:
        os.truncate(path, length)
        what = f"{name} cut to {length} bytes"
        assert expect_noticed_or_harmless(reader, damaged, what), f"{what} was not noticed"


def test_files_exchanged_between_steps_are_noticed(damaged: Sound) -> None:
    old = damaged.chk_dir / f"step-{OLD_STEP:08d}"
    for path in sorted(damaged.newest.iterdir()):
        data = path.read_bytes()
        path.write_bytes((old / path.name).read_bytes())
        assert expect_noticed_or_harmless(Reader(damaged.chk_dir), damaged, str(path))
        path.write_bytes(data)


@pytest.mark.parametrize("damage", ["deleted", "garbled"])
def test_files_beside_the_checkpoints_are_conveniences(damage: str, damaged: Sound) -> None:
    for name in ("latest", "marks.jsonl", "events.jsonl", ".lock"):
        path = damaged.chk_dir / name
        path.write_bytes(random.Random(name).randbytes(500))
        if damage == "deleted":
            path.unlink()
    chk = build()
    with manager_of(damaged.chk_dir, chk) as manager:
        assert manager.restore()
        assert manager.global_step == NEW_STEP
        update(chk)
        manager.step()
        manager.save(keep=True)
    assert checkfreq.load(damaged.chk_dir, step=3)


@pytest.fixture(autouse=True)
def _caplog_stays_small(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
