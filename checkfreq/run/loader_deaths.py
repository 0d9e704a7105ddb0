"""Loader workers that are killed by the same signal that tells the run to stop.

A launcher may signal every process of the run. A loader whose worker is gone then raises, wherever
the training thread happens to be. Such a run should end as one that was told to stop, not with the
loader's error.
"""

from __future__ import annotations

import logging
import signal
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)

_LOADERS = "torch.utils.data."
#: Where a batch's memory is asked of the worker that made it.
_TRANSPORT = "multiprocessing.resource_sharer"


def is_of_loader(error: BaseException) -> bool:
    """Whether the error was raised in torch's loader, or by its SIGCHLD handler."""
    return _passed(error, _LOADERS)


def _passed(error: BaseException, modules: str) -> bool:
    """Whether the error passed through a function of modules whose names begin so."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__", "").startswith(modules):
            return True
        trace = trace.tb_next
    return False


def is_of_dead_worker(error: BaseException) -> bool:
    """Whether a loader, or the transport of its batches, raises such an error for a dead worker."""
    text = str(error)
    says = "killed by signal" in text or "exited unexpectedly" in text
    if isinstance(error, RuntimeError) and "DataLoader worker" in text and says:
        return True
    # A worker that ends by itself takes its sockets' names with it, unlike one that is killed. One
    # that only passes on what the dataset raised, a missing file for example, is alive.
    is_unreachable = isinstance(error, FileNotFoundError) and _passed(error, _TRANSPORT)
    return is_unreachable or isinstance(error, (ConnectionError, EOFError))


class QuietChildren:
    """Keeps the SIGCHLD handler from raising; for use in the main thread only.

    Torch's handler raises when a worker has died, in the middle of whatever the training thread is
    doing. Batches already delivered are still good, and the next fetch that lacks one will notice.
    """

    def __init__(self) -> None:
        self._previous: Any = None

    def install(self) -> None:
        """Replace the handler; a second call does nothing."""
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
