"""Folders of torch.distributed.checkpoint, from and to its own writer and reader."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

import checkfreq
from checkfreq import CFCheckpoint, CFConfig, CFManager, CFMode
from checkfreq.errors import ConfigError, CorruptCheckpointError
from checkfreq.formats import from_dcp, to_dcp
from iterators import CFIterator
from tests.formats.support import Trap, parts, restored, same, states_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


def test_a_checkpoint_goes_to_dcp_and_back_bit_for_bit(
    tmp_path: Path, live: dict[str, Any]
) -> None:
    assert to_dcp(tmp_path / "chk", tmp_path / "dcp") == 3
    assert from_dcp(tmp_path / "dcp", tmp_path / "again") == 3
    assert same(checkfreq.load(tmp_path / "again"), checkfreq.load(tmp_path / "chk"))
    assert same(restored(tmp_path / "again"), live)


def test_dcp_loads_the_folder_into_live_objects_and_converts_it(
    tmp_path: Path, live: dict[str, Any]
) -> None:
    to_dcp(tmp_path / "chk", tmp_path / "dcp")
    other = parts(seed=1)
    state = {"model": other["model"].state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    other["model"].load_state_dict(state["model"])
    assert same(other["model"].state_dict(), live["model"])
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "all.pt")
    assert same(torch.load(tmp_path / "all.pt")["model"], live["model"])


def test_a_folder_of_dcps_own_writer_is_restored(tmp_path: Path) -> None:
    live = {name: one for name, one in parts().items() if name in ("model", "optimizer")}
    dcp.save(states_of(live), checkpoint_id=tmp_path / "dcp")
    other = {name: one for name, one in parts(seed=1).items() if name in live}
    chk = CFCheckpoint(**other)
    from_dcp(tmp_path / "dcp", tmp_path / "chk", like=chk)
    trusting = CFConfig(trust_extra_state=True)  # an import does not say who saved what it reads
    settings: dict[str, Any] = {"mode": CFMode.MANUAL, "chk_freq": 0, "config": trusting}
    with CFManager(tmp_path / "chk", chk, **settings) as cf_manager:
        assert cf_manager.restore()
    assert same(states_of(other), states_of(live))


def test_a_state_dict_by_names_of_parameters_is_restored_by_number(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = small(0)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=tmp_path / "dcp")
    other, other_optimizer = small(1)
    chk = CFCheckpoint(model=other, optimizer=other_optimizer)
    from_dcp(tmp_path / "dcp", tmp_path / "chk", like=chk)
    with CFManager(tmp_path / "chk", chk, mode=CFMode.MANUAL, chk_freq=0) as cf_manager:
        assert cf_manager.restore()
    assert same(other_optimizer.state_dict()["state"], optimizer.state_dict()["state"])


def small(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Linear(2, 3)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def test_metadata_in_the_form_of_other_versions_is_read(tmp_path: Path) -> None:
    state = {"a": torch.arange(4), "b": {1, 2}, "text": "é"}
    torch.save(state, tmp_path / "theirs.pt")
    torch_save_to_dcp(tmp_path / "theirs.pt", tmp_path / "dcp")
    path = tmp_path / "dcp" / ".metadata"
    record = pickle.loads(path.read_bytes())
    record.state_dict_metadata = OrderedDict(record.state_dict_metadata)
    record.state_dict_metadata["a"].chunks[0].offsets = [0]
    record.planner_data = record.storage_meta = None
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        path.write_bytes(pickle.dumps(record, protocol))
        from_dcp(tmp_path / "dcp", tmp_path / "chk", step=protocol)
        assert same({**checkfreq.load(tmp_path / "chk"), "rng": None}, {**state, "rng": None})


def test_the_place_in_the_data_goes_along(tmp_path: Path) -> None:
    def run(chk_dir: Path, *, stop_after: int) -> list[int]:
        model, optimizer = small(0)
        chk = CFCheckpoint(model=model, optimizer=optimizer)
        with CFManager(chk_dir, chk, mode=CFMode.MANUAL, chk_freq=0) as cf_manager:
            loader = torch.utils.data.DataLoader(torch.arange(8), shuffle=True)  # type: ignore[arg-type]
            batches = CFIterator(loader, cf_manager=cf_manager, seed=3)
            cf_manager.restore()
            seen: list[int] = []
            for ids in batches.steps(stop_after):
                seen += ids.tolist()
                cf_manager.weight_update()
            return seen

    first = run(tmp_path / "chk", stop_after=3)
    to_dcp(tmp_path / "chk", tmp_path / "dcp")
    from_dcp(tmp_path / "dcp", tmp_path / "again")
    assert sorted(first + run(tmp_path / "again", stop_after=8)) == list(range(8))


def test_a_strangers_pickle_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    dcp.save({"a": torch.ones(2), "b": Trap()}, checkpoint_id="values")
    dcp.save({"a": torch.ones(2)}, checkpoint_id="metadata")
    Path("metadata", ".metadata").write_bytes(pickle.dumps(Trap()))
    for folder in ("values", "metadata"):
        with pytest.raises(ConfigError, match="Unpickling can run any code"):
            from_dcp(folder, "chk")
    assert not Path("sprung").exists()
    assert not Path("chk").exists()


def test_files_outside_of_the_folder_are_not_read(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2)}, checkpoint_id=tmp_path / "dcp")
    path = tmp_path / "dcp" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = f"../dcp/{info.relative_path}"
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptCheckpointError, match="names of files in the folder"):
        from_dcp(tmp_path / "dcp", tmp_path / "chk")


def changed(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (path,) = folder.glob(name)
        path.write_bytes(change(path.read_bytes()))

    return apply


DAMAGE: dict[str, Callable[[Path], None]] = {
    "metadata": changed(".metadata", lambda data: data[:-30]),
    "cut": changed("*.distcp", lambda data: data[:-3000]),
    "forged": changed("*.distcp", lambda data: data.replace(b'"kind": "dict"', b'"kind": "tcid"')),
    "gone": lambda folder: next(folder.glob("*.distcp")).unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_folder_is_refused(damage: str, tmp_path: Path, live: dict[str, Any]) -> None:
    to_dcp(tmp_path / "chk", tmp_path / "dcp")
    DAMAGE[damage](tmp_path / "dcp")
    with pytest.raises((CorruptCheckpointError, ConfigError, OSError)):
        from_dcp(tmp_path / "dcp", tmp_path / "again")
    assert not list((tmp_path / "again").glob("step-*"))
