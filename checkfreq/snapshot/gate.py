"""The gate in front of every weight update.

A pre-hook of all optimizers' steps makes an update wait for the copy of the settled state and
counts it as an attempt; ``updating()`` does the same for writes that no hook sees. The hook is
torch's global one, which sees optimizers that are not tracked too. Belongs to the training thread.
In a fork of the process updates are counted but do not wait, since the copy is the parent's.

A closure that is given to ``step`` runs forward and backward. torch's own optimizers call it before
they write anything, so their update waits once it has returned, and the copy goes on beside it.
Other optimizers wait before it: some (SAM) write before they call it.

torch.compile must not look into any of this. It would take what an event says while it compiles,
or the number of attempts, for a constant, and compile a wait away. So a compiled function stops
here, calls what is written, and goes on compiled.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, ParamSpec, Protocol, TypeAlias, TypeVar, cast

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from checkfreq.errors import StateError
from checkfreq.forks import Home
from checkfreq.keyboard import uninterrupted
from checkfreq.snapshot.backends import is_capturing

_P = ParamSpec("_P")
_T = TypeVar("_T")

Args: TypeAlias = tuple[Any, ...]
Kwargs: TypeAlias = dict[str, Any]
_Call: TypeAlias = tuple[Args, Kwargs]


def opaque(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """``function``, which torch.compile calls as it is; with ``fullgraph=True`` it refuses to.

    Call it once an optimizer exists: it imports torch's compiler, as torch's optimizers do.
    """
    reason = (
        "checkfreq orders weight updates after the copy of a snapshot, on each call and not once "
        "while compiling; compile without fullgraph=True, or leave the update out of the function"
    )
    disable = cast("Callable[..., Any]", torch.compiler.disable)
    return cast("Callable[_P, _T]", disable(function, reason=reason))


class Updating:
    """The context that ``updating()`` returns; see `CFManager.updating`."""

    def __init__(self, enter: Callable[[], None]) -> None:
        self._enter = enter

    def __enter__(self) -> None:
        self._enter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        pass


class IsUpdate(Protocol):
    """Whether a step is an update; ``is_first``: none came since the last boundary."""

    def __call__(self, optimizer: Optimizer, *, is_first: bool) -> bool | None:
        """None for an optimizer of other parameters; False if it has to wait, and is no update."""
        ...


class UpdateGate:
    """Counts update attempts; each calls ``fence`` first, to come after the copy in progress."""

    def __init__(
        self,
        is_update: IsUpdate,
        *,
        fence: Callable[[], None],
        home: Home | None = None,
    ) -> None:
        self._home = home or Home("checkpointing")
        self._is_update = is_update
        self._fence = fence
        self._attempts = 0
        self._declared = 0
        self._captured = False
        self._boundary_attempts = 0
        self._boundary_declared = 0
        self._announce = opaque(uninterrupted(self._before_write))
        self._count = opaque(self._add_attempt)
        gate = weakref.ref(self)  # torch keeps the hook, and must not keep what belongs to a run

        def before_step(optimizer: Optimizer, args: Args, kwargs: Kwargs) -> _Call | None:
            live = gate()
            return None if live is None else live._before_step(optimizer, args, kwargs)

        self._hook = register_optimizer_step_pre_hook(opaque(uninterrupted(before_step)))
        weakref.finalize(self, self._hook.remove)

    @property
    def attempts(self) -> int:
        """Updates attempted so far, including those that a GradScaler skipped."""
        return self._attempts

    @property
    def at_boundary(self) -> bool:
        """True if no update was attempted since the last boundary."""
        return self._attempts == self._boundary_attempts

    def count(self) -> None:
        """Count an attempt that may not reach the hook, as of a step that a GradScaler skips."""
        self._count()

    def updating(self) -> Updating:
        """Surround a parameter write that no hook sees."""
        return Updating(self._announce)

    def pass_boundary(self) -> None:
        """Note an iteration boundary.

        Raises StateError if an update was captured in a CUDA graph and not replayed inside
        ``updating()``: hooks ran only at the capture, so nothing orders a replay after the copy.
        """
        if self._captured and self._declared == self._boundary_declared:
            raise StateError(
                "an optimizer step was captured in a CUDA graph, so its replays pass no hook and "
                "a snapshot could be torn. Expected every replay inside "
                "`with cf_manager.updating(): graph.replay()`, found a boundary without it"
            )
        self._boundary_attempts = self._attempts
        self._boundary_declared = self._declared

    def close(self) -> None:
        """Remove the hook; idempotent."""
        self._hook.remove()

    def _before_step(self, optimizer: Optimizer, args: Args, kwargs: Kwargs) -> _Call | None:
        """What ``step`` is called with instead, if that is where the update waits."""
        is_update = self._is_update(optimizer, is_first=self.at_boundary)
        if is_update is None:
            return None
        if is_capturing():
            self._captured |= is_update  # waiting is not allowed during capture
            return None
        call = None
        if not self._home.is_elsewhere():
            call = self._fenced(optimizer, args, kwargs)
            if call is None:
                self._fence()
        self._attempts += is_update
        return call

    def _fenced(self, optimizer: Optimizer, args: Args, kwargs: Kwargs) -> _Call | None:
        """The call with a closure that has the update wait when it returns; None without one."""
        given = kwargs.get("closure", args[1] if len(args) > 1 else None)  # args[0]: the optimizer
        if not callable(given) or type(optimizer).__module__.split(".")[:2] != ["torch", "optim"]:
            return None

        def closure() -> Any:
            result = given()
            self._fence()
            return result

        return args[:1], {**kwargs, "closure": closure}

    def _before_write(self) -> None:
        if not self._home.is_elsewhere():
            self._fence()
        # After the fence: an update that it refused did not happen.
        self._attempts += 1
        self._declared += 1

    def _add_attempt(self) -> None:
        self._attempts += 1
