"""``checkfreq convert``: the way and the format follow from names and folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import checkfreq
from checkfreq.cli import main
from checkfreq.formats import from_torch_save


@pytest.fixture
def chk(tmp_path: Path) -> Path:
    """A checkpoint of step 5 with one module."""
    torch.save({"model": nn.Linear(2, 3).state_dict(), "epoch": 2}, tmp_path / "first.pt")
    from_torch_save(tmp_path / "first.pt", tmp_path / "chk", step=5)
    return tmp_path / "chk"


def run(*args: Any) -> int:
    return main(["convert", *map(str, args)])


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("all.pt", ()),
        ("model.safetensors", ()),
        ("dcp", ("--to", "dcp")),
        ("hub", ("--to", "pretrained", "--name", "model")),
        ("old", ("--to", "torch-save", "--step", "step-00000005/")),
    ],
)
def test_a_checkpoint_is_converted_there_and_back(
    target: str, options: tuple[str, ...], chk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = chk.parent / target
    assert run(chk, path, *options) == 0
    assert run(path, chk.parent / "again", "--step", 7) == 0
    said = capsys.readouterr().out.splitlines()
    assert said == [
        f"step 5 of {chk} is in {path}",
        f"{path} is step 7 of {chk.parent / 'again'}",
    ]
    there, back = (checkfreq.load(one)["model"] for one in (chk, chk.parent / "again"))
    assert all(torch.equal(there[key], back[key]) for key in there)


def test_nothing_is_overwritten_without_being_asked(chk: Path) -> None:
    path = chk.parent / "model.safetensors"
    assert [run(chk, path), run(chk, path), run(chk, path, "--overwrite")] == [0, 2, 0]


def test_export_and_import_are_the_two_ways_of_convert(
    chk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, again = chk.parent / "model.safetensors", chk.parent / "again"
    assert main(["export", str(chk), str(path), "--name", "model", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["target"], said["step"], said["is_export"]) == (str(path), 5, True)
    assert main(["import", str(path), str(again), "--name", "model", "--step", "7"]) == 0
    assert capsys.readouterr().out == f"{path} is step 7 of {again}\n"
    assert main(["diff", str(chk), str(again), "--only", "model"]) == 0


def test_what_goes_the_other_way_is_refused(chk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(chk.parent / "first.pt"), str(chk.parent / "out.pt")]) == 2
    assert "checkfreq import reads those" in capsys.readouterr().err
    assert main(["import", str(chk), str(chk.parent / "other")]) == 2
    assert "checkfreq export reads those" in capsys.readouterr().err
    assert main(["import", str(chk.parent / "first.pt"), "s3://bucket/run"]) == 2
    assert "expected a directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("chk", "out"), "expected a name that ends in"),
        (("first.pt", "out", "--to", "dcp"), "Import it first"),
        (("empty", "out"), "found none of them"),
        (("chk", "out.pt", "--step", "x"), "expected a step such as 1200"),
        (("none.pt", "out"), "No such file"),
    ],
)
def test_what_cannot_be_done_is_said(
    arguments: tuple[str, ...],
    says: str,
    chk: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(chk.parent)
    Path("empty").mkdir()
    assert run(*arguments) == 2
    assert says in capsys.readouterr().err
