"""Whether saved state may be passed to a live object's own ``load_state_dict``.

Many of these methods are ``__dict__.update``, torch's schedulers' among them: any entry of the
checkpoint becomes an attribute. So nothing is passed that hides a method or replaces something
callable, and to torch's own schedulers only entries that they save themselves, of the same kind.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

logger = logging.getLogger(__name__)


def state_of(value: Any) -> Any:
    """Its ``state_dict()``; None if that raises, which need not keep a restore from working."""
    try:
        return value.state_dict()
    except Exception:
        logger.debug("state_dict() of a %s raised", type(value).__qualname__, exc_info=True)
        return None


def misfits(path: str, live: Any, state: Any) -> Iterator[str]:
    """A sentence on each entry of ``state`` that ``live`` (called ``path``) must not load."""
    known = state_of(live)
    if not isinstance(state, Mapping) or not isinstance(known, Mapping):
        return
    for key, value in state.items():
        if key not in known:
            if isinstance(key, str) and _is_taken(live, key):
                yield f"{path}: checkpoint has {key!r:.80}, which the live object does not save"
        elif (callable(known[key]) and type(value) is not type(known[key])) or (
            isinstance(live, LRScheduler) and not alike(known[key], value)
        ):
            yield f"{path}.{key}: checkpoint has {_kind(value)}, live has {_kind(known[key])}"
    if isinstance(live, LRScheduler):
        yield from _inner_misfits(path, live, state)


def _is_taken(live: Any, key: str) -> bool:
    """Whether the object has something of this name that state must not replace."""
    of_class = getattr(type(live), key, None)
    own = getattr(live, "__dict__", {})
    if callable(of_class) or callable(own.get(key)) or key.startswith("__"):
        return True
    return isinstance(live, LRScheduler) and (key in own or hasattr(type(live), key))


def _inner_misfits(path: str, live: LRScheduler, state: Mapping[str, Any]) -> Iterator[str]:
    """``misfits`` of a scheduler's inner schedulers, and of the objects that LambdaLR updates."""
    for name in ("_schedulers", "lr_lambdas"):
        inner, states = getattr(live, name, None), state.get(name)
        if not isinstance(inner, list | tuple) or states is None:
            continue
        if not isinstance(states, list | tuple) or len(states) != len(inner):
            yield f"{path}.{name}: live has {len(inner)}, checkpoint has a different number"
            continue
        for number, (one, saved) in enumerate(zip(inner, states, strict=True)):
            place = f"{path}.{name}[{number}]"
            if name == "_schedulers":
                if not isinstance(saved, dict):
                    yield f"{place}: checkpoint has {_kind(saved)}, expected a state"
                yield from misfits(place, one, saved)
            elif saved is not None:
                yield from _lambda_misfits(place, one, saved)


def _lambda_misfits(place: str, live: Any, saved: Any) -> Iterator[str]:
    if not isinstance(saved, dict) or not hasattr(live, "__dict__"):
        yield f"{place}: checkpoint has {_kind(saved)}, expected attributes"
        return
    for key in saved:
        if not isinstance(key, str) or _is_taken(live, key):
            yield f"{place}: checkpoint has {key!r:.80}, which is no attribute of the live object"


def only_known(live: Any, state: Any) -> Any:
    """``state`` without entries that a scheduler of this version of torch does not have."""
    if not isinstance(live, LRScheduler) or not type(live).__module__.startswith("torch."):
        return state
    known = state_of(live)
    if not isinstance(known, Mapping) or not isinstance(state, Mapping):
        return state
    kept = {key: value for key, value in state.items() if key in known}
    if "_schedulers" in kept:
        inner: Any = getattr(live, "_schedulers", ())
        kept["_schedulers"] = list(map(only_known, inner, kept["_schedulers"]))
    return kept


def alike(live: Any, saved: Any) -> bool:
    """Whether ``saved`` may replace ``live``: values of one kind, or either of them None."""
    return live is None or saved is None or _kind(live) == _kind(saved)


def _kind(value: Any) -> str:
    if hasattr(value, "dtype") and hasattr(value, "item"):  # tensors, NumPy arrays and scalars
        return "a number"
    for kind, name in _KINDS.items():
        if isinstance(value, kind):
            return name
    return "something callable" if callable(value) else f"a {type(value).__name__}"


_KINDS: dict[type | tuple[type, ...], str] = {
    type(None): "nothing",
    (bool, int, float, complex): "a number",
    str: "text",
    (list, tuple): "a list",
    Mapping: "a dict",
}
