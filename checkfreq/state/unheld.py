"""Parameters that a tracked optimizer steps and no tracked object holds.

They are saved with their optimizer, since their moments are worth nothing without them. What holds
them may have more to save, so each is named once. Used by the training thread only.
"""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from types import FrameType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from checkfreq.errors import printable
from checkfreq.state.composed import is_composed, take_apart
from checkfreq.state.dtensors import is_dtensor, local_of
from checkfreq.state.tensors import LAZY

if TYPE_CHECKING:
    from checkfreq.state.collector import TensorRef

logger = logging.getLogger(__name__)

_MOST_NAMED = 4
_MOST_OBJECTS = 5000
_MOST_ITEMS = 1000
_MOST_DEPTH = 4
_NO_HOLDERS = (str, bytes, int, float, type, FunctionType, ModuleType, Optimizer)
_OURS = frozenset({"checkfreq", "iterators"})


class Held:
    """What tracked objects hold: parameters by ``id``, and the memory of all tensors."""

    def __init__(self) -> None:
        self.ids: set[int] = set()
        #: None until all of them were read.
        self.refs: Sequence[TensorRef] | None = None
        #: Names of objects whose state dict may be a copy.
        self.opaque: frozenset[str] = frozenset()

    def lacks(self, parameters: Sequence[Tensor]) -> list[int]:
        """Numbers of the ``parameters`` of which some memory is not held."""
        if self.refs is None:
            return []
        others = [n for n, parameter in enumerate(parameters) if id(parameter) not in self.ids]
        if not others:  # nearly always
            return []
        memory = _Memory([ref.tensor for ref in self.refs])
        return [n for n in others if not all(map(memory.has, _parts(parameters[n])))]

    def has_copy(self, tensor: Tensor) -> bool:
        """Whether an object's state dict has the same values, although not the memory."""
        local = local_of(tensor).detach()
        return any(
            ref.tensor.shape == local.shape
            and ref.tensor.dtype == local.dtype
            and torch.equal(ref.tensor, local.to(ref.tensor))
            for ref in self.refs or ()
            if ref.stem in self.opaque
        )


class _Memory:
    """The memory of some tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._empty = {t.untyped_storage()._cdata for t in tensors if not t.numel()}
        self._begins: list[int] = []
        self._ends: list[int] = []
        for begin, end in sorted(map(_span, tensors)):
            if self._ends and begin <= self._ends[-1]:
                self._ends[-1] = max(end, self._ends[-1])
            else:
                self._begins.append(begin)
                self._ends.append(end)

    def has(self, part: Tensor) -> bool:
        """Whether all of it lies there."""
        local = local_of(part)
        if not local.numel():  # of a DTensor: the other ranks must find the same
            return not is_dtensor(part) or local.untyped_storage()._cdata in self._empty
        begin, end = _span(local)
        at = bisect_right(self._begins, begin) - 1
        return at >= 0 and end <= self._ends[at]


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that it consists of; none of a lazy one, which has no memory yet."""
    if is_composed(tensor):
        for part in take_apart(tensor, "")[1].values():
            yield from _parts(part)
    elif not isinstance(tensor, LAZY):
        yield tensor


def _span(tensor: Tensor) -> tuple[int, int]:
    """Addresses of the first byte, and of the one behind the last."""
    begin = tensor.data_ptr()
    if not tensor.numel():
        return begin, begin
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return begin, begin + (last + 1) * tensor.element_size()


