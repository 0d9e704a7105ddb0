"""Wrappers around an optimizer or a scheduler, such as accelerate's: the object inside is tracked.

This is done only if the wrapper's state is that of the object inside: a wrapper with more state,
such as the slow weights of a look-ahead optimizer, would lose it.
"""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from checkfreq.errors import StateError


def unwrapped(name: str, value: Any) -> Any:
    """``value``, or the torch optimizer or scheduler that it only passes calls on to.

    Raises StateError for an Optimizer that was never initialised as one and does not wrap one with
    the same state.
    """
    if isinstance(value, Optimizer):
        return value if _is_initialised(value) else _inner_optimizer(name, value)
    inner = getattr(value, "scheduler", None)
    is_scheduler = isinstance(inner, LRScheduler) and not isinstance(value, LRScheduler)
    return inner if is_scheduler and _passes_on(value, inner) else value


def was_skipped(wrapper: Any) -> bool:
    """Whether the GradScaler inside accelerate's wrapper skipped the latest step."""
    gradients = getattr(wrapper, "gradient_state", None)
    asked = getattr(gradients, "sync_gradients", True)  # False while gradients accumulate
    return bool(asked and getattr(wrapper, "step_was_skipped", False))


def _inner_optimizer(name: str, wrapper: Optimizer) -> Optimizer:
    inner = getattr(wrapper, "optimizer", None)
    if isinstance(inner, Optimizer) and _passes_on(wrapper, inner):
        found: Optimizer = unwrapped(name, inner)
        return found
    kind = type(wrapper)
    raise StateError(
        f"CFCheckpoint({name}=...): {kind.__module__}.{kind.__qualname__} is a torch Optimizer "
        "that never called Optimizer.__init__, and has no .optimizer whose state is its own; "
        "expected a torch.optim.Optimizer, or a wrapper around one. Track the one inside, and "
        "any state of the wrapper beside it"
    )


def _is_initialised(optimizer: Optimizer) -> bool:
    return "_optimizer_step_pre_hooks" in vars(optimizer)


def _passes_on(wrapper: Any, inner: Any) -> bool:
    """Whether both have the same state: equal entries and, for an optimizer, the same objects."""
    outer_state, inner_state = wrapper.state_dict(), inner.state_dict()
    if not isinstance(outer_state, dict) or outer_state.keys() != inner_state.keys():
        return False
    if isinstance(inner, Optimizer):
        return wrapper.state is inner.state and wrapper.param_groups is inner.param_groups
    return bool(outer_state == inner_state)
