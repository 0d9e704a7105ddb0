"""NVIDIA DALI pipelines that resume exactly.

``FileReader`` replaces ``fn.readers.file`` in a pipeline. A ``CFIterator`` (or ``DALILoader``) over
the iterator of that pipeline then resumes at any sample and any layout. ``imagenet_train`` and
``imagenet_val`` are ready pipelines. ``NativeDALILoader`` resumes pipelines with DALI's own readers
through DALI's own checkpoints, at the same layout only. Names are loaded on first use, so importing
the package imports neither DALI nor torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from iterators.dali.imagenet import imagenet_train, imagenet_val
    from iterators.dali.indexed import DALILoader
    from iterators.dali.native import NativeDALILoader
    from iterators.dali.reader import FileReader

__all__ = ["DALILoader", "FileReader", "NativeDALILoader", "imagenet_train", "imagenet_val"]

_HOME = {
    "DALILoader": "indexed",
    "FileReader": "reader",
    "NativeDALILoader": "native",
    "imagenet_train": "imagenet",
    "imagenet_val": "imagenet",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
