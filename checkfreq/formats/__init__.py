"""Conversions between a checkpoint directory and the files of other libraries, both ways.

=====================  ==========================================  ========================
of                     to                                          from
=====================  ==========================================  ========================
``torch.save``         `to_torch_save`                             `from_torch_save`
DCP                    `to_dcp`                                    `from_dcp`
safetensors            `to_safetensors`                            `from_safetensors`
``save_pretrained``    `to_pretrained`                             `from_pretrained`
=====================  ==========================================  ========================

What is read is verified, and what is written appears whole or not at all, never over something that
is there unless ``overwrite=True``. Nothing is unpickled but what ``torch.load(weights_only=True)``
takes. Names are imported on first use; `checkfreq.formats.numpy_reader` needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from checkfreq.formats.dcp import from_dcp as from_dcp
    from checkfreq.formats.dcp import to_dcp as to_dcp
    from checkfreq.formats.pretrained import from_pretrained as from_pretrained
    from checkfreq.formats.pretrained import to_pretrained as to_pretrained
    from checkfreq.formats.single_file import from_safetensors as from_safetensors
    from checkfreq.formats.single_file import to_safetensors as to_safetensors
    from checkfreq.formats.torch_save import from_torch_save as from_torch_save
    from checkfreq.formats.torch_save import to_torch_save as to_torch_save

_HOME = {
    "from_dcp": "checkfreq.formats.dcp",
    "from_pretrained": "checkfreq.formats.pretrained",
    "from_safetensors": "checkfreq.formats.single_file",
    "from_torch_save": "checkfreq.formats.torch_save",
    "to_dcp": "checkfreq.formats.dcp",
    "to_pretrained": "checkfreq.formats.pretrained",
    "to_safetensors": "checkfreq.formats.single_file",
    "to_torch_save": "checkfreq.formats.torch_save",
}

__all__ = [
    "from_dcp",
    "from_pretrained",
    "from_safetensors",
    "from_torch_save",
    "to_dcp",
    "to_pretrained",
    "to_safetensors",
    "to_torch_save",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'checkfreq.formats' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
