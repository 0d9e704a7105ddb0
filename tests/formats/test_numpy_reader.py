"""The reader that needs Python and NumPy alone."""

from __future__ import annotations

import contextlib
import copy
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import checkfreq
import tests.fixtures
from checkfreq.formats import numpy_reader
from checkfreq.formats.numpy_reader import open_checkpoint, steps
from checkfreq.store.joint import JointStore
from tests.hostile import grammar
from tests.store.ranks import commit_jointly

FIXTURES = Path(tests.fixtures.__file__).parent


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_every_tensor_is_read_bit_for_bit(tmp_path: Path, live: dict[str, Any]) -> None:
    checkpoint = open_checkpoint(tmp_path / "chk")
    arrays = checkpoint.tensors("model")
    tensors = {k: v for k, v in live["model"].items() if isinstance(v, torch.Tensor)}
    assert arrays.keys() - tensors.keys() == {"_extra_state.mean"}
    for key, tensor in tensors.items():
        assert arrays[key].shape == tuple(tensor.shape)
        assert arrays[key].tobytes() == bits(tensor), key
        assert checkpoint.dtype_of("model", key) == str(tensor.dtype).removeprefix("torch.")
    assert checkpoint.step == 3
    checkpoint.verify()


def test_the_state_of_an_object_is_decoded(tmp_path: Path, live: dict[str, Any]) -> None:
    checkpoint = open_checkpoint(tmp_path / "chk", 3)
    tree = checkpoint.value("history")["tree"]
    assert tree["losses"] == [1.5, float("inf"), 2]
    assert tree["by epoch"][1] == 0.25
    assert tree["pair"][0].tolist() == [0, 1, 2]
    assert tree["complex"] == 1 + 2j
    assert tree["raw"] == b"\x00\xff"
    assert tree["packed"] == [True, False] * 50
    assert type(tree["packed"][0]) is bool
    numpy.testing.assert_array_equal(tree["array"], live["history"]["array"])
    assert {"model", "optimizer", "history", "rng"} <= {*checkpoint.names}


@pytest.mark.parametrize("version", [1, 2, 3])
def test_every_format_and_the_shards_of_several_ranks_are_read(version: int) -> None:
    folder = FIXTURES / f"format-{version}"
    step = steps(folder)[-1]
    checkpoint = open_checkpoint(folder, step)
    checkpoint.verify()
    for rank in range(checkpoint.manifest["world"]):
        state = checkfreq.load(folder, step=step, rank=rank)["model"]
        arrays = checkpoint.tensors("model", rank)
        for key, tensor in state.items():
            if isinstance(tensor, torch.Tensor):
                assert arrays[key].tobytes() == bits(tensor), key


def test_it_runs_outside_of_the_package_without_torch(tmp_path: Path, live: dict[str, Any]) -> None:
    shutil.copy(numpy_reader.__file__, tmp_path / "reader.py")
    program = (
        "import sys\n"
        "class No:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('torch', 'xxhash', 'checkfreq'):\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, No())\n"
        "import reader\n"
        "assert not reader.verifies\n"
        "print(len(reader.open_checkpoint('chk').tensors('model')))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert ran.stderr == ""
    assert int(ran.stdout) > 10


@pytest.mark.parametrize(
    "what", ["manifest.json", "model.safetensors", "header", "cut", "link", "FIFO"]
)
def test_damage_is_found(what: str, tmp_path: Path, live: dict[str, Any]) -> None:
    folder = tmp_path / "chk" / "step-00000003"
    path = folder / ("manifest.json" if what == "manifest.json" else "model.safetensors")
    data = bytearray(path.read_bytes())
    data[9 if what == "header" else -9] ^= 1
    path.unlink()
    path.write_bytes(data[:-1] if what == "cut" else data)
    if what == "FIFO":  # nobody waits for it
        path.unlink()
        os.mkfifo(path)
    if what == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="expected"):
        open_checkpoint(tmp_path / "chk").tensors("model")


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.more) for n in (1, 2))])
def test_a_forged_record_is_a_valueerror_wherever_it_is_not_as_documented(
    seed: int, tmp_path: Path, live: dict[str, Any]
) -> None:
    folder, chance = tmp_path / "chk" / "step-00000003", random.Random(seed)
    record = grammar.read_manifest(folder)
    for _ in range(60):
        document = copy.deepcopy(record)
        grammar.edit(chance, document)
        grammar.write_manifest(folder, document)
        with contextlib.suppress(ValueError):
            checkpoint = open_checkpoint(folder)
            checkpoint.step  # noqa: B018  # a property that may raise
            for name in ("model", "optimizer", "rng", "history"):
                for read in ("object", "tensors", "layouts", "value"):
                    with contextlib.suppress(ValueError):
                        getattr(checkpoint, read)(name)
            assert [*checkpoint.names, *checkpoint.ranks]
            checkpoint.verify()


def test_a_step_that_is_not_there_is_named(tmp_path: Path, live: dict[str, Any]) -> None:
    with pytest.raises(FileNotFoundError, match="expected step 9, found"):
        open_checkpoint(tmp_path / "chk", 9)
    with pytest.raises(KeyError, match="has no tensor"):
        open_checkpoint(tmp_path / "chk" / "step-00000003").dtype_of("model", "none such")
    with pytest.raises(KeyError, match="has no tensor"):
        open_checkpoint(tmp_path / "chk" / "step-00000003").tensor("model", "none such")


@pytest.fixture
def tree(tmp_path: Path) -> JointStore:
    store = JointStore(tmp_path / "tree", is_tree=True)
    store.open()
    commit_jointly(store, 5, world=4)
    return store


def test_the_records_of_many_ranks_are_read_as_one(tree: JointStore) -> None:
    checkpoint = open_checkpoint(tree.root)
    checkpoint.verify()
    weight = checkpoint.tensor("m", "weight")
    assert weight.tolist() == [[5, rank, 5, rank] for rank in range(4)]
    assert checkpoint.ranks == [0, 1, 2, 3]
    assert checkpoint.object("rng", rank=2) == {"kind": "rng", "seed": 2}


def test_a_rank_record_of_something_else_is_refused(tree: JointStore) -> None:
    folder = tree.path(5)
    shutil.copy(folder / "part-00001.json", folder / "part-00002.json")
    with pytest.raises(ValueError, match="part-00002.json: expected digest"):
        open_checkpoint(tree.root)
