"""Warns of what takes part in training and was not given to ``CFCheckpoint``.

An optimizer that updates tracked parameters, a scheduler of a tracked optimizer, the ``GradScaler``
that steps one: their state would be made anew in a resumed run. Each is named once, with the line
to write, when it is known that a restore would lose something: an optimizer or a scheduler once it
goes on after a boundary, a scaler at the first step it lets through. Training thread only.

What a tracked object holds is that object's matter, and is not named: a scheduler of schedulers, a
look-ahead around an optimizer. Only tensors can be looked for in what it saves: the momentum of the
optimizer inside a SAM is in no state dict, and is named.
"""

from __future__ import annotations

import gc
import logging
import sys
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from checkfreq.snapshot.evidence import Evidence
from checkfreq.state.adapters.optimizer_load import parameters_of
from checkfreq.state.capture import read_local_state
from checkfreq.state.checkpoint import CFCheckpoint
from checkfreq.state.dtensors import local_of
from checkfreq.state.gradients import PendingGradients

logger = logging.getLogger("checkfreq.manager")

#: Most frames between an optimizer's hook and the ``GradScaler.step`` that called it.
_MOST_FRAMES = 16
#: Most objects to look at inside of the tracked ones.
_MOST_OBJECTS = 10_000
#: What never leads from a tracked object to a part of it.
_NO_PARTS = (type, ModuleType, FunctionType, CodeType, FrameType, Tensor, nn.Module)


@dataclass(slots=True)
class _Stepping:
    """An optimizer that has stepped, and that is tracked or has parameters that are."""

    is_update: bool
    #: Whether there is nothing to be said, or it was said.
    is_known: bool = False
    #: Tracked optimizers whose update its step is: all of their parameters are among its own.
    stands_for: list[str] = field(default_factory=list)
    #: Boundaries passed before its first step, and its hyper-parameters at that time.
    boundary: int = 0
    values: list[dict[str, Any]] = field(default_factory=list)