def warn_of_unheld(optimizer: str, numbers: Sequence[int], parameters: Sequence[Tensor]) -> None:
    """Name parameters that are saved with their optimizer, and the line that tracks them."""
    variables: dict[int, Variable] = {}
    with contextlib.suppress(Exception):  # the walk meets objects that run code when looked at
        variables = find_variables(parameters[number] for number in numbers)
    named = []
    for number in numbers[:_MOST_NAMED]:
        one = parameters[number]
        kind = f"parameter {number}, {str(one.dtype).removeprefix('torch.')}{list(one.shape)}"
        found = variables.get(id(one))
        named.append(kind if found is None else f"{found.path} ({kind})")
    if more := len(numbers) - len(named):
        named.append(f"and {more} more")
    lines = dict.fromkeys(found.line for found in variables.values())
    logger.warning(
        "%s steps parameters that no tracked object holds: %s. They are saved and restored with "
        "the optimizer, but nothing else is of what holds them, such as buffers. Track that: "
        "CFCheckpoint(..., %s)",
        optimizer,
        printable("; ".join(named)),
        printable(", ".join(islice(lines, _MOST_NAMED))) or "name=the_object",
    )


class Variable(NamedTuple):
    """Where the user's variables hold a tensor, and the argument that tracks it."""

    path: str
    line: str
    #: Of several, the least is taken: 0 for what holds nothing that is tracked already.
    rank: int


def find_variables(tensors: Iterable[Tensor]) -> dict[int, Variable]:
    """By ``id``, the variables of the running code that hold the tensors, as far as found.

    A walk over a few thousand objects, from the innermost frame outwards, shortest paths first. It
    looks at types and not at what an object claims to be: a lazy one would load itself.
    """
    wanted = frozenset(map(id, tensors))
    found: dict[int, Variable] = {}
    seen: set[int] = set()
    waiting = deque((variable, value, 0) for variable, value in _users_variables())
    while waiting and len(seen) < _MOST_OBJECTS:
        variable, value, depth = waiting.popleft()
        kind = type(value)
        if issubclass(kind, Tensor):
            if id(value) in wanted:
                found[id(value)] = min(found.get(id(value), variable), variable, key=_rank)
        elif id(value) not in seen and not issubclass(kind, _NO_HOLDERS) and depth < _MOST_DEPTH:
            seen.add(id(value))
            if kind.__module__.partition(".")[0] not in _OURS:
                waiting += ((*one, depth + 1) for one in _inside(variable.path, value, wanted))
    return found


def _rank(variable: Variable) -> int:
    return variable.rank


def _inside(path: str, value: Any, wanted: frozenset[int]) -> Iterator[tuple[Variable, Any]]:
    """What a container or object holds."""
    name = re.findall(r"[^\W\d]\w*", path)[-1]
    items: dict[str, Any] = {}
    line = f"{name}={path}"
    kind = type(value)
    if issubclass(kind, dict):
        items = {f"[{key!r:.80}]": item for key, item in islice([*dict.items(value)], _MOST_ITEMS)}
    elif issubclass(kind, list | tuple):
        sequence = list if issubclass(kind, list) else tuple
        items = {f"[{n}]": item for n, item in enumerate([*sequence.__iter__(value)][:_MOST_ITEMS])}
        line = line if sequence is list else f"{name}=[*{path}]"
    elif issubclass(kind, nn.Module):
        items = {f".{key}": parameter for key, parameter in value.named_parameters()}
    inner = [id(item) for item in items.values() if issubclass(type(item), Tensor)]
    rank = 0 if wanted.issuperset(inner) else 2
    for part, item in items.items():
        yield Variable(path + part, line, rank), item
    if not kind.__dictoffset__:
        return
    for key, item in islice([*object.__getattribute__(value, "__dict__").items()], _MOST_ITEMS):
        if not key.startswith("__"):
            yield _alone(key, f"{path}.{key}"), item


def _alone(name: str, path: str) -> Variable:
    return Variable(path, f'{name}={{"{name}": {path}}}', 1)


def _users_variables() -> Iterator[tuple[Variable, Any]]:
    frame: FrameType | None = sys._getframe(1)
    modules: dict[int, dict[str, Any]] = {}
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        if package not in _OURS and "site-packages" not in frame.f_code.co_filename:
            modules[id(frame.f_globals)] = frame.f_globals
            for name, value in [*frame.f_locals.items()]:
                yield _alone(name, name), value
        frame = frame.f_back
    for variables in modules.values():
        for name, value in [*variables.items()]:
            if not name.startswith("__"):
                yield _alone(name, name), value
