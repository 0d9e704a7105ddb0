"""Made-up files of other libraries: their import changes nothing else, grows little, and ends."""

from __future__ import annotations

import contextlib
import os
import pathlib
import pickle
import random
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import metadata

import checkfreq
from checkfreq.errors import (
    CheckFreqError,
    ConfigError,
    CorruptCheckpointError,
    StateError,
    StorageError,
)
from checkfreq.formats import from_dcp, from_pretrained, from_safetensors, from_torch_save
from checkfreq.formats.dcp_metadata import metadata_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


@pytest.fixture(scope="module")
def _saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("imports") / "dcp"
    state = {"model": {"w": torch.ones(4, 2), "b": torch.ones(2)}, "steps": [5, {"a": 1}]}
    dcp.save(state, checkpoint_id=folder)
    return folder


@pytest.fixture
def folder(_saved: Path, tmp_path: Path) -> Path:
    """A folder of DCP, to be changed."""
    return Path(shutil.copytree(_saved, tmp_path / "dcp"))


# ---- DCP's pickle

#: What DCP's own classes and functions are, for whoever unpickles them.
GLOBALS = [
    *("pathlib Path", "torch Size", "torch float32", "torch.serialization _get_layout"),
    *("torch.distributed.checkpoint.metadata Metadata", "collections OrderedDict"),
]
#: Changes an attribute of what is on the stack, in both forms that a pickle has for it.
BUILDS = {
    "slots": b"N}X\x05\x00\x00\x00trickK\x01s\x86b",
    "fields": b"}X\x05\x00\x00\x00trickK\x01sb",
}


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("name", GLOBALS)
def test_a_pickle_changes_no_class_or_function(name: str, build: str, folder: Path) -> None:
    module, _, attribute = name.partition(" ")
    record = (folder / ".metadata").read_bytes()
    trick = f"c{module}\n{attribute}\n".encode() + BUILDS[build] + b"0"
    (folder / ".metadata").write_bytes(record[:2] + trick + record[11:])
    with pytest.raises(ConfigError, match="Unpickling can run any code"):
        from_dcp(folder, folder.parent / "chk")
    owner: Any = {"pathlib": pathlib, "torch": torch}.get(module)
    assert not hasattr(getattr(owner, attribute, None), "trick")


def test_a_pickle_calls_nothing_but_makes_records(folder: Path) -> None:
    for call in (b"cpathlib\nPath\n)R)R.", b"\x80\x02])\x81.", b"\x82\x01."):
        with pytest.raises((pickle.UnpicklingError, ValueError)):
            metadata_of(call)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch names storages that are deprecated
@pytest.mark.parametrize("num_cases", [30, pytest.param(500, marks=pytest.mark.more)])
@pytest.mark.parametrize("kind", ["dcp", "torch", "old torch"])
def test_spoilt_pickles_are_read_or_refused(kind: str, num_cases: int, folder: Path) -> None:
    source, path, reads = folder, folder / ".metadata", from_dcp
    if kind != "dcp":
        source = path = folder.parent / "a.pt"
        content, reads = {"a": [1, {"b": (2, "x")}], "t": torch.ones(2)}, from_torch_save
        torch.save(content, path, _use_new_zipfile_serialization=kind == "torch")
    data = path.read_bytes()
    begin = data.index(b"\x80\x02}") if kind == "torch" else 0
    end = data.index(b"PK", begin) if kind == "torch" else len(data)
    for case in range(num_cases):
        chance, spoilt = random.Random(case), bytearray(data)
        for _ in range(chance.choice([1, 1, 2, 8])):
            other = chance.choice([*b"bRs0.tu\x81", chance.randrange(256)])
            spoilt[chance.randrange(begin, end)] = other
        path.write_bytes(spoilt)
        with contextlib.suppress(CheckFreqError):
            reads(source, folder.parent / f"chk{case}")


@pytest.mark.parametrize(
    "record", [b"Nr\x00\x00\x00\x08.", b"\x96\x00\x00\x00\x10\x00\x00\x00\x00."]
)
def test_a_pickle_of_nine_bytes_takes_no_gigabytes(record: bytes, folder: Path) -> None:
    (folder / ".metadata").write_bytes(b"\x80\x04" + record)
    tracemalloc.start()
    try:
        with pytest.raises(CheckFreqError):
            from_dcp(folder, folder.parent / "chk")
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def of_w(record: Any) -> Any:
    return record.state_dict_metadata["model.w"]


def at_one_place(record: Any) -> None:
    (place,) = (p for i, p in record.storage_data.items() if i.fqn == "model.w")
    record.storage_data |= {metadata.MetadataIndex(f"w{n}", [0, 0]): place for n in range(9)}


def large(record: Any) -> None:
    of_w(record).size = of_w(record).chunks[0].sizes = torch.Size([2**40, 2])


def first_place(record: Any) -> Any:
    return next(iter(record.storage_data.values()))


