"""Forks of the trainer: a child inherits the manager's objects, but neither its worker nor its run.

The socket, the slots and the signal handlers are shared with the parent, and the copy thread is not
there. So whatever belongs to a manager asks, before it acts, whether it is still where it was made.
"""

from __future__ import annotations

import logging
import os

logger = logging.getLogger(__name__)


class Home:
    """The process in which something was made."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid = os.getpid()
        self._has_said = False

    def is_elsewhere(self) -> bool:
        """Whether this is a fork of it; the first time there, say that nothing will be done."""
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
