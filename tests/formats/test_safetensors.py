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
from checkfreq.errors import ConfigError, CorruptCheckpointError
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


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def rewrite(path: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        ("cut", "size in bytes"),
        ("longer", "size in bytes"),
        ("empty", "size in bytes"),
        ("length", "length of the header"),
        ("json", "header"),
        ("twice", "a key is there twice"),
        ("dtype", "unknown dtype"),
        ("shape", "bytes for"),
        ("gap", "place of a tensor"),
        ("metadata", "expected texts"),
        ("deep", "header"),
    ],
)
def test_a_damaged_file_is_refused(damage: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    save_file({"a": torch.ones(4), "b": torch.zeros(4)}, path)
    header, data = header_of(path)
    texts = {"json": b"{nothing", "twice": b'{"a": 1, "a": 2}', "deep": b'{"a":' * 5000}
    fields = {
        "dtype": {"dtype": "F5"},
        "shape": {"shape": [2**40, 2]},
        "gap": {"data_offsets": header["b"]["data_offsets"]},
    }
    header["a"] |= fields.get(damage, {})
    if damage == "metadata":
        header["__metadata__"] = {"a": 1}
    rewrite(
        path, texts.get(damage, header), {"cut": data[:-1], "longer": data + b"x"}.get(damage, data)
    )
    if damage in ("empty", "length"):
        length = struct.pack("<Q", 2**62) + path.read_bytes()[8:]
        path.write_bytes(b"" if damage == "empty" else length)
    with pytest.raises(CorruptCheckpointError, match=says):
        from_safetensors(path, tmp_path / "chk")
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


def test_nothing_is_overwritten_without_being_asked(tmp_path: Path, live: dict[str, Any]) -> None:
    path = tmp_path / "one.safetensors"
    path.write_bytes(b"precious")
    with pytest.raises(ConfigError, match="is there already"):
        to_safetensors(tmp_path / "chk", path)
    with pytest.raises(ConfigError, match="expected one of model, optimizer"):
        to_safetensors(tmp_path / "chk", tmp_path / "other", name="other")
    assert path.read_bytes() == b"precious"
    to_safetensors(tmp_path / "chk", path, overwrite=True)
    assert load_file(path)
