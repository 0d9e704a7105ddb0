"""NVIDIA DALI, made resumable. Importing this needs neither DALI nor torch.

``NativeDALILoader`` resumes a pipeline of DALI's own readers through DALI's own checkpoints.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from iterators.dali.native import NativeDALILoader

__all__ = ["NativeDALILoader"]

_HOME = {"NativeDALILoader": "native"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
