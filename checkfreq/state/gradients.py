"""Gradients that a later update will use: a loop may accumulate them across a boundary.

Gradients are pending if a backward pass came after the optimizer's last step. Many loops leave
``.grad`` as it was at the step and clear it before the next backward pass; their gradients are not
pending. To tell, each step remembers one gradient of the optimizer as a witness, by identity and
version: unless a backward pass adds to it, it stays the same until it is cleared. So a boundary
without a checkpoint costs nothing, and one with a checkpoint a look at one tensor, or at ``.grad``
of all parameters if the witness is gone.

If two optimizers step in one iteration, the second one's backward pass may write gradients of the
first one's parameters (a GAN). Those are never applied, so a step takes new witnesses for all
optimizers that have stepped since the boundary. Each rank keeps its own gradients, which differ
until they are reduced. Training thread only.

A loop may also never clear them, or only let them decay: they are part of every later update. So
where a checkpoint leaves gradients out, a hook on the witness looks at what the next backward pass
adds to. If that is not zero, and is not cleared until the step, later checkpoints have them too.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from checkfreq.state.adapters.base import Findings
from checkfreq.state.adapters.optimizer_load import parameters_of
from checkfreq.state.collector import StateCollector
from checkfreq.state.dtensors import local_of
from checkfreq.state.saved import SavedObject
from checkfreq.state.saved_tensor import SavedTensor
from checkfreq.state.tensors import DTYPES
from checkfreq.types import Json

logger = logging.getLogger(__name__)

#: By optimizer, the gradients by number of their parameter.
Gradients: TypeAlias = Mapping[str, Mapping[int, Tensor]]

#: Parameters, and the gradients they get.
_Pairs: TypeAlias = list[tuple[Tensor, Tensor]]


class _Witness(NamedTuple):
    """One gradient as an optimizer's step left it, held by a weak reference."""

    parameter: Tensor
    gradient: weakref.ref[Tensor]
    version: int

    def is_there(self) -> bool:
        """Whether it still is the gradient of its parameter."""
        now = self.parameter.grad
        return now is not None and self.gradient() is local_of(now)

    def was_written(self) -> bool:
        """Whether it is there, and was written to since the step."""
        gradient = self.gradient()
        return self.is_there() and gradient is not None and gradient._version != self.version


class _Look:
    """Whether backward passes add to the gradient that was left at a boundary.

    ``is_kept``: as of the latest pass; None before the first.
    """

    def __init__(self, witness: _Witness, is_capturing: Callable[[], bool]) -> None:
        self._parameter = witness.parameter
        self._is_capturing = is_capturing
        self.is_kept: bool | None = None
        # What is not part of the graph (masters, shards of FSDP2) has its gradient set instead.
        self._hook: Any = None
        if self._parameter.requires_grad:
            register: Callable[..., Any] = self._parameter.register_hook
            self._hook = register(self._before_adding)

    def _before_adding(self, gradient: Tensor) -> None:
        if self.is_kept is False:  # cleared, and what is there now came after that
            return
        is_there = self._parameter.grad is not None
        if not is_there or not self._is_capturing():
            self.is_kept = is_there and _is_nonzero(self._parameter)

    def close(self) -> None:
        if self._hook is not None:
            self._hook.remove()


