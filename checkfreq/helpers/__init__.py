"""Small tools for loops that save files of their own, count, or take the time of their phases.

* `atomic_save`: ``torch.save`` to a path, as the whole new file or the whole old one.
* `AtomicDirectory`: checkpoints of many files, with a pointer to the newest complete one.
* `Metrics`: numbers that add up over batches and ranks, and continue with a checkpoint.
* `Timer`: where the time of a loop goes.

None of them needs a CFManager. What a crash must not damage, nor a power cut, they sync before it
counts. Names are imported on first use, and torch only where it is needed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from checkfreq.helpers.atomic_directory import AtomicDirectory as AtomicDirectory
    from checkfreq.helpers.metrics import Best as Best
    from checkfreq.helpers.metrics import Metrics as Metrics
    from checkfreq.helpers.saving import atomic_save as atomic_save
    from checkfreq.helpers.sums import Summary as Summary
    from checkfreq.helpers.timer import PhaseTime as PhaseTime
    from checkfreq.helpers.timer import Timer as Timer

_HOME = {
    "AtomicDirectory": "checkfreq.helpers.atomic_directory",
    "Best": "checkfreq.helpers.metrics",
    "Metrics": "checkfreq.helpers.metrics",
    "PhaseTime": "checkfreq.helpers.timer",
    "Summary": "checkfreq.helpers.sums",
    "Timer": "checkfreq.helpers.timer",
    "atomic_save": "checkfreq.helpers.saving",
}

__all__ = [
    "AtomicDirectory",
    "Best",
    "Metrics",
    "PhaseTime",
    "Summary",
    "Timer",
    "atomic_save",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'checkfreq.helpers' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
