"""Whether updates can be relied on to ask the fence, so that settled tensors may be copied later.

They cannot be where no attempt was seen since the boundary before, nor in the rest of a run in
which a write was found that nobody had announced. A snapshot is then complete before the boundary
returns, whoever writes next. ``pass_boundary`` and ``holds`` belong to the training thread, the
rest to any.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sample:
    """Some bytes of settled tensors at a boundary, by name; ``attempts`` were seen before it."""

    attempts: int
    contents: Mapping[str, bytes]


class Evidence:
    """What is known in one run about updates and the fence."""

    def __init__(self) -> None:
        self._attempts = 0
        self._is_silent = False
        self._is_refuted = False
        self._latest: Sample | None = None

    @property
    def attempts(self) -> int:
        """Updates attempted before the latest boundary."""
        return self._attempts

    @property
    def holds(self) -> bool:
        """Whether settled tensors may be copied after the boundary has returned."""
        return not (self._is_silent or self._is_refuted)

    def pass_boundary(self, attempts: int) -> None:
        """Note a boundary, and how many updates were attempted before it."""
        self._is_silent = attempts == self._attempts
        self._attempts = attempts

    def refute(self) -> None:
        """A write was found that nobody had announced."""
        self._is_refuted = True

    def forget(self) -> None:
        """State was restored: what comes next is not compared with what was before."""
        self._latest = None

    def compare(self, sample: Sample) -> None:
        """Compare a complete snapshot with the one before it, and warn once if that refutes.

        Without an attempt between the two, nothing settled may differ; and nothing does in a loop
        that passes boundaries without an update, to accumulate gradients for example.
        """
        before, self._latest = self._latest, sample
        if self._is_refuted or before is None or before.attempts != sample.attempts:
            return
        names = [n for n, c in sample.contents.items() if before.contents.get(n, c) != c]
        if names:
            self.refute()
            logger.warning(
                "settled state changed between two snapshots, and no update was seen: %s. "
                "Snapshots are now complete before the manager's step() returns, which holds "
                "training for longer. Put every write that goes through no step() of a tracked "
                "optimizer (a replayed CUDA graph, an optimizer inside backward, p.data) into "
                "`with cf_manager.updating():`",
                ", ".join(names),
            )