class PendingGradients:
    """Tells which gradients of the tracked optimizers no update has used yet.

    ``is_capturing``: whether a graph of an accelerator is being captured, when nothing may wait.
    """

    def __init__(
        self,
        optimizers: Mapping[str, Optimizer],
        *,
        is_capturing: Callable[[], bool] = lambda: False,
    ) -> None:
        self._optimizers = dict(optimizers)
        self._is_capturing = is_capturing
        self._looks: dict[str, _Look] = {}
        #: Optimizers whose gradients are never cleared, and those of which that is to be seen.
        self._kept: set[str] = set()
        self._expected: set[str] = set()
        self._witnesses: dict[str, _Witness] = {}
        self._stepped: dict[str, None] = {}
        self._warned = False
        self._hooks = [
            optimizer.register_step_post_hook(partial(self._after_step, name))
            for name, optimizer in optimizers.items()
        ]

    def used(self, name: str) -> None:
        """The optimizer ``name`` has stepped, or a GradScaler skipped its step."""
        self._stepped[name] = None
        if name in self._looks:
            self._judge(name, self._looks.pop(name))
        for stepped in self._stepped:
            self._remember(stepped)

    def pass_boundary(self) -> None:
        """Note an iteration boundary."""
        self._stepped.clear()

    def read(self) -> Gradients:
        """The pending gradients, live; sparse ones are left out with a warning."""
        found = {name: self._pending(name) for name in self._optimizers}
        return {name: gradients for name, gradients in found.items() if gradients}

    def restored(self, names: Iterable[str]) -> None:
        """Gradients of these optimizers were restored: they may be of those that are kept."""
        self._expected.update(names)

    def close(self) -> None:
        """Remove the hooks; idempotent."""
        for look in self._looks.values():
            look.close()
        self._looks = {}
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _after_step(self, name: str, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.used(name)

    def _judge(self, name: str, look: _Look) -> None:
        """The optimizer has stepped: were gradients of the update before part of it?"""
        look.close()
        is_kept, witness = look.is_kept, self._witnesses.get(name)
        was_written = witness is not None and witness.was_written()
        if is_kept is None and was_written and not self._is_capturing():
            is_kept = witness is not None and _is_nonzero(witness.parameter)
        if is_kept:
            self._kept.add(name)
            logger.info(
                "%s: gradients are kept over the update, so checkpoints hold them from now on "
                "(where they are not needed, zero_grad(set_to_none=True) spares that)",
                name,
            )
        elif is_kept is False:
            self._expected.discard(name)

    def _remember(self, name: str) -> None:
        last = self._witnesses.get(name)
        gradient = None if last is None else last.parameter.grad
        if last is None or gradient is None or gradient.layout is not torch.strided:
            self._find_witness(name)
            return
        local = local_of(gradient)
        self._witnesses[name] = _Witness(last.parameter, weakref.ref(local), local._version)

    def _find_witness(self, name: str) -> None:
        parameters = parameters_of(self._optimizers[name])
        there = [p for p in parameters if p.grad is not None]
        found = next((p for p in there if _is_dense(p)), there[0] if there else None)
        if found is None or found.grad is None:
            self._witnesses.pop(name, None)
            return
        local = local_of(found.grad)
        self._witnesses[name] = _Witness(found, weakref.ref(local), local._version)

    def _is_as_left(self, name: str) -> bool:
        """Whether the witness is still ``.grad`` and nothing was added to it."""
        witness = self._witnesses.get(name)
        return witness is not None and witness.is_there() and not witness.was_written()

    def _pending(self, name: str) -> dict[int, Tensor]:
        if self._is_as_left(name) and name not in self._kept:
            if name not in self._looks:
                self._looks[name] = _Look(self._witnesses[name], self._is_capturing)
            if name not in self._expected:
                return {}
        found = {
            number: parameter.grad
            for number, parameter in enumerate(parameters_of(self._optimizers[name]))
            if parameter.grad is not None
        }
        kept = {number: one for number, one in found.items() if one.layout is torch.strided}
        if len(kept) < len(found):
            self._warn_of_sparse(name)
        # Zeroing gradients in place changes the witness too; zeros need not be kept.
        return kept if _any_nonzero(map(local_of, kept.values())) else {}

    def _warn_of_sparse(self, name: str) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "%s: sparse gradients wait for an update that comes after this checkpoint, and "
                "cannot be kept: a run restored from it continues without them. Update before "
                "the boundary, or use dense gradients",
                name,
            )


def _is_dense(parameter: Tensor) -> bool:
    return parameter.grad is not None and parameter.grad.layout is torch.strided


