"""Manifests that validate and were made up: nothing is called, imported or half restored."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import checkfreq
from checkfreq import CFCheckpoint, CFManager, CFMode
from checkfreq.errors import CheckFreqError, CorruptCheckpointError
from checkfreq.restore.restorer import Restorer
from checkfreq.store.manifest import digest_of
from tests.hostile import fuzz, grammar
from tests.restore.whole import find


@pytest.fixture(scope="module")
def rich(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps with an object of every kind."""
    chk_dir = tmp_path_factory.mktemp("forged") / "chk"
    fuzz.write_rich(chk_dir)
    return chk_dir


@pytest.fixture
def chk_dir(rich: Path, tmp_path: Path) -> Path:
    """A copy to be changed, of the newest step alone."""
    shutil.copytree(rich, tmp_path / "chk")
    shutil.rmtree(tmp_path / "chk" / "step-00000001")
    return tmp_path / "chk"


def forge(chk_dir: Path, *path: Any, value: Any) -> None:
    """Give the newest manifest another value at a place of its objects."""
    folder = chk_dir / "step-00000002"
    document = grammar.read_manifest(folder)
    node = document["objects"]
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    grammar.write_manifest(folder, document)


NUMPY = ("rng", "state", "numpy", "state")
GROUP = ("groups", 0, "values")
BOTH = ("both", "tree", "_schedulers", 0)

MALFORMED = {
    "device of a nested tensor": (("meters", "tree", "t", "device"), "nosuch"),
    "dtype": (("meters", "tree", "more", "dtype", "$torch.dtype"), "hub"),
    "dtype of objects": (("meters", "tree", "more", "n", "$numpy"), "|O"),
    "place among NumPy's words": ((*NUMPY, "pos"), 10**6),
    "NumPy's words": ((*NUMPY, "key", "$ndarray"), "python.words"),
    "Python's gauss": (("rng", "state", "python", "gauss"), "text"),
    "Python's words": (("rng", "state", "python", "words", "$tensor"), "torch"),
    "a generator of no device": (("rng", "state", "nosuch"), 1),
    "an entry of a group": (("optimizer", *GROUP, "lr"), "0.1"),
    "an entry that no tensor holds": (("adam", *GROUP, "lr"), {"$int": hex(10**400)}),
    "the parameters of a group": (("optimizer", *GROUP, "params"), [1]),
    "parameters without a tensor": (("optimizer", "parameters"), [0]),
    "a name that is no key": (("optimizer", "other"), [[{"$dict": []}, 1]]),
    "a method of a scheduler": (("plateau", "tree", "step"), 1),
    "a scheduler's text for a number": (("plateau", "tree", "best"), "a file name"),
    "a method of a scheduler's scheduler": ((*BOTH, "get_lr"), [1]),
    "a method of a user's object": (("meter", "tree", "load_state_dict"), 1),
    "a scaler's scale": (("scaler", "state", "growth_factor"), "2"),
    "a scaler without fields": (("scaler", "state", "_growth_tracker"), {"$tuple": []}),
    "a position": (("$positions", "train"), [1]),
    "positions carried on": (("$positions", "train"), {"$dict": [["$carried", 5]]}),
    "no flags in the flags": (("model", "flags"), {}),
    "a text for names with a flag": (("model", "flags", "frozen"), "weight"),
    "what a script gave": (("optimizer", "given"), {"values": [1], "of": [0]}),
    "a tied name of nothing": (("model", "aliases"), {"a": "b"}),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_malformed_piece_anywhere_leaves_everything_as_it_was(what: str, chk_dir: Path) -> None:
    path, value = MALFORMED[what]
    forge(chk_dir, *path, value=value)
    objects = fuzz.rich_objects()
    fuzz.train(objects)
    before = fuzz.live_state(objects)
    with pytest.raises(CheckFreqError):
        fuzz.into_live(objects, chk_dir, strict=True)
    assert fuzz.live_state(objects) == before


def test_generators_of_which_the_bytes_are_no_state_leave_everything_as_it_was(
    chk_dir: Path,
) -> None:
    folder = chk_dir / "step-00000002"
    document = grammar.read_manifest(folder)
    (entry,) = (file for file in document["files"] if file["name"] == "rng.safetensors")
    (tensor,) = (one for one in entry["tensors"] if one["name"] == "torch")
    data = bytearray((folder / entry["name"]).read_bytes())
    start, size = tensor["offset"], tensor["num_bytes"]
    data[start : start + size] = b"\xff" * size
    (folder / entry["name"]).write_bytes(data)
    tensor["digest"] = digest_of(b"\xff" * size)
    grammar.write_manifest(folder, document)
    objects = fuzz.rich_objects()
    before = fuzz.live_state(objects)
    with pytest.raises(CorruptCheckpointError, match="state of the generator torch"):
        fuzz.into_live(objects, chk_dir, strict=True)
    assert fuzz.live_state(objects) == before


def test_state_that_makes_no_sense_is_walked_past(rich: Path, tmp_path: Path) -> None:
    shutil.copytree(rich, tmp_path / "chk")
    forge(tmp_path / "chk", "adam", "groups", value=5)
    found = find(Restorer(tmp_path / "chk"))
    assert found is not None
    assert (found.step, [item.step for item in found.rejected]) == (1, [2])


@pytest.mark.parametrize("saved", [np.float32(0.5), True])
def test_a_number_takes_the_place_of_another_kind_of_number(saved: Any, tmp_path: Path) -> None:
    def build(lr: Any) -> CFCheckpoint:
        model = torch.nn.Linear(2, 2)
        return CFCheckpoint(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=lr))

    with CFManager(tmp_path, build(saved), mode=CFMode.MANUAL, chk_freq=1) as manager:
        manager.step()
    chk = build(0.1)
    checkfreq.load(tmp_path, only=["model", "optimizer"], into=chk.tracked)
    assert chk.tracked["optimizer"].param_groups[0]["lr"] == saved


def test_a_scheduler_gets_nothing_that_it_does_not_have(chk_dir: Path) -> None:
    forge(chk_dir, "plateau", "tree", "of_another_version", value=5)
    objects = fuzz.rich_objects()
    names = {*vars(objects["plateau"])}
    fuzz.into_live(objects, chk_dir, strict=True)
    assert {*vars(objects["plateau"])} == names


@pytest.mark.parametrize("tag", ["$torch.dtype", "$torch.layout", "$torch.memory_format"])
@pytest.mark.parametrize("name", ["save", "_inductor", "Tensor", 5])
def test_a_tag_names_no_function_module_or_class_of_torch(
    tag: str, name: Any, chk_dir: Path
) -> None:
    modules = set(sys.modules)
    forge(chk_dir, "meters", "tree", "best", value={tag: name})
    with pytest.raises(CorruptCheckpointError):
        checkfreq.load(chk_dir)
    assert not {new for new in set(sys.modules) - modules if new.startswith("torch.")}