class Untracked:
    """Looks at every step of any optimizer, and at the boundaries."""

    def __init__(
        self, chk: CFCheckpoint, *, evidence: Evidence, gradients: PendingGradients
    ) -> None:
        self._chk, self._evidence, self._gradients = chk, evidence, gradients
        self._optimizers = chk.optimizers
        self._seen: weakref.WeakKeyDictionary[Optimizer, _Stepping | None] = (
            weakref.WeakKeyDictionary()
        )
        self._suspects: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._schedulers: list[tuple[weakref.ref[LRScheduler], int]] = []
        self._told: weakref.WeakSet[Any] = weakref.WeakSet()
        self._num_boundaries = 0

    def is_update(self, optimizer: Optimizer, *, is_first: bool) -> bool | None:
        """Whether the step that ``optimizer`` is about to take counts as an update.

        None if none of its parameters is tracked. ``is_first``: nothing was updated since the last
        boundary. So counts a part of a tracked object, as the optimizer inside of SAM, whose own
        ``step`` is not called, and any optimizer if none is tracked. Others may belong to an inner
        loop (meta-learning), whose boundary is the tracked optimizer's.
        """
        try:
            seen = self._seen[optimizer]
        except KeyError:
            seen = self._seen[optimizer] = self._first_step(optimizer)
        if seen is None:
            return None
        for name in seen.stands_for:
            self._gradients.used(name)
        if seen.stands_for and is_first:
            # What it is inside of has written weights before (SAM's first step), unannounced.
            self._evidence.refute()
        if not seen.is_known and seen.boundary < self._num_boundaries:
            self._suspects.add(optimizer)
        return seen.is_update

    def pass_boundary(self) -> None:
        """Name what has gone on since the boundary before."""
        if not self._num_boundaries:
            self._schedulers = [(weakref.ref(s), s.last_epoch) for s in self._schedulers_of_ours()]
        self._num_boundaries += 1
        if self._schedulers:
            self._judge_schedulers()
        if self._suspects:
            for suspect in list(self._suspects):
                self._judge(suspect)
            self._suspects.clear()

    def no_boundary(self) -> None:
        """Name what steps where no boundary is passed at all."""
        for optimizer, seen in list(self._seen.items()):
            if seen is not None and not seen.is_known:
                self._judge(optimizer)

    # ---- optimizers

    def _first_step(self, optimizer: Optimizer) -> _Stepping | None:
        is_tracked = any(optimizer is one for one in self._optimizers.values())
        own = {id(parameter) for parameter in parameters_of(optimizer)}
        if not is_tracked and own.isdisjoint(self._tracked_ids()):
            return None
        if (scaler := _scaler_that_steps()) is not None:
            self._judge_scaler(scaler)
        if is_tracked:
            return _Stepping(True, is_known=True)
        tracked = self._optimizers.items()
        is_part = self._shares_groups(optimizer) or self._is_part(optimizer)
        stands_for = [n for n, one in tracked if own.issuperset(map(id, parameters_of(one)))]
        return _Stepping(
            is_part or not tracked,
            stands_for=stands_for if is_part else [],
            boundary=self._num_boundaries,
            values=_values_of(optimizer),
        )

    def _tracked_ids(self) -> set[int]:
        modules = [one for one in self._chk.tracked.values() if isinstance(one, nn.Module)]
        return {*self._chk.trained_ids(), *(id(p) for one in modules for p in one.parameters())}

    def _shares_groups(self, optimizer: Optimizer) -> bool:
        """Whether its groups are those of a tracked optimizer, hyper-parameters and all."""
        tracked = {id(group) for one in self._optimizers.values() for group in one.param_groups}
        return all(id(group) in tracked for group in optimizer.param_groups)

    def _judge(self, optimizer: Optimizer) -> None:
        seen = self._seen[optimizer]
        if seen is None or not self._loses(optimizer, seen):
            return
        logger.warning(
            "%s steps parameters that are tracked, and is not tracked itself: its state would be "
            "made anew in a resumed run. Track it too: CFCheckpoint(..., %s)",
            *_named(optimizer, self._chk.tracked, otherwise="another_optimizer"),
        )

    def _loses(self, optimizer: Optimizer, seen: _Stepping) -> bool:
        """Whether a checkpoint lacks anything of its state; asked again until that is certain."""
        states = [state for state in optimizer.state.values() if state]
        found = [one for state in states for one in state.values() if isinstance(one, Tensor)]
        if not states and seen.values == _values_of(optimizer):
            return False  # nothing to lose, so far
        seen.is_known = True
        if not found:
            return not self._shares_groups(optimizer) and not self._is_part(optimizer)
        saved = read_local_state(self._chk, positions={}).refs
        kept = {_memory_of(ref.tensor) for ref in saved}
        return any(_memory_of(tensor) not in kept for tensor in found)

    # ---- scalers and schedulers

    def _judge_scaler(self, scaler: GradScaler) -> None:
        if not scaler.is_enabled() or scaler in self._told or self._is_part(scaler):
            return
        self._told.add(scaler)
        logger.warning(
            "%s steps an optimizer whose parameters are tracked, and is not tracked itself: its "
            "scale would start over in a resumed run. Track it too: CFCheckpoint(..., %s)",
            *_named(scaler, self._chk.tracked, otherwise="scaler"),
        )

    def _schedulers_of_ours(self) -> Iterator[LRScheduler]:
        """Schedulers of tracked optimizers that are not tracked.

        A scheduler refers to its optimizer, and nothing leads back from there: they are found among
        all objects of the garbage collector: a walk over every one, so once in a process.
        """
        tracked = self._chk.tracked.values()
        found = gc.get_referrers(*self._optimizers.values()) if self._optimizers else []
        known = [vars(one) for one in tracked if isinstance(one, LRScheduler)]
        fields = [
            one
            for one in found
            if type(one) is dict and "last_epoch" in one and not any(one is k for k in known)
        ]
        owners = gc.get_referrers(*fields) if fields else []
        for one in (*found, *owners):
            if issubclass(type(one), LRScheduler) and not self._is_part(one):
                yield one

    def _judge_schedulers(self) -> None:
        kept = []
        for ref, before in self._schedulers:
            scheduler = ref()
            if scheduler is None or scheduler in self._told:
                continue
            if scheduler.last_epoch == before:
                kept.append((ref, before))
                continue
            self._told.add(scheduler)
            logger.warning(
                "%s schedules a tracked optimizer, and is not tracked itself: the schedule would "
                "start over in a resumed run. Track it too: CFCheckpoint(..., %s)",
                *_named(scheduler, self._chk.tracked, otherwise="scheduler"),
            )
        self._schedulers = kept

    def _is_part(self, wanted: object) -> bool:
        """Whether it is a tracked object, or inside of one that may save it."""
        level: list[Any] = list(self._chk.tracked.values())
        visited = {id(one) for one in level}
        while level and len(visited) < _MOST_OBJECTS:
            if any(one is wanted for one in level):
                return True
            inner = gc.get_referents(*[one for one in level if not isinstance(one, _NO_PARTS)])
            level = [one for one in inner if gc.is_tracked(one) and id(one) not in visited]
            visited.update(map(id, level))
        return False


