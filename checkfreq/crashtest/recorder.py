"""The recorder in a training process: a line per boundary, with the state and what led to it.

With a manager, its boundaries count. Without one, a boundary is passed before a batch is fetched,
or before an update where there is no loader, if a weight was updated since the one before. Lines
are JSON, appended to ``record-<rank>.jsonl``; each has what changed of the state since the line
before. The first line is ``begin``: what a restore brought back, or what training starts with.

The user's variables are read where an iteration begins to compute: the script has restored and
fetched by then, and nothing follows yet from what differs. Training thread only. What fails in here
is told in the record, and does not reach the script.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from checkfreq.crashtest.flat import (
    BYTES_PER_STEP,
    batch_text,
    digest_of,
    flatten,
    generators,
    plain_text,
    tensor_text,
)
from checkfreq.crashtest.found import Found, find, users_call, users_place
from checkfreq.crashtest.plan import SENT, VARIABLES, Plan, started
from checkfreq.snapshot.backends import is_capturing
from checkfreq.state.checkpoint import CFCheckpoint

#: Walks through the user's variables may take this long, and a share of the time beyond it.
_WALKS_S, _WALKS_SHARE = 2.0, 0.2
_HELD_S = 60.0
_LOOK_S = 0.05
_Method = TypeVar("_Method", bound=Callable[..., None])


def _harmless(method: _Method) -> _Method:
    """Does nothing in forks, nor while a CUDA graph is captured; an error is only recorded."""

    @functools.wraps(method)
    def guarded(self: Recorder, *args: Any, **kwargs: Any) -> None:
        if not self.is_here or is_capturing():
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self.failed(error)

    return cast(_Method, guarded)


class Recorder:
    """Records one process, and dies where the plan says so."""

    def __init__(self, folder: str, plan: Plan) -> None:
        self._plan = plan
        self._folder = Path(folder)
        #: Paths in it differ from run to run.
        self._root = str(Path(plan.home).parent)
        self._pid = os.getpid()
        self._rank = int(os.environ.get("RANK", "0"))
        self._fd: int | None = None
        self._chk: CFCheckpoint | None = None
        self._save: Callable[..., None] | None = None
        self._objects: dict[str, Any] = {}
        self._tracked: set[str] = set()
        self._told: dict[str, str] = {}
        self._has_begun = self._has_ended = self._is_torn = self._has_looked = False
        self._variables: dict[str, str] = {}
        self._before_start: dict[str, str] = {}
        self._step = self._num_updates = 0
        self._walks_s, self._began_s = 0.0, time.monotonic()
        self._every = 0
        self._clear()
        atexit.register(self.end)

    @property
    def is_here(self) -> bool:
        """Whether this is the process that is recorded, and no fork of it."""
        return os.getpid() == self._pid

    # ---- from a manager

    @_harmless
    def attach(self, chk: CFCheckpoint, *, rank: int, save: Callable[..., None]) -> None:
        """A manager was made: its boundaries count from now on."""
        self._chk, self._save, self._rank = chk, save, rank
        self._write({"kind": "manager"})

    @_harmless
    def begin(self, step: int) -> None:
        """A restore ended, or training begins without one."""
        if not self._has_begun:
            self._begin(step)

    @_harmless
    def pass_boundary(self, step: int) -> None:
        """A boundary was passed, and the manager has done what it does there."""
        if not self._has_begun:
            self._begin(step - 1)
        self._boundary(step)

    @_harmless
    def delivered(self, name: str, delivery: Any) -> None:
        """CFIterator hands out a batch."""
        ids = None if delivery.ids is None else delivery.ids.tolist()
        self._batches.append([name, ids, batch_text(delivery.data)])

    # ---- from the hooks

    @_harmless
    def before_fetch(self) -> None:
        """A DataLoader is about to be started, or to give a batch."""
        if self._chk is not None:
            return
        if self._num_updates:
            self._own_boundary()
        elif not self._has_begun or self._step == self._first_step:
            self._clear()
            self._objects = {}
            self._find_objects()
            if any(isinstance(value, Optimizer) for value in self._objects.values()):
                self._begin(self._aligned())

    @_harmless
    def fetched(self, name: str, batch: Any) -> None:
        """A DataLoader gave a batch."""
        self._fetched.append([name, None, batch_text(batch)])

    @_harmless
    def before_start(self) -> None:
        """A DataLoader is about to be started."""
        self._before_start = generators()

    @_harmless
    def after_start(self, name: str) -> None:
        """A DataLoader was started; it may have drawn from the global generators."""
        after = generators()
        drew = [kind for kind in after if after[kind] != self._before_start.get(kind)]
        self._starts.append([name, users_place(), drew])

    def used(self) -> None:
        """A module is called in training; the first time in an iteration, look at variables."""
        if not self._has_looked:
            self._look()

    @_harmless
    def before_update(self) -> None:
        """An optimizer is about to step."""
        self._look()
        if self._chk is not None:
            return
        if not self._has_begun:
            self._find_objects()
            self._begin(self._aligned())
        elif self._num_updates and not self._fetched and not self._batches:
            self._own_boundary()  # a loop without a loader

    @_harmless
    def after_update(self) -> None:
        """An optimizer has stepped."""
        self._num_updates += self._chk is None

    @_harmless
    def loss(self, value: Tensor) -> None:
        """A backward pass begins."""
        self._look()
        if value.numel() == 1:
            self._losses.append(repr(value.detach().float().item()))

    @_harmless
    def seeded(self, function: str, args: tuple[Any, ...]) -> None:
        """A global generator is seeded; what libraries seed is none of the user's doing."""
        place = users_call(3)
        if place:
            self._seeds.append([f"{function}({', '.join(plain_text(a) for a in args)})", place])

    def failed(self, error: Exception) -> None:
        """Tell of an error in here; the script goes on, and some of it is not recorded."""
        with contextlib.suppress(Exception):
            self._write({"kind": "failed", "error": f"{type(error).__name__}: {error}"})

    # ---- lines

    def _clear(self) -> None:
        self._batches: list[list[Any]] = []
        self._fetched: list[list[Any]] = []
        self._starts: list[list[Any]] = []
        self._losses: list[str] = []
        self._seeds: list[list[str]] = []
        self._has_looked, self._variables = False, {}

    _first_step = 0

    def _begin(self, step: int) -> None:
        self._first_step = self._step = step
        self._told = {}
        self._find_objects()
        self._has_begun = True
        if self._chk is not None:
            self._variables = {}  # what was looked at before the restore
        self._line("begin", step)
        self._clear()

    def _own_boundary(self) -> None:
        self._num_updates = 0
        self._boundary(self._step + 1)

    def _boundary(self, step: int) -> None:
        self._step = step
        is_read = step % self._interval() == 0 or self._must_read(step)
        self._line("step" if is_read else "passed", step)
        self._clear()
        self._act(step)

    @_harmless
    def end(self) -> None:
        """Training is over: the last state, and the files that the script has saved."""
        if self._has_ended or not (self._has_begun or self._plan.files):
            return
        self._has_ended = True
        if self._num_updates and self._chk is None:
            self._own_boundary()
        self._line("end", self._step, files=self._files())

    def _line(self, kind: str, step: int, **more: Any) -> None:
        line: dict[str, Any] = {"kind": kind, "step": step}
        if kind != "passed":
            state = self._state()
            line["key"] = self._key(state)
            state |= self._variables
            line["changed"] = {k: v for k, v in state.items() if self._told.get(k) != v}
            line["gone"] = [name for name in self._told if name not in state]
            self._told = state
        if kind == "begin":
            line["untracked"] = {
                name: _kind_of(value)
                for name, value in self._objects.items()
                if name not in self._tracked
            }
        line["batches"] = self._batches
        line["fetched"] = self._fetched
        line["starts"] = self._starts
        line["losses"], line["seeds"] = self._losses, self._seeds
        self._write({**line, **more})

    def _write(self, line: dict[str, Any]) -> None:
        if self._fd is None:
            path = self._folder / f"record-{self._rank}.jsonl"
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            self._write({"kind": "pid", "pid": self._pid, "started": started(self._pid)})
        with _unlimited():
            data = f"{json.dumps(line, default=str)}\n".encode()
            while data:
                data = data[os.write(self._fd, data) :]

    # ---- state

    def _state(self) -> dict[str, str]:
        state: dict[str, str] = {}
        for name, value in self._objects.items():
            _flatten_object(name, value, state)
        state.update(generators())
        return state

    def _interval(self) -> int:
        """How many steps lie between two at which the state is read."""
        if not self._every:
            held = sum(tensor.nbytes for tensor in self._tensors())
            self._every = max(1, -(-3 * held // BYTES_PER_STEP))
        return self._every

    def _tensors(self) -> Iterator[Tensor]:
        for value in self._objects.values():
            if isinstance(value, nn.Module):
                yield from value.parameters()
                yield from value.buffers()

    def _key(self, state: dict[str, str]) -> str:
        """A digest of what only weight updates change: it tells a step among all."""
        parameters = [
            state[f"{name}.{key}"]
            for name, value in sorted(self._objects.items())
            if isinstance(value, nn.Module)
            for key, _ in value.named_parameters()
            if f"{name}.{key}" in state
        ]
        return digest_of(repr(parameters))

    def _aligned(self) -> int:
        """The step at which a script that saves by itself goes on; 0 if that is not known."""
        return self._plan.steps.get(self._key(self._state()), 0)

    def _find_objects(self) -> None:
        """What is tracked, and what else has a state and is in the user's variables."""
        tracked = dict(self._chk.tracked) if self._chk is not None else {}
        covered = _parts_of(tracked.values())
        self._tracked = set(tracked)
        objects = dict(tracked)
        for name, value in self._walk().objects.items():
            inner = getattr(value, "optimizer", None) if _is_wrapper(value) else None
            if id(value) in covered or id(inner) in covered or _is_covered(value, covered):
                continue
            objects[f"{name} (a variable)" if name in tracked else name] = value
            covered |= _parts_of([value])
        self._objects = objects

    @_harmless
    def _look(self) -> None:
        """Read the user's variables, once in an iteration, while that is not too slow."""
        if self._has_looked:
            return
        self._has_looked = True
        most_s = _WALKS_S + _WALKS_SHARE * (time.monotonic() - self._began_s)
        is_slow, step = self._walks_s > most_s, self._step + 1
        if self._must_read(step) or (not is_slow and step % self._every == 0):
            values = self._walk().values
            self._variables = {
                f"{VARIABLES}{name}": text
                for name, text in values.items()
                if self._root not in text
            }

    def _walk(self) -> Found:
        start_s = time.monotonic()
        try:
            return find()
        finally:
            self._walks_s += time.monotonic() - start_s

    def _must_read(self, step: int) -> bool:
        return step - self._first_step <= 2 or step in self._plan.reads

    def _files(self) -> dict[str, dict[str, str]]:
        # Of several ranks the first one saves, as a rule: another may end before its last save.
        if not self._plan.files or self._rank:
            return {}
        folder = Path(self._plan.files)
        paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
        return {
            str(path.relative_to(folder)): _contents(path)
            for path in paths
            if fnmatch(path.name, self._plan.pattern)
        }

    # ---- what the plan asks for

    def _act(self, step: int) -> None:
        plan = self._plan
        if self._save is not None and step in plan.saves:
            self._save(wait=True)
        elif self._save is not None and step in plan.tries:
            self._save()
        if step == plan.die_at:
            os.kill(self._pid, signal.SIGKILL)
        if plan.tear_at >= 0 and step >= plan.tear_at and not self._is_torn:
            self._is_torn = True
            _limit_files(plan.tear_bytes)
        if 0 <= plan.hold_at <= step:
            self._write({"kind": "held", "step": step})
            end_s = time.monotonic() + _HELD_S
            while time.monotonic() < end_s and not (self._folder / SENT).exists():
                time.sleep(_LOOK_S)


def _limit_files(num_bytes: int) -> None:
    """Have the kernel end this process in the write that makes a file larger."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))


@contextlib.contextmanager
def _unlimited() -> Iterator[None]:
    """Lines are no checkpoints."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if soft == hard:
        yield
        return
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _flatten_object(name: str, value: Any, state: dict[str, str]) -> None:
    """Of an object that cannot be read, the kind of error stands for its state."""
    try:
        _flatten_readable(name, value, state)
    except Exception as error:
        state[name] = f"cannot be read: {type(error).__name__}"


def _flatten_readable(name: str, value: Any, state: dict[str, str]) -> None:
    if isinstance(value, nn.Module):
        for key, tensor in [*value.named_parameters(), *value.named_buffers()]:
            state[f"{name}.{key}"] = tensor_text(tensor)
    elif isinstance(value, dict | list):
        flatten(value, name, state)
    else:
        flatten(value.state_dict(), name, state)


def _kind_of(value: Any) -> str:
    """``torch.optim.lr_scheduler.StepLR``; of the user's own classes with their bases."""
    names = [f"{kind.__module__}.{kind.__qualname__}" for kind in type(value).__mro__[:-1]]
    return " ".join(names)


def _is_wrapper(value: Any) -> bool:
    return not isinstance(value, nn.Module) and type(value).__name__.startswith("Accelerated")


def _parts_of(objects: Any) -> set[int]:
    """The identities of objects, and of the modules and tensors of those that are modules."""
    parts: set[int] = set()
    for value in objects:
        parts.add(id(value))
        if isinstance(value, nn.Module):
            parts.update(id(one) for one in value.modules())
            parts.update(id(one) for one in value.parameters())
            parts.update(id(one) for one in value.buffers())
    return parts


def _is_covered(value: Any, covered: set[int]) -> bool:
    """Whether all that a module holds belongs to what is there already."""
    if not isinstance(value, nn.Module):
        return False
    return all(id(one) in covered for one in [*value.parameters(), *value.buffers()])


def _contents(path: Path) -> dict[str, str]:
    """What a file holds: its tensors if torch can read it, else a digest of its bytes."""
    found: dict[str, str] = {}
    try:
        flatten(torch.load(path, map_location="cpu", weights_only=True), "", found)
    except Exception:  # a file of another kind, or a torn one: torch raises many types
        found["bytes"] = digest_of(path.read_bytes().hex())
    return found
