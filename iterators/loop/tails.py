"""Warns if an epoch's tail (validation, mostly) changes the random numbers of the next epoch.

Training thread only. Does not import torch: where nobody has, there is nothing to watch.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

logger = logging.getLogger(__name__)


class TailWatch:
    """Notices a tail that draws from torch's generator only the first time in a process.

    A resumed process then draws once more than an uninterrupted run, because its first tail comes
    later in the run. A DataLoader with persistent workers does so when it starts them. A tail that
    draws in every epoch does no harm. Validation in every second epoch cannot be told from the
    harmful case, and is warned about once. Takes about 10 us per epoch.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._before: Any = None
        self._first_drew: bool | None = None
        self._told = False

    def begins(self) -> None:
        """The last batch of the epoch was used."""
        torch = sys.modules.get("torch")
        self._before = None if self._told or torch is None else torch.get_rng_state()

    def ends(self) -> None:
        """The last boundary of the epoch is about to be passed."""
        before, self._before = self._before, None
        if before is None:
            return
        torch: Any = sys.modules["torch"]
        drew = not torch.equal(before, torch.get_rng_state())
        if self._first_drew is None:
            self._first_drew = drew
        elif self._first_drew and not drew:
            self._tell()

    def _tell(self) -> None:
        self._told = True
        logger.warning(
            "iterator %r: after the first epoch of this process something (validation?) drew from "
            "torch's global generator, and after a later epoch nothing did. A resumed process "
            "would draw once more, and train with different random numbers: put that code inside "
            "`with isolated_rng():` (from iterators), or give a "
            "DataLoader(persistent_workers=True) its own generator",
            self._name,
        )
