"""Damage, a failing disk and SIGKILL in the middle of a restore, between any two of its reads.

Until the last tensor is in its place, live objects may hold parts of a checkpoint that turns out
damaged. Then they end up with all of an older one, or with an error after which nothing goes on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import checkfreq
from checkfreq import CFCheckpoint, CFConfig, CFManager, CFMode, KeepLast, faults
from checkfreq.errors import (
    StateError,
    StorageError,
)
from checkfreq.store.store import CheckpointStore
from tests.state.support import state_bits

pytestmark = [pytest.mark.crash, pytest.mark.more]

SetFault = Callable[[str], None]
NAMES = ("model.safetensors", "optimizer.safetensors", "table.safetensors", "hooked.safetensors")


class Counter:
    """User code with a ``load_state_dict`` of its own, and a tensor that only it may set."""

    def __init__(self) -> None:
        self.total = torch.zeros(5)

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["total"].clone()


def build(seed: int) -> CFCheckpoint:
    """Large and small tensors, in places of every kind: live, new, owned, transposed, tied."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(700, 900), nn.Linear(900, 700), nn.BatchNorm1d(700))
    model[1].weight.data = model[1].weight.data.t().contiguous().t()
    hooked = nn.Linear(40, 40)
    hooked.register_load_state_dict_post_hook(lambda module, keys: None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return CFCheckpoint(
        model=model,
        hooked=hooked,
        optimizer=optimizer,
        counter=Counter(),
        table={"rows": torch.rand(600, 500), "seen": (seed,), "new": torch.rand(3)},
    )


def update(chk: CFCheckpoint) -> None:
    model, optimizer = chk.tracked["model"], chk.tracked["optimizer"]
    model(torch.randn(3, 700)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    chk.tracked["counter"].total = torch.rand(5)


def manager_of(chk_dir: Path, chk: CFCheckpoint, **config: Any) -> CFManager:
    settings = CFConfig(nice=0, **config)
    return CFManager(
        chk_dir, chk, mode=CFMode.MANUAL, chk_freq=0, retention=KeepLast(3), config=settings
    )


def written(chk_dir: Path) -> dict[int, Any]:
    """Two checkpoints, and the bits of each."""
    chk, found = build(0), {}
    with manager_of(chk_dir, chk) as manager:
        for step in (1, 2):
            update(chk)
            manager.step()
            manager.save(wait=True)
            found[step] = state_bits(chk)
    return found


def flip(chk_dir: Path, step: int, name: str, part: float) -> None:
    """Damage a byte of a tensor, at this part of the way through the file's tensors."""
    store = CheckpointStore(chk_dir)
    path, header = store.path(step) / name, store.manifest(step).file(name).header_bytes
    data = bytearray(path.read_bytes())
    data[header + int((len(data) - header - 1) * part)] ^= 1
    path.write_bytes(data)


def num_reads(chk_dir: Path, log: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many reads of payloads a restore takes."""
    monkeypatch.setenv("CHECKFREQ_FAULT_LOG", str(log))
    faults.reload()
    with manager_of(chk_dir, build(3)) as manager:
        monkeypatch.delenv("CHECKFREQ_FAULT_LOG")
        manager.restore()
        faults.reload()
    return log.read_text().split().count("restore.read")


@pytest.mark.parametrize("name", NAMES)
def test_damage_anywhere_in_a_tensor_gives_all_of_the_older_checkpoint(
    tmp_path: Path, name: str
) -> None:
    bits = written(tmp_path / "chk")
    flip(tmp_path / "chk", 2, name, 0.5)
    chk = build(3)
    with manager_of(tmp_path / "chk", chk) as manager:
        assert manager.restore()
        assert manager.global_step == 1
        assert state_bits(chk) == bits[1]
    chk = build(4)
    checkfreq.load(tmp_path / "chk", into=dict(chk.tracked))
    assert state_bits(chk) == bits[1]


@pytest.mark.parametrize(("lasts", "ends"), [("", ["restored"]), ("+", ["intact", "spoiled"])])
def test_a_disk_that_fails_at_any_read_leaves_objects_whole_or_spoiled_and_nothing_lost(
    lasts: str,
    ends: list[str],
    tmp_path: Path,
    fault_script: SetFault,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What fails once, while the worker opens the directory, is read again."""
    chk_dir = tmp_path / "chk"
    bits = written(chk_dir)
    count = num_reads(chk_dir, tmp_path / "points", monkeypatch)
    assert count > 6
    outcomes = [
        restored_despite(fault_script, chk_dir, f"{hit}{lasts}", bits[2])
        for hit in range(1, count + 1)
    ]
    assert outcomes == sorted(outcomes)
    assert sorted({*outcomes}) == ends
    chk = build(5)
    with manager_of(chk_dir, chk) as manager:
        assert manager.restore()
        assert manager.global_step == 2
        assert state_bits(chk) == bits[2]


def restored_despite(fault_script: SetFault, chk_dir: Path, hits: str, bits: Any) -> str:
    """How a restore ends of which some reads fail."""
    chk = build(3)
    before = state_bits(chk)
    with manager_of(chk_dir, chk) as manager:
        fault_script(f"restore.read:raise-EIO:{hits}")
        with contextlib.suppress(StorageError):
            manager.restore()
            fault_script("")
            assert state_bits(chk) == bits
            return "restored"
        fault_script("")
        is_intact = state_bits(chk) == before
        if manager._progress.spoiled:
            with pytest.raises(StateError, match="hold parts of step 2.*Start a new process"):
                manager.restore()
            return "spoiled"
        assert is_intact
        assert manager.restore()
        assert state_bits(chk) == bits
        return "intact"


def test_user_code_that_saw_a_damaged_checkpoint_is_undone_before_the_older_one(
    tmp_path: Path,
) -> None:
    written(tmp_path / "chk")
    flip(tmp_path / "chk", 2, "model.safetensors", 1.0)
    totals = []

    class Noting(Counter):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            super().load_state_dict(state)
            totals.append(self.total.tolist())

    chk = build(3)
    tracked = {**chk.tracked, "counter": Noting()}
    with manager_of(tmp_path / "chk", CFCheckpoint(**tracked)) as manager:
        manager.restore()
    newest, undone, older = totals
    assert undone == [0.0] * 5
    assert newest != older != undone


def test_an_older_checkpoint_without_what_the_damaged_one_wrote_is_an_error(tmp_path: Path) -> None:
    chk_dir = tmp_path / "chk"
    small, large = {"a": torch.zeros(3)}, {"a": torch.ones(3), "b": torch.ones(3)}
    for saved in (small, large):
        with manager_of(chk_dir, CFCheckpoint(rng=False, d=dict(saved))) as manager:
            manager.restore(only=())
            manager.step()
            manager.save(wait=True)
    flip(chk_dir, 2, "d.safetensors", 0.0)
    live = {"a": torch.full((3,), 5.0), "b": torch.full((3,), 5.0)}
    with (
        manager_of(chk_dir, CFCheckpoint(rng=False, d=live)) as manager,
        pytest.raises(
            StateError, match=r"step 1 does not hold d\.b; live objects hold parts of step"
        ),
    ):
        manager.restore()
