"""Every peer restores the bits that it saved; a synced one has synced what it calls durable."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.peers import OURS, PEERS, Peer, Saver, Training, installed
from tests.fork_server import FORK_SERVER

LIMIT_S = 400.0
#: What syncs in a process of its own.
ELSEWHERE = {OURS, "dcp.async_save, process", "dcp.async_save, process, aside"}


def tiny() -> Training:
    """Parameters, buffers of several types, AdamW with two groups."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.5}]
    return Training(model, torch.optim.AdamW(groups, lr=0.1))


def train(training: Training, saver: Saver, *, waits: bool) -> None:
    """An iteration behind a boundary. ``waits``: the copy ends before the forward pass.

    A staging aside that goes on meanwhile is torn: the pass changes batch norm's buffers.
    """
    if waits:
        with saver.updating():
            pass
    training.model(torch.randn(5, 8)).square().sum().backward()
    with saver.updating():
        training.optimizer.step()
    training.optimizer.zero_grad()


def copied(value: Any) -> Any:
    """As it is now."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: copied(each) for key, each in value.items()}
    return [copied(each) for each in value] if isinstance(value, list | tuple) else value


def same(one: Any, other: Any) -> bool:
    """Bit for bit; a list is as good as a tuple."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def tried(peer: Peer, folder: Path, synced: set[int]) -> dict[str, Any]:
    """Save twice and restore; ``synced`` collects the inodes that this process syncs."""
    training, waits = tiny(), bool(peer.note)
    saver = peer.make(folder, training)
    for _ in range(2):
        saver.boundary(save=False)
        train(training, saver, waits=waits)
        synced.clear()
        saver.boundary(save=True)
        want = copied(training.state())
        train(training, saver, waits=waits)
        while not saver.is_durable():
            saver.boundary(save=False)
            train(training, saver, waits=waits)
        before = set(synced)
        saved = saver.finish()
    inodes = [path.stat().st_ino for path in saver.files()]
    changed = not same(want["model"], training.state()["model"])
    saver.prepare_restore()
    saver.restore()
    got = copied(training.state())
    saver.boundary(save=False)
    train(training, saver, waits=waits)
    saver.close()
    return {
        "changed": changed,
        "model": same(want["model"], got["model"]),
        "optimizer": same(want["optimizer"], got["optimizer"]),
        "durable_s": saved.durable_s,
        "files": len(inodes),
        "synced": sum(inode in before for inode in inodes),
    }


def try_all(names: list[str], folder: Path, results: Path) -> None:
    """Entry point of a process: what became of each, as JSON."""
    multiprocessing.set_start_method("fork", force=True)  # as without us
    warnings.simplefilter("ignore")
    logging.disable()
    synced: set[int] = set()
    os.fsync = noting(os.fsync, synced)
    outcomes = {}
    for index, name in enumerate(names):
        try:
            outcomes[name] = tried(PEERS[name], folder / str(index), synced)
        except Exception as error:
            outcomes[name] = {"error": repr(error)}
    results.write_text(json.dumps(outcomes))


def noting(fsync: Callable[[int], None], synced: set[int]) -> Callable[[int], None]:
    """A sync that is noted once it is done."""

    def wrapped(descriptor: Any) -> None:
        fsync(descriptor)
        synced.add(os.stat(descriptor).st_ino)

    return wrapped


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """All installed peers, one after the other in one process."""
    folder = tmp_path_factory.mktemp("peers")
    results = folder / "results.json"
    process = FORK_SERVER.Process(target=try_all, args=(list(installed()), folder, results))
    process.start()
    process.join(LIMIT_S)
    assert process.exitcode == 0
    found: dict[str, dict[str, Any]] = json.loads(results.read_text())
    return found


@pytest.fixture
def outcome(outcomes: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    """Of one peer."""
    if name not in outcomes:
        pytest.skip(f"a package of {name!r} is not installed")
    assert "error" not in outcomes[name], outcomes[name]["error"]
    return outcomes[name]


@pytest.mark.parametrize("name", PEERS)
def test_it_restores_what_it_saved_bit_for_bit(outcome: dict[str, Any]) -> None:
    assert outcome["changed"]
    assert outcome["model"]
    assert outcome["optimizer"]
    assert outcome["durable_s"] > 0


@pytest.mark.parametrize("name", [name for name in PEERS if name not in ELSEWHERE])
def test_when_it_is_durable_all_its_files_are_synced_or_none(
    outcome: dict[str, Any], name: str
) -> None:
    assert outcome["files"] > 0
    assert outcome["synced"] == (outcome["files"] if PEERS[name].synced else 0)
