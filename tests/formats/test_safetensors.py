"""Safetensors files, beside the real library."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import checkfreq
from checkfreq import CFCheckpoint, CFManager, CFMode
from checkfreq.errors import CorruptCheckpointError
from checkfreq.formats import from_safetensors, to_safetensors
from tests.formats.support import same


@pytest.mark.parametrize("name", ["model", "optimizer", "scheduler", "history", "rng"])
def test_an_object_goes_to_a_file_and_back_bit_for_bit(
    name: str, tmp_path: Path, live: dict[str, Any]
) -> None:
    assert to_safetensors(tmp_path / "chk", tmp_path / "one.safetensors", name=name) == 3
    assert from_safetensors(tmp_path / "one.safetensors", tmp_path / "again", name=name) == 3
    there, back = checkfreq.load(tmp_path / "chk"), checkfreq.load(tmp_path / "again")
    assert same(back[name], there[name])


def test_the_library_reads_the_weights(tmp_path: Path, live: dict[str, Any]) -> None:
    to_safetensors(tmp_path / "chk", tmp_path / "model.safetensors")
    state = live["model"]
    loaded = load_file(tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        aliases = json.loads(file.metadata()["aliases"])
    assert aliases == {"head.weight": "embed.weight"}
    for key, tensor in state.items():
        if isinstance(tensor, torch.Tensor) and "extra_state" not in key and key not in aliases:
            wide = tensor.dtype == torch.complex128
            expected = tensor.view(torch.float64).view(torch.uint8) if wide else tensor
            assert same(loaded[key], expected), key


def test_a_file_of_the_library_becomes_a_module(tmp_path: Path) -> None:
    state = {
        "w": torch.randn(3, 4),
        "b": torch.tensor(2.0, dtype=torch.bfloat16),
        "none": torch.empty(0, 3),
        "bytes": torch.arange(3, dtype=torch.uint8),
        "eight": torch.arange(4).to(torch.float8_e4m3fn),
        "scale": torch.arange(6, dtype=torch.uint8).view(torch.float8_e8m0fnu).reshape(2, 3),
        "four": torch.arange(6, dtype=torch.uint8).view(torch.float4_e2m1fn_x2).reshape(2, 3),
        "é": torch.arange(2).cfloat(),
    }
    save_file(state, tmp_path / "theirs.safetensors", metadata={"made by": "somebody"})
    with torch.device("meta"):  # a default device does not matter
        from_safetensors(tmp_path / "theirs.safetensors", tmp_path / "chk")
    back = checkfreq.load(tmp_path / "chk")["model"]
    assert same(dict(sorted(back.items())), dict(sorted(state.items())))
    to_safetensors(tmp_path / "chk", tmp_path / "back.safetensors")
    back = load_file(tmp_path / "back.safetensors")
    assert same(dict(sorted(back.items())), dict(sorted(state.items())))


def test_weights_that_are_tied_in_the_live_model_are_in_the_file_once(tmp_path: Path) -> None:
    theirs = {k: v for k, v in nn.ModuleDict(tied()).state_dict().items() if k != "head.weight"}
    save_file(theirs, tmp_path / "theirs.safetensors")
    net = nn.ModuleDict(tied())
    chk = CFCheckpoint(net=net)
    from_safetensors(tmp_path / "theirs.safetensors", tmp_path / "chk", name="net", like=chk)
    with CFManager(tmp_path / "chk", chk, mode=CFMode.MANUAL, chk_freq=0) as cf_manager:
        assert cf_manager.restore()
    assert same(net["head"].weight.detach(), theirs["embed.weight"])


def tied() -> dict[str, nn.Module]:
    embed, head = nn.Embedding(4, 2), nn.Linear(2, 4, bias=False)
    head.weight = embed.weight
    return {"embed": embed, "head": head}


def framed(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "size in bytes"),
        (struct.pack("<Q", 2**62), "length of the header"),
        (framed(b'{"a": 1, "a": 2}'), "a key is there twice"),
        (framed(b'{"a":' * 5000), "header"),
        (framed(b'{"__metadata__": {"a": 1}}'), "expected texts"),
    ],
    ids=["empty", "length", "twice", "deep", "metadata"],
)
def test_a_damaged_file_is_refused(data: bytes, says: str, tmp_path: Path) -> None:
    """What the library refuses too is in test_safetensors_differential.py."""
    (tmp_path / "bad.safetensors").write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=says):
        from_safetensors(tmp_path / "bad.safetensors", tmp_path / "chk")
    assert not (tmp_path / "chk").exists()


@pytest.mark.parametrize(
    "described",
    [
        *({}, [], '{"kind": "module", "step": 1', {"kind": 5}),
        {"kind": "optimizer", "step": 1},
        {"kind": "dict", "class": "dict", "tree": {"$tensor": "gone"}, "step": 1},
        {"kind": "module", "class": "X", "aliases": {"b": "gone"}, "step": 1},
        {"kind": "unheard of", "step": 1},
    ],
    ids=str,
)
def test_a_made_up_description_is_refused(described: Any, tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    text = described if isinstance(described, str) else json.dumps(described)
    save_file({"a": torch.ones(4)}, path, metadata={"checkfreq": text})
    with pytest.raises(CorruptCheckpointError):
        from_safetensors(path, tmp_path / "chk")
    assert not list((tmp_path / "chk").glob("step-*"))
    assert not list((tmp_path / "chk").glob(".tmp-*"))
