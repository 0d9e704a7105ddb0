"""Table of `benchmarks.callback`."""

from __future__ import annotations

from benchmarks.lab.callbacks import costs
from benchmarks.lab.tables import Line, Table, newest


def callback(lines: list[Line]) -> str:
    """What an update of the Trainer costs beside the training."""
    return costs("transformers `Trainer`", "without_us", newest(lines, "updates"))


TABLES = {"callback": Table("callback", callback)}
