"""How arms are measured one beside the other: in which order, on which files, and if one fails."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from benchmarks.compare.measure import measure
from benchmarks.peers import Peer, Saver, Training
from benchmarks.peers.folders import InFolders
from benchmarks.peers.torch_files import TorchSave


def options(folder: Path, **others: object) -> argparse.Namespace:
    small = {"gib": 1e-5, "tensors": 2, "rounds": 1, "restores": 2, "iteration_s": 1e-4}
    return argparse.Namespace(**small, device="cpu", folder=str(folder), **others)


class Noted(InFolders):
    """``torch.save`` that notes what is asked of it, and what is there behind each."""

    def __init__(self, folder: Path, training: Training, *, said: list[str]) -> None:
        super().__init__(folder, TorchSave(training), sync=False)
        self._where, self._said = folder, said

    def boundary(self, *, save: bool) -> None:
        super().boundary(save=save)
        if save:
            self._say("save")

    def discard(self) -> None:
        super().discard()
        self._say("discard")

    def prepare_restore(self) -> None:
        self._say("prepare")

    def restore(self) -> None:
        super().restore()
        self._say("restore")

    def rest(self) -> None:
        self._say("rest")

    def close(self) -> None:
        super().close()
        self._say("close")

    def _say(self, what: str) -> None:
        self._said.append(f"{what} {len(list(self._where.glob('*/*')))}")


def peer(name: str, make: Callable[[Path, Training], Saver], *, like: str = "") -> Peer:
    return Peer(name, make, (), synced=True, restores_as=like)


def noted(name: str, said: list[str], *, like: str = "") -> Peer:
    return peer(name, partial(Noted, said=said), like=like)


def test_restores_follow_all_measured_saves_and_only_they_keep_checkpoints(
    tmp_path: Path,
) -> None:
    said: list[str] = []
    rounds, failed = measure([noted("one", said)], options(tmp_path))
    saved, restored = ["save 1", "discard 0"], ["prepare 1", "restore 1", "rest 1"]
    assert said == [*saved * 2, "save 1", *restored * 3, "close 1"]
    assert not failed
    assert all("held_s" in each["one"] for each in rounds[:2])
    assert [list(each["one"]) for each in rounds[2:]] == [
        ["warm_restore_s"],
        ["restore_s"],
        ["restore_s"],
    ]
    assert list(tmp_path.iterdir()) == []


class Breaks(Noted):
    """Fails at the given call."""

    def __init__(self, folder: Path, training: Training, *, said: list[str], at: str) -> None:
        self._at = at
        self._may("make")
        super().__init__(folder, training, said=said)

    def _may(self, what: str) -> None:
        if what == self._at:
            raise OSError("it is broken\nsomehow")

    def boundary(self, *, save: bool) -> None:
        super().boundary(save=save)
        if save:
            self._may("save")

    def restore(self) -> None:
        self._may("restore")
        super().restore()


@pytest.mark.parametrize("at", ["make", "save", "restore"])
def test_a_peer_that_fails_is_closed_and_out_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], at: str
) -> None:
    said: list[str] = []
    broken = peer("broken", partial(Breaks, said=said, at=at))
    rounds, failed = measure([broken, noted("one", [])], options(tmp_path))
    assert failed == {"broken": "OSError: it is broken"}
    assert "broken failed: OSError: it is broken\n" in capsys.readouterr().err
    assert all("broken" not in each for each in rounds)
    assert all("one" in each for each in rounds)
    assert len(rounds) == 5
    assert said[-1:] == ([] if at == "make" else ["close 1"])
    assert list(tmp_path.iterdir()) == []


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
