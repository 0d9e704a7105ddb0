"""Table of `benchmarks.lightning_loop`."""

from __future__ import annotations

from benchmarks.lab.callbacks import costs
from benchmarks.lab.tables import Line, Table, newest


def lightning_loop(lines: list[Line]) -> str:
    """What an iteration of Lightning costs beside the training."""
    return costs("Lightning", "plain_us", newest(lines, "arm"))


TABLES = {"lightning_loop": Table("lightning_loop", lightning_loop)}
