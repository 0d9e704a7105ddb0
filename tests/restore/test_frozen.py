"""A fine-tune with a frozen base, from end to end: what is shared, and what damage does to it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import checkfreq
from checkfreq import CFCheckpoint, CFConfig, CFManager, CFMode, KeepLast
from checkfreq.cli import main
from checkfreq.formats import numpy_reader
from checkfreq.store.store import CheckpointStore
from tests.state.test_frozen import Adapted

FROZEN = "model.frozen.safetensors"


class FineTune:
    """A training with a frozen base, and its manager."""

    def __init__(self, chk_dir: Path, *, keep: int = 3, full_copy_every: int = 4) -> None:
        torch.manual_seed(0)
        self.model = Adapted()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.1)
        self.manager = CFManager(
            chk_dir,
            CFCheckpoint(model=self.model, optimizer=self.optimizer),
            mode=CFMode.MANUAL,
            chk_freq=1,
            retention=KeepLast(keep),
            config=CFConfig(full_copy_every=full_copy_every, keep_in_memory_s=0.0, nice=0),
        )

    def train(self, num_steps: int) -> dict[int, dict[str, Tensor]]:
        """The model's state at each step, every one of them durable."""
        states = {}
        for _ in range(num_steps):
            self.model(torch.randn(4, 600)).square().mean().backward()
            self.manager.weight_update()
            self.optimizer.zero_grad()
            self.manager.step()
            self.manager.wait()
            states[self.manager.global_step] = copied(self.model)
        return states


def copied(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def run(chk_dir: Path, num_steps: int, **options: int) -> dict[int, dict[str, Tensor]]:
    tuning = FineTune(chk_dir, **options)
    with tuning.manager as manager:
        manager.restore()
        return tuning.train(num_steps)


def linked_bytes(chk_dir: Path) -> list[int]:
    events = [json.loads(line) for line in (chk_dir / "events.jsonl").read_text().splitlines()]
    return [event["linked_bytes"] for event in events if event.get("kind") == "committed"]


def flip_a_bit(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1000, os.SEEK_END)
        (byte,) = file.read(1)
        file.seek(-1000, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


def test_the_frozen_base_is_written_once_and_every_step_restores_bit_for_bit(
    tmp_path: Path,
) -> None:
    states = run(tmp_path / "chk", 4, keep=9)
    store = CheckpointStore(tmp_path / "chk")
    assert {os.stat(store.path(step) / FROZEN).st_nlink for step in states} == {4}
    assert [found > 1 << 20 for found in linked_bytes(tmp_path / "chk")] == [False, *3 * [True]]
    tuning = FineTune(tmp_path / "chk")
    torch.nn.init.zeros_(tuning.model.base.weight)
    with tuning.manager as manager:
        assert manager.restore(2)
        assert same(copied(tuning.model), states[2])
    for step, state in states.items():
        alone = tmp_path / f"alone-{step}"
        shutil.copytree(store.path(step), alone / f"step-{step:08d}")
        assert main(["verify", str(alone)]) == 0
        assert same(checkfreq.load(alone)["model"], state)
    shutil.rmtree(store.path(1))  # the others do without
    assert main(["verify", str(tmp_path / "chk")]) == 0
    found = numpy_reader.open_checkpoint(tmp_path / "chk").tensors("model")
    assert found.keys() == states[4].keys()
    assert all(np.array_equal(found[key], value) for key, value in states[4].items())


def test_a_flipped_bit_in_a_shared_file_is_walked_back_from_to_the_copy_before(
    tmp_path: Path,
) -> None:
    chk_dir = tmp_path / "chk"
    states = run(chk_dir, 7, keep=2)  # 1 to 4 share a copy, 5 to 7 another one
    store = CheckpointStore(chk_dir)
    assert store.steps() == [4, 6, 7]
    flip_a_bit(store.path(7) / FROZEN)
    tuning = FineTune(chk_dir, keep=2)
    with tuning.manager as manager:
        assert manager.restore()
        assert manager.global_step == 4
        assert same(copied(tuning.model), states[4])
        manager.wait()
        tuning.train(2)
    aside = {name for name in os.listdir(chk_dir / "quarantine") if "." not in name}
    assert aside == {"step-00000006", "step-00000007"}
    assert store.steps() == [4, 5, 6]
    for step in store.steps():
        store.verify(step)


def test_what_is_written_to_frozen_layers_or_thawed_is_in_the_next_checkpoint(
    tmp_path: Path,
) -> None:
    """A layer that is thawed, and frozen again, lies in either file."""
    tuning = FineTune(tmp_path / "chk", keep=20, full_copy_every=20)
    states = {}
    with tuning.manager as manager:
        manager.restore()
        for write in (
            lambda base: base.weight.data.add_(1.0),
            lambda base: base.bias.add_(1.0),
            lambda base: setattr(base, "weight", torch.nn.Parameter(base.weight * 2.0, False)),
            lambda base: base.requires_grad_(True),
            lambda base: base.requires_grad_(False),
        ):
            states |= tuning.train(2)
            with torch.no_grad(), manager.updating():
                write(tuning.model.base)
        states |= tuning.train(2)
    for step, state in states.items():
        assert same(checkfreq.load(tmp_path / "chk", step=step)["model"], state), step
        assert (tmp_path / "chk" / f"step-{step:08d}" / FROZEN).exists() is (step not in (9, 10))


def test_the_number_of_steps_that_share_a_copy_is_bounded(tmp_path: Path) -> None:
    run(tmp_path / "chk", 3, keep=9, full_copy_every=2)
    links = [os.stat(path / FROZEN).st_nlink for path in (tmp_path / "chk").glob("step-*")]
    assert sorted(links) == [1, 2, 2]