def _is_nonzero(parameter: Tensor) -> bool:
    if parameter.grad is None:
        return False
    gradient = local_of(parameter.grad)
    return _any_nonzero([gradient if _is_dense(parameter) else gradient.coalesce().values()])


def _any_nonzero(gradients: Iterable[Tensor]) -> bool:
    """Whether any is not all zeros, which ``zero_grad(set_to_none=False)`` leaves.

    Waits for the device, but only in loops that write to gradients between a step and a boundary.
    """
    there = [one for one in gradients if one.numel()]
    if not there:
        return False
    with torch.no_grad():
        largest = torch.nn.utils.get_total_norm(there, float("inf"))
    return bool(largest != 0)  # NaN counts too


# ---- in a checkpoint


def capture_gradients(
    collector: StateCollector, gradients: Gradients, *, world: int
) -> dict[str, Json]:
    """Add the gradients to ``collector`` (of DTensors their local tensors); return JSON."""
    numbers: dict[str, Json] = {}
    for name, found in gradients.items():
        numbers[name] = list(found)
        for number, gradient in found.items():
            collector.add(_key(name, number), local_of(gradient), False)
    return {"kind": "gradients", "world": world, "parameters": numbers}


def require_gradient_fields(saved: SavedObject) -> None:
    """Raise unless the saved fields are those of pending gradients, whatever is live."""
    if type(saved.field("world")) is not int:
        raise saved.corrupt("gradients", "a number of ranks", saved.field("world"))
    for name, numbers in _numbers_of(saved).items():
        for number in numbers:
            saved.record(_key(name, number))


def prepare_gradients(
    optimizers: Mapping[str, Optimizer], saved: SavedObject, findings: Findings, *, world: int
) -> Callable[[], None] | None:
    """A function that sets the gradients of ``optimizers``, from data that ``saved`` reads first.

    It may be called again, to undo what a script cleared or added in between. None if they cannot
    be used in this run, which is noted in ``findings``.
    """
    if saved.field("world") != world:
        findings.notes.append(
            f"gradients that waited for an update (of {saved.field('world')} rank(s), here are "
            f"{world}): those batches do not count"
        )
        return None
    pairs: _Pairs = []
    for name, numbers in _numbers_of(saved).items():
        if name in optimizers:
            pairs += _pairs(name, parameters_of(optimizers[name]), numbers, saved, findings)
    return partial(_set_all, pairs)


def _pairs(
    name: str, parameters: list[Tensor], numbers: list[int], saved: SavedObject, findings: Findings
) -> Iterator[tuple[Tensor, Tensor]]:
    for number in numbers:
        record = saved.record(_key(name, number))
        parameter = parameters[number] if number < len(parameters) else None
        if parameter is None or not _fits(parameter, record):
            findings.different.append(
                f"{name} parameter {number}: checkpoint has a gradient {record.dtype}"
                f"{list(record.shape)}, which does not fit the live parameter"
            )
            continue
        gradient = torch.empty_like(parameter.detach(), dtype=DTYPES[record.dtype])
        saved.fill(local_of(gradient), record.name)
        yield parameter, gradient


def _fits(parameter: Tensor, record: SavedTensor) -> bool:
    accepted = getattr(parameter, "grad_dtype", parameter.dtype)  # None: any
    is_accepted = accepted is None or accepted is DTYPES[record.dtype]
    return is_accepted and tuple(local_of(parameter).shape) == tuple(record.shape)


def _numbers_of(saved: SavedObject) -> dict[str, list[int]]:
    found = saved.field("parameters")
    is_whole = isinstance(found, dict) and all(
        isinstance(numbers, list) and all(type(one) is int and one >= 0 for one in numbers)
        for numbers in found.values()
    )
    if not is_whole:
        raise saved.corrupt("gradients", "numbers of parameters by optimizer", found)
    return dict(found)


def _set_all(pairs: _Pairs) -> None:
    for parameter, gradient in pairs:
        parameter.grad = gradient.clone()


def _key(name: str, number: int) -> str:
    return f"{name}.{number}"
