"""Safetensors files, beside the real library."""

from __future__ import annotations

import json
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
    with torch.device("meta"):  # a default device does not matter
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
