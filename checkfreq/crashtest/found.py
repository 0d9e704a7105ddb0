"""What the user's own variables hold: objects with a state, tensors, generators, numbers.

Found by walking from the frames of the user's code that are being run, and from the globals of
their modules, through plain containers and what objects hold. No code of the user's is run for it:
containers are read as those of Python that they are, and attributes are not computed. Only an
explanation is made of what is found by value; objects with a state are compared as tracked ones.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import sysconfig
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import (
    FrameType,
    FunctionType,
    GeneratorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from checkfreq.crashtest.flat import generator_text, plain_text, tensor_text

_MOST_OBJECTS = 3000
_MOST_DEPTH = 4
_MOST_ITEMS = 64
#: Of one tensor, and of all that are read in one walk.
_MOST_BYTES, _MOST_BYTES_IN_ALL = 16 << 20, 64 << 20
_PLAIN = (bool, int, float, str)
_CONTAINERS: tuple[Any, ...] = (list, tuple, deque)
_NO_STATE = (type, ModuleType, nn.Parameter, bytes, type(None))
_PACKAGE = str(Path(__file__).resolve().parents[1]) + "/"
_LIBRARIES = tuple(
    {f"{path}/" for name, path in sysconfig.get_paths().items() if name.endswith(("lib", "stdlib"))}
)
_ITERATORS = str(Path(_PACKAGE).parent / "iterators") + "/"


class Found:
    """What one walk found, by name."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.values: dict[str, str] = {}
        self._seen: set[int] = set()
        self._left = _MOST_OBJECTS
        self._bytes_left = _MOST_BYTES_IN_ALL

    def add(self, name: str, value: Any, depth: int = 0) -> None:
        """Look at a value, and at what it holds; one that cannot be read is left out."""
        with contextlib.suppress(Exception):
            self._add(name, value, type(value), depth)

    def _add(self, name: str, value: Any, kind: type, depth: int) -> None:
        if kind in _PLAIN:
            self.values.setdefault(name, plain_text(value))
            return
        if self._left <= 0 or issubclass(kind, _NO_STATE):
            return
        self._left -= 1
        if (text := generator_text(value)) is not None:
            self.values.setdefault(name, text)
        elif issubclass(kind, Tensor) or _is_of_numpy(kind):
            self._add_numbers(name, value)
        elif issubclass(kind, set | frozenset):
            self.values.setdefault(name, plain_text(value))
        elif id(value) not in self._seen:
            self._seen.add(id(value))
            self._add_object(name, value, kind, depth)

    def _add_object(self, name: str, value: Any, kind: type, depth: int) -> None:
        if is_stateful(value):
            self.objects.setdefault(name, value)
            if isinstance(value, nn.Module):
                self._add_module(name, value)
        elif depth < _MOST_DEPTH:
            for part, item in _parts(value, kind):
                self.add(f"{name}{part}", item, depth + 1)

    def _add_numbers(self, name: str, value: Any) -> None:
        """A tensor or an array, unless it was computed from parameters, as a loss is."""
        if getattr(value, "grad_fn", None) is not None or value.nbytes > _MOST_BYTES:
            return
        self._bytes_left -= value.nbytes
        if self._bytes_left >= 0:
            is_tensor = isinstance(value, Tensor)
            self.values.setdefault(name, tensor_text(value) if is_tensor else plain_text(value))

    def _add_module(self, name: str, module: nn.Module) -> None:
        """What no ``state_dict()`` holds: flags, and numbers that are attributes."""
        for key, one in module.named_modules(prefix=name):
            self._seen.add(id(one))
            for attribute, value in vars(one).items():
                if type(value) in (bool, int, float):
                    self.values[f"{key}.{attribute}"] = repr(value)
        for key, parameter in module.named_parameters(prefix=name):
            self.values[f"{key}.requires_grad"] = repr(parameter.requires_grad)


