"""Random generators that a dataset, its transforms or a ``collate_fn`` keep for themselves.

They are looked for where code that makes samples can reach them: attributes, containers, closures,
arguments of partial functions, and globals that methods and functions name. The search takes a few
milliseconds at most and calls nothing of the user's. Samplers and loaders keep theirs. Any process.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import pickle
import random
import sys
import types
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

if TYPE_CHECKING:
    from iterators.order.batch_requests import Seeding

logger = logging.getLogger(__name__)

#: An object, and how it is reached: ``dataset.transform.rng``.
_Found: TypeAlias = tuple[str, Any]

_MOST_OBJECTS = 50_000
_MOST_ITEMS = 1_000
_MASK_63, _MASK_64 = (1 << 63) - 1, (1 << 64) - 1
_LEAVES = (
    *(type(None), bool, int, float, complex, str, bytes, range, type(Ellipsis), np.ndarray),
    *(np.generic, np.dtype, torch.Tensor, torch.dtype, torch.device),
)
#: Libraries in whose code no generator of a dataset is found.
_LIBRARIES = sys.stdlib_module_names | {"torch", "numpy", "checkfreq", "iterators"}
#: Instances of their classes whose attributes hold what is the user's.
_LOOKED_INTO = (Dataset, torch.nn.Module, types.SimpleNamespace)
#: What keeps generators for other purposes, or nothing of interest.
_OTHERS = (types.ModuleType, DataLoader, Sampler)
_WRAPPERS: dict[type, str] = {
    staticmethod: "__func__",
    classmethod: "__func__",
    property: "fget",
    functools.cached_property: "func",
}
_GENERATORS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)
_GLOBAL: tuple[Any, ...] = (
    random.sample.__self__,  # type: ignore[attr-defined]
    np.random.mtrand._rand,
    torch.default_generator,
)
_SCATTER = 0x9E3779B97F4A7C15


class PrivateGenerators:
    """The private generators that can be reached from ``roots``, by the name of each root.

    Two of them get different numbers: the key of a sample is mixed with how each is reached.
    """

    def __init__(self, seeding: Seeding, **roots: Any) -> None:
        self._seeding, self._roots = seeding, roots
        self._seeds: list[tuple[Callable[[int], object], int]] = []
        self.found: dict[str, Any] = {}
        self._states: dict[str, bytes] = {}

    def look(self, **more_roots: Any) -> bool:
        """Search, from ``more_roots`` too, and return whether there are others than before."""
        self._roots |= more_roots
        found = dict(_generators(self._roots.items()))
        if found.keys() == self.found.keys() and all(
            found[path] is self.found[path] for path in found
        ):
            return False
        self.found = found
        self._seeds = [
            (seed, int.from_bytes(blake2b(path.encode(), digest_size=8).digest(), "big"))
            for path, one in found.items()
            if _is_chosen(one, self._seeding) and (seed := _seed_of(one)) is not None
        ]
        return True

    def set(self, key: int) -> None:
        """Seed all of them with a 64-bit key."""
        for seed, salt in self._seeds:
            seed(key ^ salt)

    def shares_with(self, others: PrivateGenerators) -> bool:
        """Whether one of ``others`` is among them."""
        mine = {id(one) for one in self.found.values()}
        return any(id(one) in mine for one in others.found.values())

    def moved(self) -> str:
        """How one is reached that was drawn from since the last call; empty if none was."""
        before = self._states
        self._states = {
            path: pickle.dumps(_accessors(one)[0]()) for path, one in self.found.items()
        }
        moved = (path for path, state in before.items() if self._states.get(path, state) != state)
        return next(moved, "")

    @contextlib.contextmanager
    def disturbed(self) -> Iterator[None]:
        """Other states in all of them for now."""
        accessors = [_accessors(one) for one in self.found.values()]
        states = [get() for get, _ in accessors]
        self.set(0)
        try:
            yield
        finally:
            for (_, put), state in zip(accessors, states, strict=True):
                put(state)


def warn_of_unseedable(seeding: Seeding, **roots: Any) -> None:
    """Warn, once for each, of private generators that cannot be seeded."""
    for path, one in _generators(roots.items()):
        if _is_chosen(one, seeding) and _seed_of(one) is None:
            _warn_once(path, type(getattr(one, "bit_generator", one)).__name__)


@functools.cache
def _warn_once(path: str, kind: str) -> None:
    logger.warning(
        "%s is a %s, which cannot be seeded: what it draws for a sample is not drawn again after a "
        "restart, so a resumed run has other bits. Write numpy.random.default_rng() there",
        path,
        kind,
    )


def _is_chosen(generator: Any, seeding: Seeding) -> bool:
    if isinstance(generator, torch.Generator):
        return seeding.torch
    return seeding.python if isinstance(generator, random.Random) else seeding.numpy


def _seed_of(generator: Any) -> Callable[[int], object] | None:
    """A function that seeds ``generator`` with 64 bits; None if nothing can."""
    if isinstance(generator, torch.Generator):
        return lambda key: generator.manual_seed(key & _MASK_63)
    if isinstance(generator, random.SystemRandom):
        return None
    if isinstance(generator, random.Random):
        return generator.seed
    bits = getattr(generator, "bit_generator", None)
    if bits is None or isinstance(bits, np.random.MT19937):
        legacy = generator if bits is None else np.random.RandomState(bits)
        return lambda key: legacy.seed(key & 0xFFFFFFFF)
    if isinstance(bits, np.random.PCG64):
        return _seed_of_pcg(bits)
    try:
        type(bits)(0)
    except TypeError:
        return None
    return lambda key: setattr(bits, "state", type(bits)(key).state)


def _accessors(generator: Any) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    """Functions that read and set the state of ``generator``."""
    if isinstance(generator, random.SystemRandom):
        return tuple, lambda state: None
    if isinstance(generator, random.Random):
        return generator.getstate, generator.setstate
    if isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        return lambda: bits.state, lambda state: setattr(bits, "state", state)
    return generator.get_state, generator.set_state


def _seed_of_pcg(bits: np.random.PCG64) -> Callable[[int], None]:
    """Sets the state itself: 1 us, where making a state from a seed takes 7 us."""
    numbers = {"state": 0, "inc": _SCATTER << 64 | 1}
    state: Any = {"bit_generator": "PCG64", "state": numbers, "has_uint32": 0, "uinteger": 0}

    def seed(key: int) -> None:
        numbers["state"] = (key * _SCATTER & _MASK_64) << 64 | key
        bits.state = state

    return seed


# The search


def _generators(roots: Iterable[_Found]) -> Iterator[_Found]:
    """Each generator once, breadth first: the shortest path names it, in every process alike."""
    # Objects too: the id of one that is gone could be that of the next. The global generators are
    # reached through their functions (``from random import sample``), and seeded elsewhere.
    seen: dict[int, Any] = {id(one): one for one in _GLOBAL}
    left, named = deque(roots), Counter[str]()
    while left and len(seen) < _MOST_OBJECTS:
        path, one = left.popleft()
        kind = type(one)  # isinstance() may ask a proxy for its class, and run code of the user's
        if issubclass(kind, _LEAVES) or id(one) in seen:
            continue
        seen[id(one)] = one
        if issubclass(kind, _GENERATORS):
            yield f"{path}#{named[path]}" if named[path] else path, one
            named[path] += 1
        elif not issubclass(kind, _OTHERS):
            left.extend(_inside(path, one, kind))


def _inside(path: str, one: Any, kind: type) -> Iterator[_Found]:
    """What ``one`` refers to, read without running any code of the user's."""
    if issubclass(kind, types.FunctionType):
        yield from _inside_function(path, one)
    elif issubclass(kind, type):
        yield from _inside_class(path, one)
    elif issubclass(kind, functools.partial):
        yield from ((path, part) for part in (one.func, one.args, one.keywords))
    elif issubclass(kind, types.MethodType):
        yield from ((path, part) for part in (one.__self__, one.__func__))
    elif issubclass(kind, types.BuiltinMethodType):
        yield path, one.__self__  # as in self.draw = rng.normal
    else:
        yield from _inside_container(path, one, kind)
        yield from _inside_object(path, one, kind)


