"""Loader workers that die of the signal which tells the run to stop.

A launcher may signal every process of the run, and a loader whose worker is gone fails, one way or
another, where the training thread happens to be. Then the run is to end as one that was told to
stop, and not by that error.
"""

from __future__ import annotations

import logging
import signal
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)

_LOADERS = "torch.utils.data."


def is_of_loader(error: BaseException) -> bool:
    """Whether it was raised in torch's loader, or by its handler of SIGCHLD."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__", "").startswith(_LOADERS):
            return True
        trace = trace.tb_next
    return False


def is_of_dead_worker(error: BaseException) -> bool:
    """Whether it is what a loader says, or the transport of its batches, when a worker is gone."""
    text = str(error)
    says = "killed by signal" in text or "exited unexpectedly" in text
    is_loaders = isinstance(error, RuntimeError) and "DataLoader worker" in text and says
    return is_loaders or isinstance(error, (ConnectionError, EOFError))


class QuietChildren:
    """Has the handler of SIGCHLD raise nothing; to be used in the main thread.

    Torch's raises when a worker has died, in the middle of whatever the training thread does. The
    batches that are there are as good as ever, and the first fetch without one finds out.
    """

    def __init__(self) -> None:
        self._previous: Any = None

    def install(self) -> None:
        """Begin; a second time does nothing."""
        previous = signal.getsignal(signal.SIGCHLD)
        if callable(previous) and previous != self._handle:
            self._previous = previous
            signal.signal(signal.SIGCHLD, self._handle)

    def uninstall(self) -> None:
        """Put the previous handler back, unless somebody replaced ours meanwhile."""
        if signal.getsignal(signal.SIGCHLD) == self._handle:
            signal.signal(signal.SIGCHLD, self._previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        try:
            self._previous(number, frame)
        except RuntimeError as error:
            logger.warning("while the run stops: %s", error)
