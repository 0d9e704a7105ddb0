"""Paths as users write them: "~" is the home directory, "" is refused, bytes are a path."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import checkfreq
from checkfreq import CFCheckpoint, CFManager
from checkfreq.errors import ConfigError
from tests.silence.training import EVERY


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory, from another working directory."""
    for name in ("home", "work"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def checkpointed(path: str | bytes | Path, **options: Any) -> None:
    with CFManager(path, CFCheckpoint(model=nn.Linear(8, 3)), **EVERY, **options) as manager:
        manager.restore()
        manager.step()


@pytest.mark.parametrize("path", ["~/chk", b"~/chk", Path("~/chk")])
def test_a_tilde_is_the_home_directory(path: str | bytes | Path, home: Path) -> None:
    checkpointed(path)
    assert (home / "chk" / "latest").is_symlink() or (home / "chk" / "latest").is_file()
    assert os.listdir(".") == []
    assert os.listdir(home) == ["chk"]
    assert isinstance(checkfreq.load("~/chk")["model"]["weight"], torch.Tensor)


def test_an_empty_path_is_refused(home: Path) -> None:
    with pytest.raises(ConfigError, match=r'expected a path, got ""'):
        checkpointed("")
    with pytest.raises(ConfigError, match=r'expected a path, got ""'):
        checkfreq.load("")
    assert os.listdir(".") == []
