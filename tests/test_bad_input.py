"""Wrong arguments, objects, directories and checkpoints: a clear error each, nothing lost."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

import checkfreq
from checkfreq import CFCheckpoint, CFConfig, CFManager, CFMode
from checkfreq.errors import ConfigError, StateError
from checkfreq.persist.lock import DirectoryLock
from checkfreq.store.manifest import FORMAT_VERSION, MANIFEST_NAME, digest_of
from checkfreq.store.store import CheckpointStore
from tests.acceptance.disks import small_disk
from tests.fork_server import FORK_SERVER
from tests.users import NOBODY, public_folder

CONFIG = CFConfig(nice=0, takeover_s=0.2)


def build(width: int = 4, **tracked: Any) -> CFCheckpoint:
    torch.manual_seed(1)
    model = torch.nn.Linear(3, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return CFCheckpoint(model=model, optimizer=optimizer, **tracked)


def manager_of(chk_dir: Path, chk: CFCheckpoint, **arguments: Any) -> CFManager:
    settings = {"mode": CFMode.MANUAL, "chk_freq": 1, "config": CONFIG, **arguments}
    return CFManager(chk_dir, chk, **settings)


def update(chk: CFCheckpoint) -> None:
    chk.tracked["model"](torch.randn(2, 3)).sum().backward()
    chk.tracked["optimizer"].step()


def train(manager: CFManager, chk: CFCheckpoint, num_steps: int = 1) -> None:
    for _ in range(num_steps):
        update(chk)
        manager.step()
        manager.wait()


def weights(chk: CFCheckpoint) -> list[object]:
    return [p.tolist() for p in chk.tracked["model"].parameters()]


def contents(root: Path) -> dict[str, bytes]:
    """Every file of every checkpoint."""
    found = root.glob("step-*/*")
    return {str(path.relative_to(root)): path.read_bytes() for path in found}


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Path]:
    """A directory that holds steps 1 and 2, which must be there unchanged after the test."""
    chk_dir = tmp_path / "held"
    chk = build()
    with manager_of(chk_dir, chk) as manager:
        train(manager, chk, 2)
    before = contents(chk_dir)
    yield chk_dir
    assert contents(chk_dir) == before
    for step in (1, 2):
        CheckpointStore(chk_dir).verify(step)


@pytest.fixture(autouse=True)
def _nothing_is_left_running() -> Iterator[None]:
    before = {*threading.enumerate()}  # tests of stuck calls, in other files, leave threads behind
    yield
    left = {*threading.enumerate()} - before
    assert not [thread.name for thread in left if thread.name.startswith("checkfreq")]
    assert not _workers(), "a persist worker outlived its manager"


def _workers() -> list[str]:
    """Persist workers of this process that run."""
    tasks = Path(f"/proc/{os.getpid()}/task")
    found = []
    for task in tasks.iterdir():
        for pid in (task / "children").read_text().split():
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"checkfreq.persist.worker" in command:
                found.append(pid)
    return found


# ---- what is tracked


class Half:
    """Has one of the two methods."""

    def state_dict(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "None has no state"),
        (torch.zeros(2), "a torch.Tensor has no state"),
        (torch.nn.Linear, "the class Linear has no state"),
        (Half(), "load_state_dict"),
        ([1, torch.optim.SGD([torch.zeros(1)], lr=0.1)], r"CFCheckpoint\(thing_1=...\)"),
    ],
    ids=["None", "tensor", "class", "half", "list of objects"],
)
def test_an_object_without_state_dict_is_refused_by_name(value: object, said: str) -> None:
    with pytest.raises(StateError, match=said):
        CFCheckpoint(thing=value)


@pytest.mark.parametrize(
    ("leaf", "path"),
    [
        ({"a": {"b": [1, object()]}}, r"extra\.a\.b\[1\]"),
        ({"meta": torch.zeros(1, device="meta")}, r"extra\.meta"),
    ],
)
def test_what_cannot_be_kept_is_named_by_its_path_at_the_first_step(
    leaf: dict[str, object], path: str, tmp_path: Path
) -> None:
    chk = build(extra=leaf)
    with pytest.raises(StateError, match=path), manager_of(tmp_path / "chk", chk) as manager:
        train(manager, chk)


# ---- directories


def test_a_directory_of_another_user_is_refused() -> None:
    ours, theirs = FORK_SERVER.Pipe()
    with public_folder() as folder:
        child = FORK_SERVER.Process(target=_open_as_nobody, args=(theirs, folder))
        child.start()
        assert ours.poll(240)
        assert f"{folder} is not writable" in ours.recv()
        child.join(240)


def _open_as_nobody(answer: Connection, chk_dir: Path) -> None:
    chk = build()
    os.setuid(NOBODY)
    try:
        manager_of(chk_dir, chk)
    except ConfigError as error:
        answer.send(str(error))


def test_a_read_only_disk_is_refused(tmp_path: Path) -> None:
    with small_disk(tmp_path) as disk:
        disk.remount("ro")
        with pytest.raises(ConfigError, match="cannot make the checkpoint directory"):
            manager_of(disk.mount_point / "chk", build())
        with pytest.raises(ConfigError, match="is not writable; mount it read-write"):
            manager_of(disk.mount_point, build())


@pytest.mark.parametrize("first_call", ["restore", "step", "save"])
def test_a_directory_of_another_run_is_refused(first_call: str, tmp_path: Path) -> None:
    first, second = build(), build()
    with manager_of(tmp_path / "chk", first) as holder:
        train(holder, first)
    lock = DirectoryLock(tmp_path / "chk")
    assert lock.try_now(owner_pid=os.getpid())  # as the worker of another process has it
    with pytest.raises(ConfigError) as caught, manager_of(tmp_path / "chk", second) as late:
        getattr(late, first_call)()
    lock.release()
    assert isinstance(caught.value, SystemExit)  # a script ends as one to be started again
    assert caught.value.code == 75
    assert f"training process {os.getpid()}" in str(caught.value)
    assert "give each run a directory of its own" in str(caught.value)
    assert "takeover_s" in str(caught.value)
    assert CheckpointStore(tmp_path / "chk").steps() == [1]
    with manager_of(tmp_path / "chk", second) as late:
        assert late.restore()
    assert weights(second) == weights(first)


# ---- memory


def test_a_memory_limit_too_low_for_one_snapshot_is_refused_with_the_numbers(
    tmp_path: Path,
) -> None:
    chk = build()
    config = CFConfig(host_memory_limit=8192, nice=0)
    with (
        pytest.raises(ConfigError, match=r"needs a host buffer of .* KiB, but CFConfig") as caught,
        manager_of(tmp_path / "chk", chk, config=config) as manager,
    ):
        train(manager, chk)
    assert "host_memory_limit is 8.0 KiB. Raise the limit" in str(caught.value)


def test_a_memory_limit_too_low_to_restore_changes_nothing(held: Path) -> None:
    chk = build()
    before = weights(chk)
    config = CFConfig(host_memory_limit=8192, nice=0)
    with (
        pytest.raises(ConfigError, match="host_memory_limit"),
        manager_of(held, chk, config=config) as manager,
    ):
        manager.restore()
    assert weights(chk) == before


# ---- checkpoints that do not fit


def test_a_newer_format_is_refused_with_a_sentence_and_not_quarantined(tmp_path: Path) -> None:
    chk = build()
    with manager_of(tmp_path, chk) as manager:
        train(manager, chk, 2)
    _set_format_version(tmp_path / "step-00000002", FORMAT_VERSION + 1)
    before = contents(tmp_path)
    sentence = f"has format version {FORMAT_VERSION + 1}, and this checkfreq reads up to"

    with pytest.raises(ConfigError, match=sentence), manager_of(tmp_path, build()) as manager:
        manager.restore()
    with pytest.raises(ConfigError, match=sentence):
        checkfreq.load(tmp_path)

    assert contents(tmp_path) == before
    with manager_of(tmp_path, build()) as manager:
        assert manager.restore(1)


def _set_format_version(folder: Path, version: int) -> None:
    path = folder / MANIFEST_NAME
    data = json.loads(path.read_bytes())
    text = path.read_bytes().replace(
        f'"format_version": {data["format_version"]}'.encode(),
        f'"format_version": {version}'.encode(),
        1,
    )
    blank = text.replace(data["digest"].encode(), b"0" * 16, 1)
    path.write_bytes(text.replace(data["digest"].encode(), digest_of(blank).encode(), 1))
