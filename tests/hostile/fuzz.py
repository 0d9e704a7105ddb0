"""Hostile directories for every reader: ``python -m tests.hostile.fuzz --seconds 600``.

Every case is a copy of a valid directory, changed by chance (``grammar``), for one reader. Reading
succeeds or ends in one of our own errors, soon; then nothing live has changed, nothing is imported,
and no message holds what could command a terminal.

A failure names its seed and case; ``--seed S --case N`` is that case alone.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import random
import shutil
import signal
import sys
import tempfile
import time
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
from tests.fixtures import format_2, format_3, make_format_1
from tests.hostile import grammar

#: Long for what takes milliseconds: only a reader that hangs needs it.
DEADLINE_S = 120

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
    for fixture in (make_format_1, format_2, format_3):
        shutil.copytree(fixture.FOLDER, folder / fixture.FOLDER.name)
    one = make_format_1.objects
    return {
        "rich": Base(folder / "rich", rich_objects),
        "format-1": Base(folder / "format-1", one),
        "format-2": Base(folder / "format-2", one),
        "format-3": Base(folder / "format-3", one),
        "dcp": Base(folder / "dcp", dcp_state, is_dcp=True),
    }


# What must not change


def frozen(value: Any) -> Any:
    """A value that equals another's only if they are the same bit for bit."""
    if isinstance(value, torch.Tensor):
        data = value.detach().contiguous().reshape(-1).view(torch.uint8)
        return str(value.dtype), tuple(value.shape), data.numpy().tobytes()
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, dict):
        return [(repr(key), frozen(inner)) for key, inner in value.items()]
    if isinstance(value, list | tuple):
        return [type(value), *map(frozen, value)]
    return repr(value)


def live_state(objects: dict[str, Any]) -> Any:
    """All that a restore may change, generators included."""
    states = {
        name: value if isinstance(value, dict) else value.state_dict()
        for name, value in objects.items()
    }
    generators = random.getstate(), torch.get_rng_state(), np.random.get_state()
    return frozen([states, *generators])


def can_be_called(owner: Any, name: str) -> bool:
    try:
        return callable(getattr(owner, name, None))
    except Exception:  # a property, of values that mean nothing to it
        return False


#: Anything else may have an attribute of that name, restored from a hostile state.
_OF_SCHEDULERS = (torch.optim.lr_scheduler.SequentialLR, torch.optim.lr_scheduler.ChainedScheduler)


def methods(objects: dict[str, Any]) -> dict[str, Any]:
    """By path, everything that can be called on tracked objects, and on those inside of them."""
    found: dict[str, Any] = {}
    for name, value in objects.items():
        inner = value._schedulers if isinstance(value, _OF_SCHEDULERS) else []
        for path, owner in [(name, value), *((f"{name}.{i}", v) for i, v in enumerate(inner))]:
            if hasattr(owner, "__dict__"):
                names = {*vars(owner), *dir(type(owner))} - {"__dict__", "__doc__"}
                called = {n for n in names if can_be_called(owner, n)}
                found |= {f"{path}.{n}": getattr(type(owner), n, None) for n in called}
    return found


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


READERS: dict[str, Callable[[Path, Base, random.Random], None]] = {
    "load": by_load,
    "restore": by_restore,
    "manager": by_manager,
    "command": by_command,
    "dcp": by_dcp,
}
#: How often each is asked: a manager starts a process.
_WEIGHTS = {"load": 6, "restore": 12, "manager": 1, "command": 3, "dcp": 4}


@contextlib.contextmanager
def _unchanged_by_failure(objects: dict[str, Any]) -> Iterator[None]:
    before, callables = live_state(objects), methods(objects)
    try:
        yield
    except OURS as error:
        # Damage that is found on the way leaves parts of a step where none validates, and says so.
        if "live objects hold parts of step" not in str(error):
            assert live_state(objects) == before, "a failed restore changed something live"
        raise
    finally:
        assert methods(objects) == callables, "something that can be called was replaced"


# Running


class Fuzzer:
    """Cases in a scratch folder, from one seed."""

    def __init__(self, folder: Path, *, seed: int) -> None:
        self._folder = folder
        self._seed = seed
        self._bases = bases(folder / "bases")
        self._modules = set(sys.modules)
        self.counts: dict[str, int] = {}

    def run(self, case: int) -> None:
        """Raise AssertionError, naming the case, unless the reader does as it should."""
        chance = random.Random(f"{self._seed}-{case}")
        random.seed(case)
        torch.manual_seed(case)
        np.random.seed(case)
        base = self._bases[chance.choice(["rich", "rich", "rich", *sorted(self._bases)])]
        readers = [n for n in READERS if not (base.is_dcp and n in ("manager", "restore"))]
        reader = chance.choices(readers, [_WEIGHTS[name] for name in readers])[0]
        chk_dir = self._folder / "case"
        shutil.rmtree(chk_dir, ignore_errors=True)
        shutil.copytree(base.chk_dir, chk_dir)
        folders = sorted(chk_dir.glob("step-*"))
        for folder in folders if chance.random() < 0.6 else folders[-1:]:
            grammar.forge(chance, folder)
        text = io.StringIO()
        where = f"seed {self._seed} case {case} ({base.chk_dir.name}, {reader})"
        try:
            with _captured(text), _deadline(DEADLINE_S):
                READERS[reader](chk_dir, base, chance)
            outcome = "read"
        except OURS as error:
            text.write(f"{error}\n{error!r}\n")
            outcome = type(error).__name__
        except Exception as error:
            raise AssertionError(f"{where}: {type(error).__name__}: {error!s:.300}") from error
        self.counts[outcome] = self.counts.get(outcome, 0) + 1
        self._check(where, text.getvalue())

    def _check(self, where: str, text: str) -> None:
        bad = sorted({c for c in text if not c.isprintable() and c not in "\n\t"})
        assert not bad, f"{where}: {bad} in {text!r:.500}"
        new = {name for name in set(sys.modules) - self._modules if _is_unexpected(name)}
        assert not new, f"{where}: imported {sorted(new)}"


def _is_unexpected(name: str) -> bool:
    return name.startswith(("torch._inductor", "torch._dynamo", "torch.hub", "torch.onnx"))


@contextlib.contextmanager
def _captured(text: io.StringIO) -> Iterator[None]:
    """Everything that is said, by logging too."""
    handler = logging.StreamHandler(text)
    loggers = [logging.getLogger(name) for name in ("checkfreq", "iterators")]
    levels = [logger.level for logger in loggers]
    with (
        contextlib.redirect_stdout(text),
        contextlib.redirect_stderr(text),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.addHandler(handler)
            logger.setLevel(logging.DEBUG)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.removeHandler(handler)
                logger.setLevel(level)


class _HangError(BaseException):
    """Passes every ``except Exception``."""


@contextlib.contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise _HangError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    except _HangError as error:
        raise AssertionError(str(error)) from error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(32))
    parser.add_argument("--case", type=int)
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        fuzzer = Fuzzer(Path(folder), seed=args.seed)
        case, end_s = args.case or 0, time.monotonic() + args.seconds
        fuzzer.run(case)
        while args.case is None and time.monotonic() < end_s:
            case += 1
            fuzzer.run(case)
    print(f"all cases up to {case} ended well: {fuzzer.counts}")


if __name__ == "__main__":
    main()