def _inside_container(path: str, one: Any, kind: type) -> Iterator[_Found]:
    if issubclass(kind, dict):
        for key, value in islice(dict.items(one), _MOST_ITEMS):
            yield f"{path}[{key!r:.40}]" if type(key) in (str, int) else path, value
    for base in (list, tuple, set, frozenset, deque):
        if issubclass(kind, base):
            for index, value in enumerate(islice(base.__iter__(one), _MOST_ITEMS)):
                yield f"{path}[{index}]", value


def _inside_object(path: str, one: Any, kind: type) -> Iterator[_Found]:
    if _is_library(kind.__module__) and not issubclass(kind, _LOOKED_INTO):
        return
    with contextlib.suppress(AttributeError):
        attributes = object.__getattribute__(one, "__dict__")
        yield from ((f"{path}.{name}", value) for name, value in dict.items(attributes))
    for name, slot in _slots(kind):
        with contextlib.suppress(AttributeError):
            yield f"{path}.{name}", slot.__get__(one)
    yield kind.__qualname__, kind


@functools.cache
def _slots(kind: type) -> list[tuple[str, types.MemberDescriptorType]]:
    slots = [item for base in kind.__mro__ for item in vars(base).items()]
    return [item for item in slots if isinstance(item[1], types.MemberDescriptorType)]


def _inside_class(path: str, kind: type) -> Iterator[_Found]:
    if _is_library(kind.__module__):
        return
    for name, value in vars(kind).items():
        inner = _WRAPPERS.get(type(value))
        yield f"{path}.{name}", getattr(value, inner) if inner else value
    yield from ((base.__qualname__, base) for base in kind.__bases__)


def _inside_function(path: str, function: types.FunctionType) -> Iterator[_Found]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not yet assigned
            yield f"{path}.{name}", cell.cell_contents
    for part in (function.__defaults__, function.__kwdefaults__, function.__dict__):
        yield path, part
    if not _is_library(function.__module__):
        module = function.__module__.replace("__mp_main__", "__main__")  # in a spawned worker
        yield from _named({module: function.__globals__}, frozenset(_names_in(function.__code__)))


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names_in(inner)


def _named(modules: dict[str, dict[str, Any]], names: frozenset[str]) -> Iterator[_Found]:
    """The variables of ``modules`` that a function names, also in modules that it names."""
    left = list(modules)
    while left:
        module = left.pop(0)
        for name in sorted(names & modules[module].keys()):
            value = modules[module][name]
            if type(value) is not types.ModuleType:
                yield f"{module}.{name}", value
            elif not _is_library(value.__name__) and value.__name__ not in modules:
                modules[value.__name__] = vars(value)
                left.append(value.__name__)


def _is_library(module: Any) -> bool:
    return not isinstance(module, str) or module.partition(".")[0] in _LIBRARIES
