"""Writes docs/files.md: every file of both packages, with the first paragraph of its docstring.

Run it from the checkout, ``python docs/files.py``; a test fails while the page is out of date.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "files.md"
HEAD = """# Every file

One row per file, from its docstring; `python docs/files.py` writes this page. Begin reading with
`ARCHITECTURE.md`.
"""


def page() -> str:
    """The whole page."""
    folders = {path.parent for package in ("checkfreq", "iterators") for path in files(package)}
    return "\n".join([HEAD, *(section(folder) for folder in sorted(folders))])


def files(package: str) -> Iterator[Path]:
    """The Python files of a package that say something."""
    return (p for p in sorted((ROOT / package).rglob("*.py")) if purpose(p))


def section(folder: Path) -> str:
    """A heading and a table for one folder."""
    name = folder.relative_to(ROOT).as_posix()
    own = folder / "__init__.py"
    rows = [
        f"| `{path.name}` | {purpose(path)} |"
        for path in sorted(folder.glob("*.py"))
        if path != own and purpose(path)
    ]
    return "\n".join([f"## {name}/", "", purpose(own), "", "| file | |", "|---|---|", *rows, ""])


def purpose(path: Path) -> str:
    """The first paragraph of a module's docstring, on one line."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return " ".join(text.split("\n\n")[0].split()).replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
