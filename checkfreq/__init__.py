"""checkfreq: frequent, low-overhead, crash-safe checkpoints for PyTorch training.

The names below are imported on first use (PEP 562), because the worker process and the command line
run without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from checkfreq.config import CFConfig as CFConfig
    from checkfreq.manager import CFManager as CFManager
    from checkfreq.mirror.settings import Mirror as Mirror
    from checkfreq.policy.retention import DEFAULT_RETENTION as DEFAULT_RETENTION
    from checkfreq.policy.retention import KeepBest as KeepBest
    from checkfreq.policy.retention import KeepEpochs as KeepEpochs
    from checkfreq.policy.retention import KeepEvery as KeepEvery
    from checkfreq.policy.retention import KeepLast as KeepLast
    from checkfreq.restore.load import load as load
    from checkfreq.state.checkpoint import CFCheckpoint as CFCheckpoint
    from checkfreq.types import CFMode as CFMode
    from checkfreq.types import Directory as Directory
    from checkfreq.types import Objective as Objective

__version__ = "0.1.0"

_HOME = {
    "CFCheckpoint": "checkfreq.state.checkpoint",
    "CFConfig": "checkfreq.config",
    "CFManager": "checkfreq.manager",
    "CFMode": "checkfreq.types",
    "DEFAULT_RETENTION": "checkfreq.policy.retention",
    "Directory": "checkfreq.types",
    "KeepBest": "checkfreq.policy.retention",
    "KeepEpochs": "checkfreq.policy.retention",
    "KeepEvery": "checkfreq.policy.retention",
    "KeepLast": "checkfreq.policy.retention",
    "Mirror": "checkfreq.mirror.settings",
    "Objective": "checkfreq.types",
    "load": "checkfreq.restore.load",
}

__all__ = [
    "DEFAULT_RETENTION",
    "CFCheckpoint",
    "CFConfig",
    "CFManager",
    "CFMode",
    "Directory",
    "KeepBest",
    "KeepEpochs",
    "KeepEvery",
    "KeepLast",
    "Mirror",
    "Objective",
    "load",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'checkfreq' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
