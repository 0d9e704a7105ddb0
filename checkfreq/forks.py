"""Forks of the training process, such as loader workers: the manager does nothing in them.

A forked child inherits the manager's objects. It shares the socket, the slots and the signal
handlers with the parent, but has no copy thread. So before anything of a manager acts, it asks
whether it is still in the process that made it.
"""

from __future__ import annotations

import logging
import os

logger = logging.getLogger(__name__)


class Home:
    """The process in which an object was made; ``what`` names the object in a warning."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid = os.getpid()
        self._has_said = False

    def is_elsewhere(self) -> bool:
        """Whether this process is a fork of it. In a fork, the first call logs a warning."""
        if os.getpid() == self._pid:
            return False
        if not self._has_said:
            self._has_said = True
            logger.warning(
                "process %d is a fork of the training process %d: %s does nothing here; "
                "checkpoints are taken by the parent",
                os.getpid(),
                self._pid,
                self._what,
            )
        return True