#: What the metadata of the folder is changed to say.
MADE_UP: dict[str, Callable[[Any], object]] = {
    "a hole": lambda r: setattr(of_w(r), "size", torch.Size([8, 2])),
    "a chunk twice": lambda r: of_w(r).chunks.extend(of_w(r).chunks),
    "a size beyond all memory": large,
    "many at one place": at_one_place,
    "a name that never ends": lambda r: setattr(first_place(r), "relative_path", doubled("x")),
    "no text": lambda r: r.planner_data.update({"model.w": ("model", "\ud800")}),
    "a dtype that is not kept": lambda r: setattr(of_w(r).properties, "dtype", torch.quint8),
}


@pytest.mark.parametrize("what", MADE_UP)
def test_metadata_that_says_more_than_the_files_hold_is_refused(what: str, folder: Path) -> None:
    path = folder / ".metadata"
    record = pickle.loads(path.read_bytes())
    MADE_UP[what](record)
    path.write_bytes(pickle.dumps(record))  # which DCP itself would read
    with pytest.raises(CorruptCheckpointError, match=r"expected one of dcp\.save"):
        from_dcp(folder, folder.parent / "chk")
    assert not (folder.parent / "chk").exists()


# ---- values that grow


def doubled(value: Any, times: int = 40) -> Any:
    """Lists of two, of which each holds the next one twice."""
    for _ in range(times):
        value = [value, value]
    return value


@pytest.mark.parametrize("inner", [1, "text " * 1000, torch.ones(2)], ids=["int", "text", "tensor"])
def test_values_that_would_grow_without_end_are_refused(inner: Any, tmp_path: Path) -> None:
    loop: list[Any] = []
    loop.append(loop)
    for value, reason in ((doubled(inner), "a copy for each place"), (loop, "or within itself")):
        torch.save({"a": value}, tmp_path / "small.pt")
        assert (tmp_path / "small.pt").stat().st_size < 10_000
        with pytest.raises(StateError, match=reason):
            from_torch_save(tmp_path / "small.pt", tmp_path / "chk")


def test_a_tensor_that_is_larger_than_memory_once_it_is_written_out_is_refused(
    tmp_path: Path,
) -> None:
    torch.save({"a": torch.zeros(1).expand(2**50)}, tmp_path / "small.pt")
    with pytest.raises(StorageError, match="expected memory for"):
        from_torch_save(tmp_path / "small.pt", tmp_path / "chk")


def test_values_that_some_places_share_are_taken(tmp_path: Path) -> None:
    config = {f"option {n}": n / 3 for n in range(100)}
    content = {
        "history": [{"config": config, "epoch": n} for n in range(100)],
        "zeros": [0] * 10**5,
    }
    torch.save(content, tmp_path / "shared.pt")
    from_torch_save(tmp_path / "shared.pt", tmp_path / "chk")
    back = checkfreq.load(tmp_path / "chk")
    assert {name: back[name] for name in content} == content


@pytest.mark.parametrize(
    "value",
    [
        *({"$deque": 5}, {"$range": "x"}, {"$slice": [1] * 4}, {"$torch.layout": "hub"}),
        *({"$frozenset": [[1]]}, {"$timedelta": [10**99, 0, 0]}),
    ],
    ids=str,
)
def test_a_tag_with_a_value_that_no_export_writes_is_refused(value: Any, tmp_path: Path) -> None:
    torch.save({"a": value}, tmp_path / "odd.pt")
    with pytest.raises(CorruptCheckpointError, match="the form that exports give them"):
        from_torch_save(tmp_path / "odd.pt", tmp_path / "chk")


# ---- what is no file


@pytest.mark.parametrize(
    ("reads", "name"),
    [
        (from_torch_save, "weights.pt"),
        (from_safetensors, "weights.safetensors"),
        (from_pretrained, "hub/model.safetensors"),
        (from_pretrained, "hub/model.safetensors.index.json"),
        (from_dcp, "dcp/.metadata"),
        (from_dcp, "dcp/__0_0.distcp"),
    ],
)
def test_a_fifo_is_refused_instead_of_waited_for(
    reads: Callable[[Path, Path], int], name: str, folder: Path
) -> None:
    path = folder.parent / name
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    os.mkfifo(path)
    source = path.parent if "/" in name else path
    with pytest.raises(ConfigError, match="FIFO, socket or device: expected a regular file"):
        reads(source, folder.parent / "chk")


def test_links_are_followed_as_in_a_cache_of_downloads(tmp_path: Path) -> None:
    hub = tmp_path / "hub"
    hub.mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "blob")
    (hub / "model.safetensors").symlink_to("../blob")
    (tmp_path / "link").symlink_to("hub")
    from_pretrained(tmp_path / "link", tmp_path / "chk")
    from_safetensors(hub / "model.safetensors", tmp_path / "chk", step=1)
    for step in (0, 1):
        assert checkfreq.load(tmp_path / "chk", step=step)["model"]["w"].tolist() == [1, 1]


def test_a_record_that_ends_within_a_number_is_damage(folder: Path) -> None:
    (folder / ".metadata").write_bytes(b"\x80\x04J\x01")
    with pytest.raises(CorruptCheckpointError):
        from_dcp(folder, folder.parent / "chk")
