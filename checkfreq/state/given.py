"""What a script gives an optimizer or a scheduler before any training: rates, betas, horizons.

A checkpoint keeps the values of the run's first start, as text, beside the state. A restore
compares them with what the script gives now, so a rate that a schedule has changed is no
difference, and a horizon that the user has changed is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor
from torch.optim import Optimizer
from xxhash import xxh3_64_hexdigest

from checkfreq.state.adapters.base import Findings
from checkfreq.state.saved import SavedObject
from checkfreq.types import Json

#: Values as text by name: of each param_group; or of a scheduler and of those inside it, in order.
Given: TypeAlias = Sequence[Mapping[str, str]]

#: Entries of param_groups that select an implementation and not a result.
IMPLEMENTATION = frozenset({"foreach", "fused", "capturable", "differentiable"})
#: What a restore leaves as it is, or follows from other values.
_NOT_GIVEN = IMPLEMENTATION | {"params", "_schedulers", "_last_lr"}

#: Of longer texts, the length and a digest are kept.
_MOST_CHARACTERS = 200


def given_to_groups(groups: Iterable[Mapping[str, Any]]) -> Given:
    """The values of an optimizer's param_groups."""
    return [_texts(group) for group in groups]


def given_to_scheduler(state: Any) -> Given:
    """The values in a scheduler's state dict, and in those of the schedulers inside it."""
    return [_texts(one) for one in _with_inner(state)]


class FirstGiven:
    """What was given at the first start of a run: by this script, until a restore says otherwise.

    ``json`` is kept in checkpoints: ``values`` lists values that differ, and ``of`` says which of
    them each group has.
    """

    def __init__(self, now: Given) -> None:
        self._now = now
        self._set(now)

    def compare(self, name: str, saved: SavedObject, state: Given, findings: Findings) -> None:
        """Add to ``findings`` what the script gives in another way than at the first start.

        ``state``: the values that the checkpoint has. Where the script gives the same, or
        ``saved.kept`` names the entry, nothing is overridden.
        """
        first = self._first(saved, state)
        for i, (then, now, old) in enumerate(zip(first, self._now, state, strict=False)):
            number = f"[{i}]" if len(self._now) > 1 else ""
            for key, value in now.items():
                if then.get(key, value) != value != old.get(key):
                    text = f"{name}{number}.{key}: {then[key]} at the first start, {value} now"
                    findings.overridden[text] = f"{name}.{key}"

    def take_up(self, saved: SavedObject, state: Given) -> None:
        """From now on, what the saved run was given counts; of ``saved.kept``, what this one is."""
        first = [
            {**then, **{key: now[key] for key in saved.kept if key in now}}
            for then, now in zip(self._first(saved, state), self._now, strict=False)
        ]
        self._set([*first, *self._now[len(first) :]])

    @staticmethod
    def _first(saved: SavedObject, state: Given) -> Given:
        """As the checkpoint has it; one that was made in another way has the state alone."""
        node = saved.json.get("given")
        if node is None:
            return state
        try:
            values = [
                {str(key): str(one) for key, one in value.items()} for value in node["values"]
            ]
            return [values[number] for number in node["of"]]
        except (LookupError, TypeError, AttributeError) as error:
            raise saved.corrupt("what was given at the start", "values", repr(error)) from error

    def _set(self, first: Given) -> None:
        values: list[dict[str, str]] = []
        numbers = []
        for one in map(dict, first):
            if one not in values:
                values.append(one)
            numbers.append(values.index(one))
        self.json: Json = {"values": values, "of": numbers}


def is_scheduler_of(value: Any, optimizers: Iterable[Optimizer]) -> bool:
    """Whether an object with a state changes one of the optimizers by a schedule."""
    own = getattr(value, "optimizer", None)
    return isinstance(own, Optimizer) and any(own is one for one in optimizers)


def _plain(value: Any) -> Any:
    """A value with numbers in place of tensors; ValueError if it is not plain."""
    if value is None or isinstance(value, bool | int | float | complex | str):
        return value
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Mapping):
        return {_plain(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    raise ValueError(f"a {type(value).__qualname__}")


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for key, value in values.items():
        if key in _NOT_GIVEN or not isinstance(key, str):
            continue
        try:
            text = repr(_plain(value))
        except (TypeError, ValueError):  # an object of the user's
            continue
        if len(text) > _MOST_CHARACTERS:
            text = f"{len(text)} characters ({xxh3_64_hexdigest(text.encode())})"
        found[key] = text
    return found


def _with_inner(state: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(state, Mapping):
        yield state
        inner = state.get("_schedulers")
        for one in inner if isinstance(inner, list | tuple) else ():
            yield from _with_inner(one)
