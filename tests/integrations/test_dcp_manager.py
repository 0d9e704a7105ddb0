"""torch.distributed.checkpoint reads what managers wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

import checkfreq
from checkfreq import CFCheckpoint, CFManager, CFMode
from checkfreq.errors import ConfigError
from checkfreq.integrations.dcp import CFStorageReader
from tests.integrations.support import same, trained

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


def write(chk_dir: Path, **objects: Any) -> None:
    """A manager's checkpoint of step 1."""
    chk = CFCheckpoint(**objects)
    with CFManager(chk_dir, chk, mode=CFMode.MANUAL, chk_freq=1) as manager:
        manager.restore()
        manager.step()


def load(chk_dir: Path, state: dict[str, Any], **options: Any) -> dict[str, Any]:
    dcp.load(state, storage_reader=CFStorageReader(chk_dir, **options))
    return state


def test_values_that_are_not_tensors_come_back(tmp_path: Path) -> None:
    net, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)  # holds inf
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    extra = {
        "count": 3,
        "name": "é",
        "pair": (torch.ones(2), 1),
        "array": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "seen": {4, 5},
        "list": [torch.ones(1), {"deep": torch.zeros(2)}],
    }
    write(tmp_path, model=net, scheduler=scheduler, scaler=scaler, extra=extra)
    found = load(
        tmp_path,
        {
            "scheduler": dict.fromkeys(scheduler.state_dict()),
            "scaler": dict.fromkeys(scaler.state_dict()),
            "extra": {
                **dict.fromkeys(extra),
                "list": [torch.zeros(1), {"deep": torch.ones(2)}],
            },
        },
    )
    assert found["scheduler"] == scheduler.state_dict()
    assert found["scaler"] == scaler.state_dict()
    array = found["extra"].pop("array")
    assert array.flags.f_contiguous
    assert (array == extra.pop("array")).all()
    assert same(found["extra"], extra)


def test_checkfreq_and_dcp_load_the_same_without_being_told_the_names(
    tmp_path: Path,
) -> None:
    net, optimizer = trained(steps=2)
    write(tmp_path, model=net, optimizer=optimizer, extra={"a": 1, "b": [1, 2]})
    found = _load_state_dict_from_keys(storage_reader=CFStorageReader(tmp_path))
    expected = checkfreq.load(tmp_path)
    assert same(found["model"], dict(expected["model"]))
    assert found["extra"] == expected["extra"]
    numbered = {str(key): value for key, value in expected["optimizer"]["state"].items()}
    assert same(found["optimizer"]["state"], numbered)
    assert found["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]


def test_an_optimizer_s_state_is_found_by_names_if_they_are_given(tmp_path: Path) -> None:
    net, optimizer = trained(steps=2)
    write(tmp_path, model=net, optimizer=optimizer)
    other, other_optimizer = trained(seed=1)
    names = {"optimizer": [name for name, _ in net.named_parameters()]}
    model_state, optimizer_state = get_state_dict(other, other_optimizer)
    found = load(
        tmp_path, {"model": model_state, "optimizer": optimizer_state}, parameter_names=names
    )
    set_state_dict(
        other,
        other_optimizer,
        model_state_dict=found["model"],
        optim_state_dict=found["optimizer"],
    )
    assert same(other.state_dict(), net.state_dict())
    assert same(other_optimizer.state_dict()["state"], optimizer.state_dict()["state"])


def test_names_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    net, optimizer = trained()
    write(tmp_path, model=net, optimizer=optimizer)
    for name, text in (("optimizer", "expected 7 names, got 1"), ("model", "expected an optim")):
        with pytest.raises(ConfigError, match=text):
            CFStorageReader(tmp_path, parameter_names={name: ["a"]}).read_metadata()


def test_an_object_that_cannot_be_flattened_does_not_keep_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    net, _ = trained()
    write(tmp_path, model=net, odd={"a.b": 1, "a": {"b": 2}})
    other, _ = trained(seed=1)
    load(tmp_path, {"model": other})
    assert same(other.state_dict(), net.state_dict())
    assert "odd has no place in a flat state dict" in caplog.text
