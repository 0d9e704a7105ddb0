"""Which commands a standby can become."""

from __future__ import annotations

import pytest

from checkfreq.supervisor.command import NotPythonError, PythonCommand, python_command


@pytest.mark.parametrize(
    ("line", "options", "is_module", "name", "arguments"),
    [
        ("/venv/bin/python3.11 -u train.py -u x", ("-u",), False, "train.py", ("-u", "x")),
        ("python3 -uOO -W error -X dev a.py", ("-uOO", "-Werror", "-Xdev"), False, "a.py", ()),
        ("python -uWerror a.py", ("-u", "-Werror"), False, "a.py", ()),
        ("python -m package.train --lr 1", (), True, "package.train", ("--lr", "1")),
        ("python -Im train", ("-I",), True, "train", ()),
    ],
)
def test_a_python_command_in_its_parts(
    line: str, options: tuple[str, ...], is_module: bool, name: str, arguments: tuple[str, ...]
) -> None:
    words = line.split()
    assert python_command(words) == PythonCommand(words[0], options, is_module, name, arguments)


@pytest.mark.parametrize(
    "line",
    [
        *("torchrun train.py", "python", "python -m", "python -"),
        *("python -c pass", "python -i train.py", "python --version", "python -W"),
    ],
)
def test_any_other_command_is_none(line: str) -> None:
    with pytest.raises(NotPythonError):
        python_command(line.split())
