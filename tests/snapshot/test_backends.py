"""One class and one line support an accelerator; every other kind is refused by name."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from checkfreq import CFManager, CFMode
from checkfreq.config import CFConfig
from checkfreq.errors import StateError
from checkfreq.snapshot.backends import (
    BACKENDS,
    backend_for_slots,
    backend_in_use,
    backend_of,
    is_capturing,
    register,
)
from checkfreq.snapshot.cuda import CudaDevice
from checkfreq.snapshot.device import DriverError, MemoryUse, Pair
from checkfreq.snapshot.device_engine import DeviceEngine
from checkfreq.snapshot.engine import view_in_slot
from checkfreq.snapshot.snapshotter import engine_for
from checkfreq.state.capture import capture
from checkfreq.state.checkpoint import CFCheckpoint
from checkfreq.state.tensors import _KEPT_ON, is_kept_on, keep_tensors_on
from checkfreq.types import SnapshotPlace
from tests.fork_server import FORK_SERVER
from tests.snapshot.test_snapshotter import Shots

TOY = torch.device("cpu")
CUDA = torch.device("cuda", 0)


class ToyDevice:
    """An accelerator that shares the host's memory and does at once what it is told.

    All tensors of floating point are on it.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.num_packed = 0
        self.num_copied = 0
        self.in_use = True
        self.capturing = False
        self.current = "training's"

    def owner(self, tensor: Tensor) -> torch.device | None:
        return TOY if tensor.is_floating_point() else None

    def current_stream(self, device: torch.device) -> str:
        return self.current

    def side_stream(self, device: torch.device) -> str:
        return "ours"

    def return_stream(self, stream: str) -> None:
        assert stream == "ours"

    def record(self, stream: str) -> str:
        return "event"

    def wait(self, stream: str, event: str) -> None:
        pass

    def is_done(self, event: str) -> bool:
        return True

    def synchronize(self, event: str) -> None:
        assert threading.get_ident() != self.thread

    def elapsed_s(self, start: str, end: str) -> float:
        return 0.0

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def allocate_host(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def copy(self, pairs: Sequence[Pair], *, stream: str) -> None:
        for target, source in pairs:
            target.copy_(source)
        self.num_copied += len(pairs)

    def pack(self, targets: list[Tensor], sources: list[Tensor], *, stream: str) -> None:
        torch._foreach_copy_(targets, sources)
        self.num_packed += len(targets)

    def keep(self, tensors: Sequence[Tensor], *, stream: str) -> None:
        pass

    def free_bytes(self, device: torch.device) -> int | None:
        assert threading.get_ident() != self.thread, "asks the driver while training waits"
        return 8 << 30

    def memory_use(self, device: torch.device) -> MemoryUse:
        return MemoryUse(0, 0, 8 << 30, 0)

    def segment_bytes(self, num_bytes: int) -> int:
        return num_bytes

    def is_capturing(self) -> bool:
        return self.capturing

    def is_in_use(self) -> bool:
        return self.in_use

    def devices(self) -> list[torch.device]:
        return [TOY] if self.in_use else []

    def names(self) -> list[str]:
        return ["Toy 1"]

    def runtime_version(self) -> str | None:
        return "1.0"

    def prepare_thread(self) -> None:
        pass

    def register_host(self, address: int, num_bytes: int) -> DriverError | None:
        return None

    def unregister_host(self, address: int) -> DriverError | None:
        return None


@pytest.fixture
def toy() -> Iterator[ToyDevice]:
    device = ToyDevice()
    register("cpu", device)
    yield device
    del BACKENDS["cpu"]
    keep_tensors_on("cpu", list)


@pytest.fixture
def beside() -> Iterator[ToyDevice]:
    """An accelerator that is used and holds no state."""
    device = ToyDevice()
    register("mtia", device)
    yield device
    _unregister("mtia")


def _unregister(kind: str) -> None:
    del BACKENDS[kind], _KEPT_ON[kind]
    is_kept_on.cache_clear()


# ---- a backend is one class


@pytest.mark.parametrize("place", list(SnapshotPlace))
def test_a_registered_class_takes_snapshots(toy: ToyDevice, place: SnapshotPlace) -> None:
    tensors = {
        "large": torch.arange(100_000.0),
        "strided": torch.arange(60.0).reshape(6, 10).t(),
        "small": torch.arange(7.0),
        "on_host": torch.arange(5),
    }
    chk = CFCheckpoint(d=tensors, rng=False)
    shots = Shots(chk, engine=lambda: engine_for(chk, place=place))
    _, snapshot = shots.snapshot()
    assert isinstance(shots.snapshotter.engine, DeviceEngine)
    found = {c.name: view_in_slot(c, snapshot.slot).tolist() for c in snapshot.copies}
    assert found == {f"d.{name}": tensor.tolist() for name, tensor in tensors.items()}
    assert toy.num_copied
    shots.close()


def test_the_stream_of_each_update_is_known_from_the_first_on(
    beside: ToyDevice, tmp_path: Path
) -> None:
    """Before the first boundary as well, when nobody knows yet where the state will be."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    chk = CFCheckpoint(model=model, optimizer=optimizer, rng=False)
    with CFManager(tmp_path, chk, config=CFConfig(stop_signals=())) as manager:
        streams = manager._pipeline._streams
        for number in range(3):
            beside.current = f"the loop's {number}"
            model(torch.ones(2, 4)).sum().backward()
            with manager.updating() if number == 1 else nullcontext():
                optimizer.step()
            beside.current = "training's"
            manager.step()
            assert streams.read(TOY) == [f"the loop's {number}"]


def test_a_process_without_an_accelerator_has_none_in_use() -> None:
    assert backend_of([TOY]) is backend_of([]) is backend_in_use() is None
    assert backend_of([TOY, CUDA]) is backend_for_slots() is BACKENDS["cuda"]
    assert not is_capturing()


def test_state_on_accelerators_of_two_kinds_is_refused(toy: ToyDevice) -> None:
    with pytest.raises(StateError, match=r"several kinds \(cpu, cuda\)"):
        backend_of([torch.device("cpu"), CUDA])


# ---- other kinds


@pytest.mark.parametrize("kind", ["xla", "mps"])
def test_a_device_without_a_backend_is_refused_by_name(kind: str) -> None:
    assert not is_kept_on(torch.device(kind))
    with pytest.raises(StateError, match=rf"device {kind}:1 cannot be kept; expected .*cuda"):
        backend_of([torch.device(kind, 1)])


def test_a_kind_that_is_registered_is_kept_from_then_on() -> None:
    assert {"cpu", *BACKENDS} == _KEPT_ON.keys()
    assert not is_kept_on(torch.device("mtia", 0))
    try:
        register("mtia", ToyDevice())
        assert is_kept_on(torch.device("mtia", 0))
    finally:
        _unregister("mtia")


class Inner:
    """An object that tracks a tensor."""

    def __init__(self) -> None:
        self.tensor = torch.ones(3)

    def state_dict(self) -> dict[str, Any]:
        return {"inner": {"x": self.tensor}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("loaded")


#: Where a lazy tensor may come in, one place after the other.
ENTRANCES = {
    "constructor": "d.x",
    "state dict": "holder.inner.x",
    "optimizer state": "optimizer.state.0.momentum_buffer",
    "module": "model.weight",
    "restore": "model.weight",
}


def let_in(where: str, chk_dir: Path) -> None:
    model, holder = nn.Linear(2, 2), Inner()
    optimizer, lazy = torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(3, device="lazy")
    d = {"x": lazy if where == "constructor" else torch.ones(3)}
    if where == "restore":
        with CFManager(chk_dir, CFCheckpoint(model=model), mode=CFMode.MANUAL, chk_freq=1) as one:
            one.step()
    chk = CFCheckpoint(model=model, optimizer=optimizer, holder=holder, d=d)
    with CFManager(chk_dir, chk, mode=CFMode.MANUAL, chk_freq=1) as manager:
        if where == "state dict":
            holder.tensor = lazy
        if where == "optimizer state":
            optimizer.state[model.weight]["momentum_buffer"] = lazy
        if where in ("module", "restore"):
            model.to("lazy")
        if where == "restore":
            manager.restore(only=["model"])
        manager.step()


def say_what_is_refused(folder: Path, pipe: Connection) -> None:
    import torch._lazy.ts_backend

    torch._lazy.ts_backend.init()
    said = {}
    for where in ENTRANCES:
        try:
            let_in(where, folder / where)
        except StateError as error:
            said[where] = str(error)
    pipe.send(said)


@pytest.mark.more
def test_a_lazy_tensor_is_refused_by_name_wherever_it_comes_in(tmp_path: Path) -> None:
    """In a process of its own, for which the lazy backend is initialised; it must not crash."""
    ours, theirs = FORK_SERVER.Pipe(duplex=False)
    process = FORK_SERVER.Process(target=say_what_is_refused, args=(tmp_path, theirs))
    process.start()
    theirs.close()
    said = ours.recv()
    process.join()
    assert {where: text.partition(" cannot be kept;")[0] for where, text in said.items()} == {
        where: f"{name}: a tensor on the device lazy:0" for where, name in ENTRANCES.items()
    }
    assert process.exitcode == 0


def test_a_tensor_whose_storage_was_freed_is_refused_by_name() -> None:
    tensor = torch.ones(3)
    chk = CFCheckpoint(d={"x": tensor}, rng=False)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(StateError, match=r"d\.x: a tensor of shape \[3\] has no memory"):
        capture(chk)


# ---- CUDA, as far as it goes without a device


def test_a_process_that_never_used_cuda_stays_without_a_context() -> None:
    assert not torch.cuda.is_initialized()
    assert CudaDevice().free_bytes(CUDA) is None
    assert CudaDevice().names() == []
    assert not CudaDevice().is_in_use()
    assert not torch.cuda.is_initialized()
