"""Threads that stream a checkpoint from disk onto a device, through one ring."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from checkfreq.errors import CorruptCheckpointError
from checkfreq.restore.device_target import DeviceTransfers
from checkfreq.restore.stream import Wanted, stream
from checkfreq.store.store import CheckpointStore
from tests.restore.device_filling import bytes_of, held, target_of
from tests.restore.shared_device import SharedDevice
from tests.restore.written import PAGE, commit_tensors, damage
from tests.snapshot.fake_device import FakeDevice

SIZES = {"large": 40 * PAGE + 8, "empty": 0, "small": 12, "turned": 30 * PAGE, "page": PAGE}
FILE = "model.safetensors"


def live_tensors(fake: FakeDevice) -> dict[str, Tensor]:
    made = {name: torch.zeros(size, dtype=torch.uint8) for name, size in SIZES.items()}
    made["turned"] = made["turned"].view(PAGE // 2, 60).t()
    made["large"] = made["large"].view(torch.float32)
    return {name: fake.tensor(tensor) for name, tensor in made.items()}


def committed(folder: Path, step: int, *, seed: int) -> dict[str, bytes]:
    """A checkpoint of random bytes; what it holds."""
    store = CheckpointStore(folder)
    store.open()
    saved = {name: bytes_of(size, seed=seed) for name, size in SIZES.items()}
    commit_tensors(store, step, {FILE: saved})
    return saved


def stream_onto(
    fake: FakeDevice,
    folder: Path,
    step: int,
    live: dict[str, Tensor],
    *,
    num_threads: int = 3,
    into_the_ring: bool = True,
) -> None:
    store = CheckpointStore(folder)
    file = store.manifest(step).files[0]
    with DeviceTransfers(
        fake, live.values(), read_bytes=PAGE, pause=lambda seconds: fake.run_one()
    ) as opened:
        wanted = [Wanted(file, one, target_of(opened, live[one.name])) for one in file.tensors]
        buffers = opened.ring if into_the_ring else None
        stream(store, step, wanted, num_threads=num_threads, read_bytes=PAGE, buffers=buffers)


@pytest.mark.parametrize(("num_threads", "into_the_ring"), [(1, True), (4, True), (4, False)])
@pytest.mark.parametrize("seed", range(2))
def test_every_tensor_arrives_on_the_device(
    tmp_path: Path, seed: int, num_threads: int, into_the_ring: bool
) -> None:
    saved = committed(tmp_path, 1, seed=seed)
    fake = SharedDevice(seed)
    live = live_tensors(fake)
    for tensor in live.values():
        fake.training_writes(tensor, 5)
    stream_onto(fake, tmp_path, 1, live, num_threads=num_threads, into_the_ring=into_the_ring)
    assert fake.registrations.num_bytes == 0
    assert {name: held(tensor) for name, tensor in live.items()} == saved


@pytest.mark.parametrize("fail_at", [None, 1, 2, 7, 20, 57])
def test_an_older_checkpoint_overwrites_what_damage_or_a_device_that_refuses_has_left(
    tmp_path: Path, fail_at: int | None
) -> None:
    saved = committed(tmp_path, 1, seed=1)
    committed(tmp_path, 2, seed=2)
    damage(CheckpointStore(tmp_path), 2, FILE, PAGE + 45 * PAGE)
    fake = SharedDevice(fail_at or 0)
    live = live_tensors(fake)
    fake.fail_at = fail_at
    error = CorruptCheckpointError if fail_at is None else RuntimeError
    with pytest.raises(error, match="digest|the device refuses"):
        stream_onto(fake, tmp_path, 2, live)
    assert fake.registrations.num_bytes == 0
    stream_onto(fake, tmp_path, 1, live)
    fake.run_all()
    assert {name: held(tensor) for name, tensor in live.items()} == saved
