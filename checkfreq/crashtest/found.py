"""What the user's own variables hold: objects with a state, random generators, numbers.

Found by walking from the frames of the user's code that are being run, and from the globals of
``__main__``, through containers and attributes. Only an explanation is made of what is found here
by value; objects with a state are compared as tracked ones are.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from checkfreq.crashtest.flat import generator_text, plain_text, tensor_text

_MOST_OBJECTS = 3000
_MOST_DEPTH = 4
_MOST_ITEMS = 64
_MOST_BYTES = 1 << 20
_PLAIN = (bool, int, float, str)
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

    def add(self, name: str, value: Any, depth: int = 0) -> None:
        """Look at a value, and at what it holds."""
        if isinstance(value, _PLAIN):
            self.values[name] = plain_text(value)
            return
        if self._left <= 0 or id(value) in self._seen or _is_no_state(value):
            return
        self._left -= 1
        self._seen.add(id(value))
        text = generator_text(value)
        if text is not None:
            self.values[name] = text
        elif isinstance(value, Tensor):
            if value.nbytes <= _MOST_BYTES:
                self.values[name] = tensor_text(value)
        elif is_stateful(value):
            self._add_object(name, value)
        elif depth < _MOST_DEPTH:
            for part, item in _parts(value):
                self.add(f"{name}{part}", item, depth + 1)

    def _add_object(self, name: str, value: Any) -> None:
        self.objects[name] = value
        if isinstance(value, nn.Module):
            self._seen.update(id(module) for module in value.modules())


def find() -> Found:
    """Walk from the user's frames, the innermost first, and from ``__main__``."""
    found = Found()
    for variables in _variables():
        for name, value in [*variables.items()]:
            if not name.startswith("_") and not name.startswith("."):
                found.add(name, value)
    return found


def is_stateful(value: Any) -> bool:
    """Whether it has a state of the usual form, and is no loader, whose place is told otherwise."""
    if isinstance(value, nn.Module | Optimizer):
        return True
    if isinstance(value, type | DataLoader) or _is_ours(value):
        return False
    methods = (getattr(value, name, None) for name in ("state_dict", "load_state_dict"))
    return all(callable(method) for method in methods)


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
    main = vars(sys.modules["__main__"])
    for frame in _users_frames():
        if frame.f_locals is not frame.f_globals and frame.f_code.co_name != "<module>":
            yield dict(frame.f_locals)
    yield main


def _users_frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        inside = file.startswith((_PACKAGE, _ITERATORS, "<frozen", *_LIBRARIES))
        if not inside:
            yield frame
        frame = frame.f_back


def _is_no_state(value: Any) -> bool:
    return value is None or isinstance(
        value, type | ModuleType | FunctionType | nn.Parameter | bytes
    )


def _is_ours(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] in ("checkfreq", "iterators")


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds: items of containers, attributes of others."""
    if isinstance(value, dict):
        yield from ((f".{k}", v) for k, v in [*value.items()][:_MOST_ITEMS])
    elif isinstance(value, list | tuple):
        yield from ((f".{n}", v) for n, v in enumerate(value[:_MOST_ITEMS]))
    elif _is_ours(value):
        # The user's dataset is inside of our loader, and often has no other name.
        dataset = getattr(getattr(value, "_adapter", None), "_dataset", None)
        if dataset is not None:
            yield ".dataset", dataset
    elif hasattr(value, "__dict__"):
        for name, item in [*vars(value).items()][:_MOST_ITEMS]:
            if not name.startswith("__"):
                yield f".{name}", item
