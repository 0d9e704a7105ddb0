"""pytest plugin: DCP's file system writer and reader are checkfreq's; ranks are forked.

The suite starts its ranks anew, each of which imports torch and would not have the swap.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from torch.distributed.checkpoint import filesystem
from torch.testing._internal.common_distributed import MultiProcessTestCase

from checkfreq.integrations.dcp import CFStorageReader, CFStorageWriter


class Writer(CFStorageWriter):
    """Takes what a ``FileSystemWriter`` is given; one step at each path."""

    def __init__(self, path: Any, *_: Any, **__: Any) -> None:
        super().__init__(path, step=0, overwrite=True)


class Reader(CFStorageReader):
    """Takes what a ``FileSystemReader`` is given."""

    def __init__(self, path: Any, *_: Any, **__: Any) -> None:
        super().__init__(path, trust_pickle=True)


def forked(self: MultiProcessTestCase) -> None:
    """Start the ranks by fork."""
    self._start_processes(torch.multiprocessing.get_context("fork").Process)


MultiProcessTestCase._spawn_processes = forked
if os.environ["CHECKFREQ_SWAPPED"] == "1":
    for module in (dcp, filesystem):
        module.FileSystemWriter, module.FileSystemReader = Writer, Reader
