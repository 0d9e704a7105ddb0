"""Hostile directories for every reader.

Every case is a copy of a valid directory, changed by chance (``grammar``), for one reader. Reading
succeeds or ends in one of our own errors, soon; then nothing live has changed, nothing is imported,
and no message holds what could command a terminal. A failure names its seed and case.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import checkfreq
from checkfreq import CFCheckpoint, CFConfig, CFManager, CFMode, cli
from checkfreq.errors import CheckFreqError
from checkfreq.integrations.dcp import CFStorageReader, CFStorageWriter
from checkfreq.restore.apply import RestorePlan, prepare
from checkfreq.restore.found import FoundCheckpoint
from checkfreq.restore.in_place import InPlace
from checkfreq.restore.restorer import Restorer
from checkfreq.state.positions import Positions, by_name
from iterators.errors import CorruptPositionError, ResumeMismatchError
from iterators.testing import digest
from tests.fixtures import format_2, format_3, make_format_1
from tests.hostile import grammar

OURS = (CheckFreqError, CorruptPositionError, ResumeMismatchError)
#: What DCP's planner says of a state dict that does not fit, in its own words.
_PLANNERS = ("Missing key in", "Size mismatch", "Failed to validate", "Invalid checkpoint metadata")


class Place:
    """An iterator's position, as a manager sees it."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"epoch": 1, "batch": 2, "seen": [1, (2, 3)]}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self.state = dict(state)

    def finish(self) -> None: ...


class Meter:
    """What a user writes: whatever is loaded becomes attributes."""

    def __init__(self) -> None:
        self.count, self.best, self.history = 0, None, [torch.zeros(2)]

    def state_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        self.__dict__.update(state)


def rich_objects() -> dict[str, Any]:
    """One object of every kind."""
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    adam = torch.optim.Adam(nn.Linear(2, 2).parameters(), lr=torch.tensor(0.1))
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    warm_up = torch.optim.lr_scheduler.LinearLR(adam)
    decay = torch.optim.lr_scheduler.LambdaLR(adam, lambda epoch: 0.9**epoch)
    both = torch.optim.lr_scheduler.SequentialLR(adam, [warm_up, decay], [3])
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    meters = {"best": 1.0, "t": torch.arange(4.0), "a": np.arange(3), "odd": ({1}, b"x", 1 + 2j)}
    meters |= {"more": {"dtype": torch.float16, "device": torch.device("cpu"), "n": np.float32(1)}}
    stateful = {"plateau": plateau, "both": both, "scaler": scaler, "meter": Meter()}
    return {"model": model, "optimizer": optimizer, "adam": adam, "meters": meters, **stateful}


def train(objects: dict[str, Any]) -> None:
    """An update; no scheduler's, whose values a checkpoint may choose."""
    for name in ("optimizer", "adam"):
        for group in objects[name].param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        objects[name].step()


def write_rich(chk_dir: Path) -> None:
    objects = rich_objects()
    chk = CFCheckpoint(**objects)
    with CFManager(chk_dir, chk, mode=CFMode.MANUAL, chk_freq=1, config=_CONFIG) as manager:
        manager.register_position("train", Place())
        manager.restore()
        for _ in range(2):
            train(objects)
            manager.step()
            manager.wait()
        manager.save(keep=True, metrics={"loss": 0.5})


_CONFIG = CFConfig(nice=0, takeover_s=5.0)


def dcp_state() -> dict[str, Any]:
    return {"model": nn.Linear(3, 2).state_dict(), "epoch": 3, "pair": [torch.ones(2), "b"]}


def write_dcp(chk_dir: Path) -> None:
    with warnings.catch_warnings():  # DCP warns of a single process
        warnings.simplefilter("ignore")
        for step in (1, 2):
            dcp.save(dcp_state(), storage_writer=CFStorageWriter(chk_dir, step=step), no_dist=True)


@dataclass(frozen=True)
class Base:
    """A valid directory, and the live objects that fit it."""

    chk_dir: Path
    objects: Callable[[], dict[str, Any]]
    is_dcp: bool = False


def bases(folder: Path) -> dict[str, Base]:
    """Of all formats, of one rank and of two, of a manager and of DCP."""
    write_rich(folder / "rich")
    write_dcp(folder / "dcp")
    old = [one.FOLDER for one in (make_format_1, format_2, format_3)]
    return {
        "rich": Base(folder / "rich", rich_objects),
        "dcp": Base(folder / "dcp", dcp_state, is_dcp=True),
        **{one.name: Base(one, make_format_1.objects) for one in old},
    }


# What must not change


def live_state(objects: dict[str, Any]) -> str:
    """A digest of all that a restore may change, generators included."""
    states = [one if isinstance(one, dict) else one.state_dict() for one in objects.values()]
    return digest([states, random.getstate(), torch.get_rng_state(), np.random.get_state()])


#: Anything else may have an attribute of that name, restored from a hostile state.
_OF_SCHEDULERS = (torch.optim.lr_scheduler.SequentialLR, torch.optim.lr_scheduler.ChainedScheduler)


def hidden_methods(objects: dict[str, Any]) -> set[str]:
    """Methods of tracked objects, and of those inside of them, with an attribute in their place."""
    owners = dict(objects)
    for name, value in objects.items():
        if isinstance(value, _OF_SCHEDULERS):
            owners |= {f"{name}.{i}": one for i, one in enumerate(value._schedulers)}
    return {
        f"{path}.{name}"
        for path, owner in owners.items()
        for name in getattr(owner, "__dict__", ())
        if callable(getattr(type(owner), name, None))
    }


