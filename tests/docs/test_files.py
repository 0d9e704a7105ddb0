"""The page with one row per file is what its script writes."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_page_of_every_file_is_up_to_date() -> None:
    written = runpy.run_path(str(DOCS / "files.py"))["page"]()
    assert (DOCS / "files.md").read_text() == written, "run: python docs/files.py"