def _values_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Its hyper-parameters that are plain values."""
    plain = (bool, int, float, tuple)
    groups = optimizer.param_groups
    return [{k: v for k, v in group.items() if isinstance(v, plain)} for group in groups]


def _memory_of(tensor: Tensor) -> int:
    return local_of(tensor).untyped_storage().data_ptr()


def _scaler_that_steps() -> GradScaler | None:
    """The ``GradScaler`` inside of whose ``step`` we are."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MOST_FRAMES):
        if frame is None:
            return None
        if frame.f_code is GradScaler.step.__code__:
            scaler = frame.f_locals.get("self")
            return scaler if isinstance(scaler, GradScaler) else None
        frame = frame.f_back
    return None


# ---- how it is called in the script


def _named(thing: object, tracked: Mapping[str, Any], *, otherwise: str) -> tuple[str, str]:
    """What to call ``thing`` in a message, and what to write into ``CFCheckpoint(...)``."""
    kind, name = type(thing).__name__, _name_of(thing, tracked)
    called = f"a {kind}" if name is None else f"the {kind} {name!r}"
    return called, _argument(name, otherwise, tracked)


def _argument(name: str | None, otherwise: str, tracked: Mapping[str, Any]) -> str:
    keyword = otherwise if name is None else name.removeprefix("self.").replace(".", "_")
    if keyword in tracked:
        keyword += "_2"
    return f"{keyword}={name or '...'}"


def _name_of(thing: object, tracked: Mapping[str, Any]) -> str | None:
    """How the script reaches ``thing``, as far as that can be found."""
    for name, owner in tracked.items():
        for attribute, value in getattr(owner, "__dict__", {}).items():
            if value is thing:
                return f"{name}.{attribute}"
    for scope in _scopes():
        for name, value in scope.items():
            if value is thing:
                return name
        for attribute, value in getattr(scope.get("self"), "__dict__", {}).items():
            if value is thing:
                return f"self.{attribute}"
    return None


def _scopes() -> Iterator[Mapping[str, Any]]:
    """The variables of the functions that are running, the innermost first, then of the script."""
    frame: FrameType | None = sys._getframe(1)
    outermost: Mapping[str, Any] = {}
    while frame is not None:
        root = str(frame.f_globals.get("__name__")).partition(".")[0]
        if root not in ("torch", "checkfreq", "iterators"):
            yield frame.f_locals
            outermost = frame.f_globals
        frame = frame.f_back
    yield outermost
