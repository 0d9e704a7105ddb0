"""Sphinx: the pages of this folder, and the API from the packages' docstrings."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import checkfreq

project = "checkfreq"
author = "The checkfreq authors"
project_copyright = author
release = checkfreq.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_heading_anchors = 3

# Docstrings write code between single or double backquotes.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True}
autodoc_type_aliases = {"ArrayLike": "ArrayLike", "Int64": "Int64"}
autodoc_mock_imports = [
    *(
        "nvidia.dali",
        "lightning",
        "pytorch_lightning",
        "torchmetrics",
        "accelerate",
        "transformers",
    ),
    "torchdata",
]

# A reference that a page writes as {py:obj} must lead somewhere. The types of signatures need not:
# our inner modules have no page, and other projects' could be found only over the network.
nitpicky = True
nitpick_ignore_regex = [("py:(class|data|exc)", ".*")]

html_theme = "furo"
html_title = f"checkfreq {release}"
html_copy_source = False

_FIELD = re.compile(r"^( *)(\w+(?:, \w+)*): (\S.*)$")


def as_definitions(lines: Sequence[str]) -> Iterator[str]:
    """Docstring lines, with the entries of ``name: what it is`` lists as definitions."""
    for before, line, after in zip(["", *lines], lines, [*lines[1:], ""], strict=False):
        found = _FIELD.match(line)
        if found and _is_entry(line, before, after):
            names = ", ".join(f"``{name}``" for name in found[2].split(", "))
            yield from (f"{found[1]}{names}", f"{found[1]}    {found[3]}")
        else:
            yield line


def _is_entry(line: str, before: str, after: str) -> bool:
    """Whether it is not prose: that goes on at the same indent, or is one line between blanks."""
    if not before.strip() and not after.strip():
        return False
    return not after.strip() or _indent(after) != _indent(line) or bool(_FIELD.match(after))


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _rewrite(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    lines[:] = as_definitions(lines)


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _rewrite)
