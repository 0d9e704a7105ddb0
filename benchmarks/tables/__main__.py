"""``python -m benchmarks.tables``: write tables and plots anew from the committed result lines."""

from __future__ import annotations

from benchmarks.plots import draw_all
from benchmarks.tables import write_pages

if __name__ == "__main__":
    write_pages()
    draw_all()
