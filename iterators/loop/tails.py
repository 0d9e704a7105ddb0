"""What an epoch's tail, validation above all, does to the random numbers of the next epoch.

Training thread only. Does not import torch: without it there is nothing to watch.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

logger = logging.getLogger(__name__)


class TailWatch:
    """Notices an epoch's tail that draws from torch's generator only the first time in a process.

    Then a resumed process, whose first tail comes later, draws once more than an unbroken run.
    What each tail draws alike is no harm, so it is not spoken of; validation in every second epoch
    looks the same as harm, and hears of it once. About 10 us per epoch.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._before: Any = None
        self._first_drew: bool | None = None
        self._told = False

    def begins(self) -> None:
        """The epoch's last batch was used."""
        torch = sys.modules.get("torch")
        self._before = None if self._told or torch is None else torch.get_rng_state()

    def ends(self) -> None:
        """The epoch's last boundary is about to be passed."""
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
            "torch's global generator, and after a later one nothing did. A resumed process would "
            "draw once more, and train with other random numbers: put it inside `with "
            "isolated_rng():` (from iterators), or give a DataLoader(persistent_workers=True) a "
            "generator of its own",
            self._name,
        )
