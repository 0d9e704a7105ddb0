"""torch.save files: written for weights_only=True, and read with nothing else."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import checkfreq
from checkfreq import CFCheckpoint, CFManager, CFMode
from checkfreq.errors import ConfigError, CorruptCheckpointError, NoCheckpointError, StateError
from checkfreq.formats import from_torch_save, to_torch_save
from checkfreq.persist.lock import DirectoryLock
from tests.formats.support import Trap, parts, restored, same


def test_a_checkpoint_goes_to_a_file_and_back_bit_for_bit(
    tmp_path: Path, live: dict[str, Any]
) -> None:
    assert to_torch_save(tmp_path / "chk", tmp_path / "all.pt") == 3
    assert from_torch_save(tmp_path / "all.pt", tmp_path / "again", like=like(), step=7) == 7
    there, back = checkfreq.load(tmp_path / "chk"), checkfreq.load(tmp_path / "again")
    assert same(back, there)
    assert same(restored(tmp_path / "again"), live)


def like() -> CFCheckpoint:
    return CFCheckpoint(**parts(seed=2))


def test_torch_load_takes_the_file_as_it_is(tmp_path: Path, live: dict[str, Any]) -> None:
    to_torch_save(tmp_path / "chk", tmp_path / "all.pt")
    loaded = torch.load(tmp_path / "all.pt", weights_only=True)
    model = parts(seed=1)["model"]
    model.load_state_dict(loaded["model"])
    assert same(model.state_dict(), live["model"])
    assert loaded["model"]["head.weight"].data_ptr() == loaded["model"]["embed.weight"].data_ptr()
    assert list(loaded["history"]["queue"]) == ["$deque", "maxlen"]
    to_torch_save(tmp_path / "chk", tmp_path / "model.pt", name="model")
    assert same(torch.load(tmp_path / "model.pt"), live["model"])
    with pytest.raises(ConfigError, match="expected one of model, optimizer"):
        to_torch_save(tmp_path / "chk", tmp_path / "other.pt", name="other")


def test_a_file_goes_to_a_checkpoint_and_back_bit_for_bit(tmp_path: Path) -> None:
    objects = parts()
    content = {
        "epoch": 3,
        "model_state_dict": objects["model"].state_dict(),
        "optimizer_state_dict": objects["optimizer"].state_dict(),
        "best": torch.tensor(0.5),
        "view": torch.arange(12.0).reshape(3, 4)[:, 1:3],
        "history": [{"loss": 0.5}, ({1: "one"}, None, True), {1, 2}, 2**70, float("nan")],
        "shape": torch.Size([2, 3]),
        "ordered": OrderedDict(b=1, a=2),
    }
    torch.save(content, tmp_path / "theirs.pt")
    assert from_torch_save(tmp_path / "theirs.pt", tmp_path / "chk") == 0
    to_torch_save(tmp_path / "chk", tmp_path / "back.pt")
    back = torch.load(tmp_path / "back.pt")
    assert str(back["history"].pop()) == str(content["history"].pop()) == "nan"  # type: ignore[attr-defined]
    assert same(back, content)
    assert back.keys() == content.keys()  # no generators are made up


@pytest.mark.parametrize(
    ("content", "is_zipped"),
    [(nn.Linear(2, 3).state_dict(), False), ([torch.ones(2), 5], True), ("text", False)],
    ids=["state dict", "list", "text"],
)
def test_a_file_of_one_thing_becomes_one_object(
    content: Any, is_zipped: bool, tmp_path: Path
) -> None:
    torch.save(content, tmp_path / "one.pt", _use_new_zipfile_serialization=is_zipped)
    from_torch_save(tmp_path / "one.pt", tmp_path / "chk")
    name = "model" if isinstance(content, dict) else "state"
    to_torch_save(tmp_path / "chk", tmp_path / "back.pt", name=name)
    assert same(torch.load(tmp_path / "back.pt"), content)


def test_names_say_what_each_object_is_called_there(tmp_path: Path) -> None:
    live = trained_elsewhere(tmp_path / "theirs.pt")
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=9, momentum=0.9)
    chk = CFCheckpoint(model=model, optimizer=optimizer)
    names = {"model": "model_state_dict", "optimizer": "optimizer_state_dict"}
    from_torch_save(tmp_path / "theirs.pt", tmp_path / "chk", like=chk, names=names, step=40)
    with CFManager(tmp_path / "chk", chk, mode=CFMode.MANUAL, chk_freq=0) as cf_manager:
        assert cf_manager.restore()
        assert cf_manager.global_step == 40
    assert same(model.state_dict(), live["model_state_dict"])
    assert same(optimizer.state_dict(), live["optimizer_state_dict"])
    with pytest.raises(ConfigError, match="expected an entry 'model', 'optimizer', found epoch"):
        from_torch_save(tmp_path / "theirs.pt", tmp_path / "chk", like=chk, step=41)
    torch.save(live["model_state_dict"], tmp_path / "weights.pt")  # fits the only object
    from_torch_save(tmp_path / "weights.pt", tmp_path / "only", like=CFCheckpoint(net=model))
    assert same(checkfreq.load(tmp_path / "only")["net"], dict(live["model_state_dict"]))


def trained_elsewhere(path: Path) -> dict[str, Any]:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    tracked = {"model": model, "optimizer": optimizer}
    states = {f"{name}_state_dict": live.state_dict() for name, live in tracked.items()}
    torch.save({"epoch": 1, **states}, path)
    return states


@pytest.mark.parametrize("form", ["torch", "old torch", "pickle"])
def test_a_strangers_pickle_is_refused(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"model": Trap()}, "trap.pt", _use_new_zipfile_serialization=form == "torch")
    if form == "pickle":
        Path("trap.pt").write_bytes(pickle.dumps({"model": Trap()}))
    with pytest.raises(ConfigError, match="Unpickling can run any code"):
        from_torch_save("trap.pt", "chk")
    assert not Path("sprung").exists()
    assert not Path("chk").exists()


@pytest.mark.parametrize("damage", ["cut", "empty", "text"])
def test_a_damaged_file_is_refused(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.pt"
    torch.save(nn.Linear(2, 3).state_dict(), path)
    data = {"cut": path.read_bytes()[:-40], "empty": b"", "text": b"no file of torch\n" * 9}[damage]
    path.write_bytes(data)
    with pytest.raises((CorruptCheckpointError, ConfigError), match=str(path)):
        from_torch_save(path, tmp_path / "chk")
    assert not (tmp_path / "chk").exists()


def test_what_cannot_be_kept_or_named_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "odd.pt"
    torch.save({"model": {"a": torch.ones(2, device="meta")}}, path)
    with pytest.raises(StateError, match=r"model\.a: a tensor on the meta device"):
        from_torch_save(path, tmp_path / "chk")
    torch.save({"best loss": 0.5}, path)
    with pytest.raises(ConfigError, match="expected a Python identifier"):
        from_torch_save(path, tmp_path / "chk")
    from_torch_save(path, tmp_path / "chk", names={"best": "best loss"})
    assert checkfreq.load(tmp_path / "chk")["best"] == 0.5


def test_nothing_is_overwritten_without_being_asked(tmp_path: Path, live: dict[str, Any]) -> None:
    (tmp_path / "there.pt").write_bytes(b"precious")
    with pytest.raises(ConfigError, match="is there already"):
        to_torch_save(tmp_path / "chk", tmp_path / "there.pt")
    assert (tmp_path / "there.pt").read_bytes() == b"precious"
    to_torch_save(tmp_path / "chk", tmp_path / "there.pt", overwrite=True)
    with pytest.raises(ConfigError, match="is there already"):
        from_torch_save(tmp_path / "there.pt", tmp_path / "chk", step=3)
    from_torch_save(tmp_path / "there.pt", tmp_path / "chk", step=3, overwrite=True)
    assert (tmp_path / "chk" / "superseded" / "step-00000003").is_dir()


@pytest.mark.more  # it is waited for, for some seconds
def test_a_directory_in_use_is_refused(tmp_path: Path, live: dict[str, Any]) -> None:
    to_torch_save(tmp_path / "chk", tmp_path / "all.pt")
    lock = DirectoryLock(tmp_path / "chk")
    lock.acquire(timeout_s=1, owner_pid=os.getpid(), on_wait=print, give_up=lambda s: False)
    try:
        with pytest.raises(ConfigError, match="is being written to"):
            from_torch_save(tmp_path / "all.pt", tmp_path / "chk", step=9)
    finally:
        lock.release()


def test_a_damaged_checkpoint_is_walked_back_from(tmp_path: Path, live: dict[str, Any]) -> None:
    to_torch_save(tmp_path / "chk", tmp_path / "all.pt")
    from_torch_save(tmp_path / "all.pt", tmp_path / "chk", step=9)
    payload = tmp_path / "chk" / "step-00000009" / "model.safetensors"
    data = bytearray(payload.read_bytes())
    data[-1] ^= 1
    payload.write_bytes(data)
    assert to_torch_save(tmp_path / "chk", tmp_path / "older.pt") == 3
    assert same(torch.load(tmp_path / "older.pt")["model"], live["model"])
    with pytest.raises(CorruptCheckpointError, match="digest"):
        to_torch_save(tmp_path / "chk", tmp_path / "newer.pt", step=9)
    assert not (tmp_path / "newer.pt").exists()
    with pytest.raises(NoCheckpointError):
        to_torch_save(tmp_path / "none", tmp_path / "newer.pt")
