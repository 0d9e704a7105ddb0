"""Folders of save_pretrained, without and with the real library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import checkfreq
from checkfreq import CFCheckpoint, CFManager, CFMode
from checkfreq.errors import ConfigError, CorruptCheckpointError
from checkfreq.examples.imagenet.models import import_torchvision
from checkfreq.formats import from_pretrained, to_pretrained
from tests.formats.support import same


def weights() -> dict[str, torch.Tensor]:
    return {f"layer.{n}": torch.randn(16, 4).to(torch.bfloat16) for n in range(5)}


def a_folder(folder: Path) -> dict[str, torch.Tensor]:
    """Two shards, an index, and files that are not ours."""
    state = weights()
    folder.mkdir()
    names = sorted(state)
    parts = {"model-00001-of-00002.safetensors": names[:3]}
    parts["model-00002-of-00002.safetensors"] = names[3:]
    for file, keys in parts.items():
        save_file({key: state[key] for key in keys}, folder / file, metadata={"format": "pt"})
    weight_map = {key: file for file, keys in parts.items() for key in keys}
    index = {"metadata": {"total_size": 640}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text('{"model_type": "made up"}')
    (folder / "tokenizer.json").write_text("{}")
    return state


def read(folder: Path) -> dict[str, torch.Tensor]:
    """The weights as others read them: through the index."""
    path = folder / "model.safetensors.index.json"
    if not path.exists():
        return load_file(folder / "model.safetensors")
    weight_map = json.loads(path.read_text())["weight_map"]
    return {key: load_file(folder / file)[key] for key, file in weight_map.items()}


def test_a_folder_goes_to_a_checkpoint_and_back_bit_for_bit(tmp_path: Path) -> None:
    state = a_folder(tmp_path / "theirs")
    assert from_pretrained(tmp_path / "theirs", tmp_path / "chk") == 0
    assert same(checkfreq.load(tmp_path / "chk")["model"], state)
    back = tmp_path / "back"
    to_pretrained(tmp_path / "chk", back, beside=tmp_path / "theirs", max_shard_bytes=300)
    assert same(read(back), state)
    index = json.loads((back / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_parameters": 320, "total_size": 640}
    assert (back / "config.json").read_text() == '{"model_type": "made up"}'
    shards = [f"model-{n:05d}-of-00003.safetensors" for n in (1, 2, 3)]
    others = ["config.json", "model.safetensors.index.json", "tokenizer.json"]
    assert sorted(path.name for path in back.iterdir()) == sorted([*shards, *others])


def test_weights_are_not_replaced_without_being_asked_and_others_stay(tmp_path: Path) -> None:
    state = a_folder(tmp_path / "theirs")
    from_pretrained(tmp_path / "theirs", tmp_path / "chk")
    with pytest.raises(ConfigError, match="holds weights already"):
        to_pretrained(tmp_path / "chk", tmp_path / "theirs")
    to_pretrained(tmp_path / "chk", tmp_path / "theirs", overwrite=True)
    assert same(read(tmp_path / "theirs"), state)
    names = ["config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(path.name for path in (tmp_path / "theirs").iterdir()) == names
    assert sorted(path.name for path in tmp_path.iterdir()) == ["chk", "theirs"]


def test_state_that_is_more_than_tensors_is_refused_by_name(
    tmp_path: Path, live: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="holds _extra_state, odd10: expected tensors"):
        to_pretrained(tmp_path / "chk", tmp_path / "hub", name="model")
    with pytest.raises(ConfigError, match="is of kind optimizer: expected a module"):
        to_pretrained(tmp_path / "chk", tmp_path / "hub", name="optimizer")
    assert not (tmp_path / "hub").exists()


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        ("[]", CorruptCheckpointError),
        ({"layer.0": "gone.safetensors"}, CorruptCheckpointError),
        ({"layer.0": "../outside.safetensors"}, CorruptCheckpointError),
        ({"more": "model-00001-of-00002.safetensors"}, CorruptCheckpointError),
        ("pytorch_model.bin", ConfigError),
        (None, ConfigError),
    ],
    ids=str,
)
def test_a_folder_that_makes_no_sense_is_refused(
    damage: Any, expected: type[Exception], tmp_path: Path
) -> None:
    folder = tmp_path / "theirs"
    a_folder(folder)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    if isinstance(damage, dict):
        index["weight_map"] |= damage
    path.write_text("[]" if damage == "[]" else json.dumps(index))
    if expected is ConfigError:
        path.unlink()
    if damage == "pytorch_model.bin":
        (folder / damage).touch()
    with pytest.raises(expected):
        from_pretrained(folder, tmp_path / "chk")
    assert not (tmp_path / "chk").exists()


@pytest.mark.more
@pytest.mark.filterwarnings("ignore")
def test_transformers_loads_what_was_trained_and_we_what_it_saved(tmp_path: Path) -> None:
    import_torchvision()  # transformers imports it, and its operators may be missing
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=32, n_positions=16)
    theirs = GPT2LMHeadModel(config)
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="3KB")
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists()
    model = GPT2LMHeadModel(config)
    chk = CFCheckpoint(model=model)
    from_pretrained(tmp_path / "theirs", tmp_path / "chk", like=chk)
    with CFManager(tmp_path / "chk", chk, mode=CFMode.MANUAL, chk_freq=0) as cf_manager:
        assert cf_manager.restore()
        with cf_manager.updating(), torch.no_grad():
            model.transformer.wte.weight += 1
        cf_manager.step()
        cf_manager.save(wait=True)
    to_pretrained(tmp_path / "chk", tmp_path / "back", beside=tmp_path / "theirs")
    again = GPT2LMHeadModel.from_pretrained(tmp_path / "back")
    assert same(again.state_dict(), model.state_dict())
    assert again.lm_head.weight is again.transformer.wte.weight
    to_pretrained(tmp_path / "chk", tmp_path / "first", step=0, max_shard_bytes=6000)
    assert same(read(tmp_path / "first"), read(tmp_path / "theirs"))