# Readers


def by_load(chk_dir: Path, base: Base, chance: random.Random) -> None:
    checkfreq.load(chk_dir, rank=chance.choice([0, 0, 0, 1, 7]))


def into_live(objects: dict[str, Any], chk_dir: Path, *, strict: bool) -> None:
    """What a manager's restore does, without a worker."""
    positions = Positions()
    positions.register("train", Place())
    loading = InPlace(
        partial(prepare, CFCheckpoint(**objects), strict=strict, path=str(chk_dir)),
        set_positions=lambda plan: positions.restore(by_name(plan.all_positions)),
        verifies=True,
    )

    def use(found: FoundCheckpoint) -> RestorePlan:
        plan = loading.look(found)
        loading.change(plan)
        return plan

    done = Restorer(chk_dir, num_threads=1).find(None, use)
    if done is not None:
        done[1].apply_rng()


def by_restore(chk_dir: Path, base: Base, chance: random.Random) -> None:
    """Into fresh objects; they keep what they had unless all of it fits."""
    objects = base.objects()
    with _unchanged_by_failure(objects):
        into_live(objects, chk_dir, strict=chance.random() < 0.7)


def by_manager(chk_dir: Path, base: Base, chance: random.Random) -> None:
    objects = base.objects()
    chk = CFCheckpoint(**objects)
    with (
        _unchanged_by_failure(objects),
        CFManager(chk_dir, chk, mode=CFMode.MANUAL, chk_freq=0, config=_CONFIG) as manager,
    ):
        manager.register_position("train", Place())
        manager.restore()


def by_command(chk_dir: Path, base: Base, chance: random.Random) -> None:
    for command in (["verify"], ["ls"], ["show", "--objects", "--tensors"], ["show", "--json"]):
        assert cli.main([command[0], str(chk_dir), *command[1:]]) in (0, 1, 2)


def by_dcp(chk_dir: Path, base: Base, chance: random.Random) -> None:
    """Where values are pickled, only by default, or the tensors alone: pickles can do anything."""
    options = {"trust_pickle": base.is_dcp and chance.random() < 0.7}
    CFStorageReader(chk_dir, **options).read_metadata()
    state: dict[str, Any] = {}
    for name, value in base.objects().items():
        if not base.is_dcp or name == "model":
            state[name] = value.state_dict() if hasattr(value, "state_dict") else value
    try:
        dcp.load(state, storage_reader=CFStorageReader(chk_dir, **options), no_dist=True)
    except dcp.api.CheckpointException as error:
        for failure, _ in error.failures.values():
            if not str(failure).startswith(_PLANNERS):
                raise failure from None


#: Each as often as it is asked: a manager starts a process.
READERS = [by_manager, *[by_command] * 3, *[by_dcp] * 4, *[by_load] * 6, *[by_restore] * 12]
OF_A_MANAGER = (by_manager, by_restore)


@contextlib.contextmanager
def _unchanged_by_failure(objects: dict[str, Any]) -> Iterator[None]:
    before, hidden = live_state(objects), hidden_methods(objects)
    try:
        yield
    except OURS as error:
        # Damage that is found on the way leaves parts of a step where none validates, and says so.
        if "live objects hold parts of step" not in str(error):
            assert live_state(objects) == before, "a failed restore changed something live"
        raise
    finally:
        assert hidden_methods(objects) == hidden, "something that can be called was replaced"


# Running


class Fuzzer:
    """Cases in a scratch folder, from one seed. ``said`` is what was printed and logged since it
    was last asked."""

    def __init__(self, folder: Path, said: Callable[[], str], *, seed: int) -> None:
        self._folder, self._said, self._seed = folder, said, seed
        self._bases = bases(folder / "bases")
        self._modules = set(sys.modules)

    def run(self, case: int) -> None:
        """Raise AssertionError, naming the case, unless the reader does as it should."""
        chance = random.Random(f"{self._seed}-{case}")
        random.seed(case)
        torch.manual_seed(case)
        np.random.seed(case)
        base = self._bases[chance.choice(["rich", "rich", "rich", *sorted(self._bases)])]
        readers = [one for one in READERS if not (base.is_dcp and one in OF_A_MANAGER)]
        reader = chance.choice(readers)
        chk_dir = self._folder / "case"
        shutil.rmtree(chk_dir, ignore_errors=True)
        shutil.copytree(base.chk_dir, chk_dir)
        folders = sorted(chk_dir.glob("step-*"))
        for folder in folders if chance.random() < 0.6 else folders[-1:]:
            grammar.forge(chance, folder)
        where = f"seed {self._seed} case {case} ({base.chk_dir.name}, {reader.__name__})"
        raised = ""
        try:
            reader(chk_dir, base, chance)
        except OURS as error:
            raised = f"{error}\n{error!r}\n"
        except Exception as error:
            raise AssertionError(f"{where}: {type(error).__name__}: {error!s:.300}") from error
        text = self._said() + raised
        bad = sorted({c for c in text if not c.isprintable() and c not in "\n\t"})
        assert not bad, f"{where}: {bad} in {text!r:.500}"
        new = {name for name in set(sys.modules) - self._modules if _is_unexpected(name)}
        assert not new, f"{where}: imported {sorted(new)}"


def _is_unexpected(name: str) -> bool:
    return name.startswith(("torch._inductor", "torch._dynamo", "torch.hub", "torch.onnx"))
