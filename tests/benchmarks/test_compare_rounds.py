"""How arms are measured one beside the other: in which order, on which files, and if one fails."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from benchmarks.compare.measure import measure
from benchmarks.peers import Peer, Saver, Training
from benchmarks.peers.folders import InFolders
from benchmarks.peers.torch_files import TorchSave


def options(folder: Path, **others: object) -> argparse.Namespace:
    small = {"gib": 1e-5, "tensors": 2, "rounds": 1, "restores": 2, "iteration_s": 1e-4}
    return argparse.Namespace(**small, device="cpu", folder=str(folder), **others)


def peer(name: str, make: Callable[[Path, Training], Saver], *, like: str = "") -> Peer:
    return Peer(name, make, (), synced=True, restores_as=like)


class Forgets(TorchSave):
    """Brings everything back but a moment of the last parameter."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._live = training

    def load(self, folder: Path) -> None:
        super().load(folder)
        *_, last = self._live.model.parameters()
        self._live.optimizer.state[last]["exp_avg_sq"][-1] += 1.0


def test_an_arm_that_restores_a_different_state_has_failed(tmp_path: Path) -> None:
    def make(folder: Path, training: Training) -> Saver:
        return InFolders(folder, Forgets(training), sync=False)

    _, failed = measure([peer("one", make)], options(tmp_path))
    assert failed == {"one": "ValueError: the restored state differs from the saved one"}
