"""The options page has every option, with the default that it has."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import checkfreq
from checkfreq import CFCheckpoint, CFConfig, CFManager, Mirror
from iterators import CFIterator

PAGE = Path(__file__).resolve().parents[2] / "docs" / "options.md"
ROW = re.compile(r"^\| `(\w+)` \| [^|]+ \| (?:`([^|]+)`|required) \| ", re.MULTILINE)
REQUIRED = inspect.Parameter.empty


def documented(name: str) -> dict[str, object]:
    """Names and defaults in the section of a class."""
    section = PAGE.read_text().split(f"\n## `{name}`\n")[1].split("\n## ")[0]
    names = {public: getattr(checkfreq, public) for public in checkfreq.__all__}
    return {
        option: eval(default, names) if default else REQUIRED
        for option, default in ROW.findall(section)
    }


@pytest.mark.parametrize("of", [CFManager, CFCheckpoint, CFIterator, CFConfig, Mirror])
def test_every_argument_is_documented_with_its_default(of: Callable[..., object]) -> None:
    actual = {name: p.default for name, p in inspect.signature(of).parameters.items()}
    assert documented(of.__name__) == actual
