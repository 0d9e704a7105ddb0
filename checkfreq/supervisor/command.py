"""Which commands a standby can become: a Python that runs a script or a module."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_PYTHON = re.compile(r"python(3(\.[0-9]+)?)?")
#: Options that may stand together behind one dash, and those that take a value.
_FLAGS, _WITH_VALUE = frozenset("bBdEIOPqsSuv"), frozenset("WX")


class NotPythonError(Exception):
    """A standby cannot become this command; the message says why."""


@dataclass(frozen=True, slots=True)
class PythonCommand:
    """``python -u train.py --lr 0.1``, or with ``is_module`` ``python -u -m train --lr 0.1``."""

    executable: str
    options: tuple[str, ...]
    is_module: bool
    name: str
    arguments: tuple[str, ...]


def python_command(command: Sequence[str]) -> PythonCommand:
    """The command in its parts. Raises NotPythonError for any other."""
    executable, *rest = command
    if not _PYTHON.fullmatch(executable.rpartition("/")[2]):
        raise NotPythonError(f"{executable} is not a Python interpreter")
    options: list[str] = []
    while rest:
        word = rest.pop(0)
        if not word.startswith("-"):
            return PythonCommand(executable, tuple(options), False, word, tuple(rest))
        flags, letter, value = _parts(word)
        if not _FLAGS.issuperset(flags) or letter not in {*_WITH_VALUE, "m", ""}:
            raise NotPythonError(f"Python's option {word} is not supported")
        if letter and not value:
            if not rest:
                break
            value = rest.pop(0)
        options += [f"-{flags}"] if flags else []
        if letter == "m":
            return PythonCommand(executable, tuple(options), True, value, tuple(rest))
        options += [f"-{letter}{value}"] if letter else []
    raise NotPythonError("it names neither a script nor a module")


def _parts(word: str) -> tuple[str, str, str]:
    """``-uXdev`` is the flags ``u``, the letter ``X`` and its value ``dev``."""
    letters = word[1:]
    for index, letter in enumerate(letters):
        if letter not in _FLAGS:
            return letters[:index], letter, letters[index + 1 :]
    return letters, "", ""
