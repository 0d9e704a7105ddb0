"""A save through torch.distributed.checkpoint that is killed, or fails, at any instant."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from checkfreq import faults
from checkfreq.integrations.dcp import CFStorageReader, CFStorageWriter
from tests.fork_server import FORK_SERVER

pytestmark = [
    pytest.mark.crash,
    pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning"),
]

POINTS = ("commit.mkdir", "commit.write", "commit.rename", "commit.pointer")
AFTER_THE_RENAME = ("commit.sync_parent", "commit.pointer")


def save(chk_dir: Path, step: int) -> None:
    state = {"a": torch.full((3,), float(step)), "n": step}
    dcp.save(state, storage_writer=CFStorageWriter(chk_dir, step=step))


def save_and_die(chk_dir: Path, point: str) -> None:
    warnings.simplefilter("ignore")
    os.environ["CHECKFREQ_FAULT"] = f"{point}:kill-self"
    faults.reload()
    save(chk_dir, 2)


def newest(chk_dir: Path) -> int:
    state = {"a": torch.zeros(3), "n": 0}
    dcp.load(state, storage_reader=CFStorageReader(chk_dir, trust_pickle=True))
    assert state["a"].tolist() == [state["n"]] * 3
    return int(state["n"])


@pytest.mark.parametrize("point", POINTS)
def test_killed_anywhere_it_leaves_the_old_steps_or_one_more(tmp_path: Path, point: str) -> None:
    save(tmp_path, 1)
    child = FORK_SERVER.Process(target=save_and_die, args=(tmp_path, point))
    child.start()
    child.join(240)
    assert child.exitcode == -signal.SIGKILL
    assert newest(tmp_path) == (2 if point in AFTER_THE_RENAME else 1)
    save(tmp_path, 3)
    assert newest(tmp_path) == 3
    assert not list(tmp_path.glob(".tmp-*"))
