"""Ways to restore a training into live tensors: ours and other libraries', each as a user calls it.

A `Reader` is made in the process that restores, when its training exists; that takes no part in
the time, as in a training that has made its manager or trainer before it resumes. The checkpoints
are written once, by the libraries themselves, and shared by the arms that read the same format.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

import checkfreq
from benchmarks.lab.saver import Training
from benchmarks.peers.dcp import Dcp
from benchmarks.peers.folders import Library
from benchmarks.peers.torch_files import Safetensors, TorchSave
from benchmarks.peers.trainers import Accelerate, Trainer
from checkfreq import CFCheckpoint, CFConfig, CFManager, CFMode, KeepLast

#: The reader that is no restore: the files of our checkpoint, read into a small buffer.
RAW = "raw"
OURS, LOAD = "checkfreq, restore()", "checkfreq.load(into=)"
#: From the memory of the worker of a process that was killed before.
MEMORY = "checkfreq, from memory"
_KEPT_S = 300.0
#: Slots of a manager: as usual, or where memory is short.
_DEFAULT, _ONE = CFConfig().num_slots, 1


class Reader(Protocol):
    """Restores from a folder into the training that it was made for."""

    def load(self, folder: Path) -> None:
        """Returns when every byte is in the live state."""
        ...

    def close(self) -> None:
        """Release threads, processes and memory."""
        ...


class Managed:
    """A manager, whose worker process starts when it is made, and its ``restore()``."""

    def __init__(
        self, training: Training, folder: Path, *, is_short: bool, kept_s: float = 0.0
    ) -> None:
        self._manager = _manager(
            training, folder, num_slots=_num_slots(is_short=is_short), kept_s=kept_s
        )
        self._source = "memory" if kept_s else "directory"

    def load(self, folder: Path) -> None:
        """The manager knows its folder. Raises ValueError if it restored from elsewhere."""
        assert self._manager.restore()
        if (found := self._manager.stats()["restored_from"]) != self._source:
            raise ValueError(f"expected a restore from the {self._source}, not from the {found}")

    def close(self) -> None:
        """Leave as a failing loop does: nothing is saved."""
        error = InterruptedError("the measurement is over")
        self._manager.__exit__(type(error), error, None)


class Load:
    """``checkfreq.load`` into live objects: no manager, no worker."""

    def __init__(self, training: Training, folder: Path, *, is_short: bool) -> None:
        self._training = training

    def load(self, folder: Path) -> None:
        """Model and optimizer, in place."""
        training = self._training
        checkfreq.load(folder, into={"model": training.model, "optimizer": training.optimizer})

    def close(self) -> None:
        """Nothing to release."""


class LoadFile:
    """``safetensors.torch.load_file``, and a copy into the live tensors."""

    def __init__(self, training: Training, folder: Path, *, is_short: bool) -> None:
        self._live = tensors_of(training)

    def load(self, folder: Path) -> None:
        """On the CPU its tensors are views of the mapped file: the copy reads it."""
        from safetensors.torch import load_file

        device = next(iter(self._live.values())).device
        found = load_file(folder / "state.safetensors", device=str(device))
        copy_into(self._live, found)

    def close(self) -> None:
        """Nothing to release."""


class TorchMapped:
    """``torch.load(mmap=True)``, the model's ``load_state_dict``, and a copy of the moments.

    The optimizer's ``load_state_dict`` would keep the mapped file as its state, and leave the
    reading to the first update.
    """

    def __init__(self, training: Training, folder: Path, *, is_short: bool) -> None:
        self._training = training

    def load(self, folder: Path) -> None:
        """Both parts, into the live tensors."""
        state = torch.load(folder / "state.pt", mmap=True, map_location="cpu", weights_only=True)
        self._training.model.load_state_dict(state["model"])
        live = self._training.optimizer.state_dict()["state"]
        for index, entries in state["optimizer"]["state"].items():
            copy_into(live[index], entries)

    def close(self) -> None:
        """Nothing to release."""


class OfLibrary:
    """A library of `benchmarks.peers`, which reads what it wrote."""

    def __init__(
        self,
        training: Training,
        folder: Path,
        *,
        is_short: bool,
        library: Callable[[Training], Library],
    ) -> None:
        self._library = library(training)

    def load(self, folder: Path) -> None:
        """Its own call."""
        self._library.load(folder)

    def close(self) -> None:
        """Close it."""
        self._library.close()


def tensors_of(training: Training) -> dict[str, torch.Tensor]:
    """The live tensors by the names that `Safetensors` gives them in its file."""
    return Safetensors(training)._tensors()


def copy_into(live: dict[str, Any], found: dict[str, Any]) -> None:
    """Copy every tensor to the live one of its name."""
    with torch.no_grad():
        for name, tensor in found.items():
            live[name].copy_(tensor)


def _manager(training: Training, folder: Path, *, num_slots: int, kept_s: float) -> CFManager:
    """One that saves on request."""
    return CFManager(
        folder,
        _tracked(training),
        mode=CFMode.MANUAL,
        chk_freq=0,
        retention=KeepLast(1),
        config=CFConfig(num_slots=num_slots, keep_in_memory_s=kept_s),
    )


def _num_slots(*, is_short: bool) -> int:
    return _ONE if is_short else _DEFAULT


def _tracked(training: Training) -> CFCheckpoint:
    return CFCheckpoint(model=training.model, optimizer=training.optimizer)


# ---- writing, once


def _write_ours(training: Training, folder: Path) -> None:
    with _manager(training, folder, num_slots=_ONE, kept_s=0.0) as manager:
        manager.step()
        manager.save(wait=True)


def leave_in_memory(training: Training, folder: Path, *, is_short: bool) -> None:
    """Save, so that a worker keeps the snapshot once this process is killed."""
    manager = _manager(training, folder, num_slots=_num_slots(is_short=is_short), kept_s=_KEPT_S)
    manager.step()
    manager.save(wait=True)


def _write(training: Training, folder: Path, *, library: Callable[[Training], Library]) -> None:
    folder.mkdir()
    writer = library(training)
    pending = writer.save(folder)
    if pending is not None:
        pending.written()
    writer.close()


#: By format: writes a training into a folder that does not exist yet.
WRITERS: dict[str, Callable[[Training, Path], None]] = {
    "ours": _write_ours,
    "safetensors": partial(_write, library=Safetensors),
    "torch": partial(_write, library=TorchSave),
    "dcp": partial(_write, library=partial(Dcp, name="dcp.save")),
    "trainer": partial(_write, library=Trainer),
    "accelerate": partial(_write, library=Accelerate),
}


@dataclass(frozen=True, slots=True)
class Arm:
    """A way to restore: what it reads, and the distributions that it needs.

    ``with_slot``: in short memory it has room for a snapshot beside: a manager without refuses.
    ``from_memory``: what it restores was left by a process that was killed just before.
    """

    format: str
    make: Callable[..., Reader]
    packages: tuple[str, ...] = ()
    with_slot: bool = False
    from_memory: bool = False


ARMS: dict[str, Arm] = {
    OURS: Arm("ours", Managed, with_slot=True),
    LOAD: Arm("ours", Load),
    MEMORY: Arm("ours", partial(Managed, kept_s=_KEPT_S), from_memory=True),
    "safetensors, load_file": Arm("safetensors", LoadFile, ("safetensors",)),
    "torch.load(mmap=True)": Arm("torch", TorchMapped),
    "dcp.load": Arm("dcp", partial(OfLibrary, library=partial(Dcp, name="dcp.save"))),
    "transformers Trainer": Arm(
        "trainer", partial(OfLibrary, library=Trainer), ("transformers", "accelerate")
    ),
    "accelerate": Arm(
        "accelerate", partial(OfLibrary, library=Accelerate), ("accelerate", "safetensors")
    ),
}
OUR_ARMS = (OURS, LOAD, MEMORY)