def find() -> Found:
    """Walk from the user's frames, the innermost first, and from the globals of their modules."""
    found = Found()
    for variables in _variables():
        for name, value in [*variables.items()]:
            if not name.startswith(("__", ".")):
                found.add(name, value)
    return found


def is_stateful(value: Any) -> bool:
    """Whether it has a state of the usual form, and is no loader, whose place is told otherwise."""
    kind = type(value)
    if issubclass(kind, nn.Module | Optimizer):
        return True
    if issubclass(kind, type | DataLoader) or _is_ours(kind):
        return False
    return all(callable(getattr(kind, name, None)) for name in ("state_dict", "load_state_dict"))


def users_place() -> str:
    """File and line of the innermost frame of the user's code; "" if there is none."""
    return next((_place(frame) for frame in _users_frames()), "")


def users_call(levels: int) -> str:
    """File and line of the caller so many levels up, if that is the user's code; else ""."""
    frame = sys._getframe(levels + 1)
    return _place(frame) if frame in [*_users_frames()] else ""


def _place(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _variables() -> Iterator[dict[str, Any]]:
    modules: list[dict[str, Any]] = []
    for frame in _users_frames():
        if frame.f_code.co_name != "<module>":
            yield dict(frame.f_locals)
        if not any(frame.f_globals is one for one in modules):
            modules.append(frame.f_globals)
    yield from modules
    yield vars(sys.modules["__main__"])


def _users_frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_PACKAGE, _ITERATORS)) and not _is_of_library(file):
            yield frame
        frame = frame.f_back


def _is_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("checkfreq", "iterators")


@functools.cache
def _is_of_library(file: str) -> bool:
    """Whether a module's file is none of the user's: installed somewhere, or Python's own."""
    installed = any(f"/{name}/" in file for name in ("site-packages", "dist-packages"))
    return installed or file.startswith(("<frozen", *_LIBRARIES))


def _is_of_numpy(kind: type) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(kind, numpy.ndarray | numpy.generic)


def _parts(value: Any, kind: type) -> Iterator[tuple[str, Any]]:
    """What an object holds: items of containers, attributes of others, variables of functions."""
    container = next((one for one in _CONTAINERS if issubclass(kind, one)), None)
    if issubclass(kind, dict):
        items = [*islice(dict.items(value), _MOST_ITEMS)]
        yield from ((f".{k}", v) for k, v in items if type(k) in _PLAIN)
    elif container is not None:
        held = [*islice(container.__iter__(value), _MOST_ITEMS)]
        yield from ((f".{n}", v) for n, v in enumerate(held))
    elif kind is GeneratorType:
        if value.gi_frame is not None:
            yield from ((f".{k}", v) for k, v in [*value.gi_frame.f_locals.items()])
    elif kind is FunctionType:
        names = zip(value.__code__.co_freevars, value.__closure__ or (), strict=False)
        yield from ((f".{name}", cell.cell_contents) for name, cell in names)
        yield from ((f".{k}", v) for k, v in vars(value).items())
    elif kind is MethodType:
        yield "", value.__self__
    elif _is_ours(kind):
        # The user's dataset is inside of our loader, and often has no other name.
        dataset = getattr(getattr(value, "_adapter", None), "_dataset", None)
        if dataset is not None:
            yield ".dataset", dataset
    else:
        yield from _attributes(value, kind)


def _attributes(value: Any, kind: type) -> Iterator[tuple[str, Any]]:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    hidden = "_" if file is None or _is_of_library(file) else "__"
    for base in kind.__mro__:
        for name, slot in vars(base).items():
            if type(slot) is MemberDescriptorType and not name.startswith(hidden):
                with contextlib.suppress(AttributeError):
                    yield f".{name}", slot.__get__(value)
    with contextlib.suppress(AttributeError):
        held = object.__getattribute__(value, "__dict__")
        for name, item in [*islice(dict.items(held), _MOST_ITEMS)]:
            if not name.startswith(hidden):
                yield f".{name}", item
