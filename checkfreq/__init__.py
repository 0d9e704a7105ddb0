"""checkfreq: frequent, low-overhead, crash-safe checkpoints for PyTorch training.

The names below are imported on first use (PEP 562), because the worker process and the command line
run without torch.
"""

from __future__ import annotations

import importlib
import sys
from importlib import util
from pathlib import Path
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
    from iterators.cf_iterator import CFIterator as CFIterator
    from iterators.loop.isolation import isolated_rng as isolated_rng

__version__ = "0.1.0"

_HOME = {
    "CFCheckpoint": "checkfreq.state.checkpoint",
    "CFConfig": "checkfreq.config",
    "CFIterator": "iterators.cf_iterator",
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
    "isolated_rng": "iterators.loop.isolation",
    "load": "checkfreq.restore.load",
}

__all__ = [
    "DEFAULT_RETENTION",
    "CFCheckpoint",
    "CFConfig",
    "CFIterator",
    "CFManager",
    "CFMode",
    "Directory",
    "KeepBest",
    "KeepEpochs",
    "KeepEvery",
    "KeepLast",
    "Mirror",
    "Objective",
    "isolated_rng",
    "load",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'checkfreq' has no attribute {name!r}")
    if _HOME[name].startswith("iterators."):
        _import_iterators()
    return getattr(importlib.import_module(_HOME[name]), name)


def _import_iterators() -> None:
    """Import the package ``iterators`` that was installed with this one.

    Python looks into the script's own folder first, where a file ``iterators.py`` would hide it.
    """
    folder = Path(__file__).resolve().parents[1] / "iterators"
    if (found := sys.modules.get("iterators")) is not None:
        if not hasattr(found, "CFIterator"):
            raise ImportError(
                f"{getattr(found, '__file__', found)} was imported as 'iterators', the name of a "
                "package that checkfreq needs: rename that file"
            )
        return
    spec = util.spec_from_file_location("iterators", folder / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules["iterators"] = module = util.module_from_spec(spec)
    spec.loader.exec_module(module)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
