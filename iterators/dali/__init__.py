"""NVIDIA DALI pipelines in our order: enterable anywhere, at any layout, to the same samples.

``FileReader`` goes into a pipeline in the place of ``fn.readers.file``; a ``CFIterator`` (or
``DALILoader``) over the iterator of that pipeline then resumes exactly. ``imagenet_train`` and
``imagenet_val`` are ready pipelines. Names are loaded on first use: importing the package needs
neither DALI nor torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from iterators.dali.imagenet import imagenet_train, imagenet_val
    from iterators.dali.indexed import DALILoader
    from iterators.dali.reader import FileReader

__all__ = ["DALILoader", "FileReader", "imagenet_train", "imagenet_val"]

_HOME = {
    "DALILoader": "indexed",
    "FileReader": "reader",
    "imagenet_train": "imagenet",
    "imagenet_val": "imagenet",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
