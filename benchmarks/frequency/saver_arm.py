"""Windows (`benchmarks.lab.paired`) of any `Saver` of benchmarks.peers, at an interval.

A saver that alternates between two places, as ours does, only needs `boundary`; its window ends
when it has also removed the previous checkpoint. The other savers are waited for before their next
save. Their user would have to remove the previous checkpoint at that time; this is done with the
clock stopped, and so is the sync of files that were not synced.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.lab.paired import Hooks, Window
from benchmarks.lab.training import Loop
from benchmarks.peers import Peer, Saved, Training


class Attached:
    """A saver attached to a loop; its hooks are on the optimizer only in its own windows.

    ``queues``: it accepts the next save while the last one is still running, and removes old
    checkpoints itself. ``saved``: the saves that were waited for, and how long each stopped
    training: in its call, and at weight updates until it was over.
    """

    def __init__(
        self,
        loop: Loop,
        peer: Peer,
        folder: Path,
        *,
        queues: bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.saver = peer.make(folder, Training(loop.model, loop.optimizer))
        self.queues, self.synced = queues, peer.synced
        self.clock = clock
        self.saved: list[tuple[Saved, float]] = []
        self._held_s = 0.0
        self._update = contextlib.ExitStack()
        loop.optimizer.register_step_pre_hook(self._begin_update)
        loop.optimizer.register_step_post_hook(self._end_update)
        self.hooks = Hooks(loop.optimizer)

    def boundary(self, *, save: bool) -> None:
        """Forwards to the saver."""
        if save:
            self._held_s = 0.0
        with self._holding():
            self.saver.boundary(save=save)

    @contextlib.contextmanager
    def _holding(self) -> Iterator[None]:
        start_s = self.clock()
        yield
        self._held_s += self.clock() - start_s

    def _begin_update(self, *_: Any) -> None:
        with self._holding():
            self._update.enter_context(self.saver.updating())

    def _end_update(self, *_: Any) -> None:
        self._update.close()

    def finish(self) -> float:
        """Wait for the last save; returns seconds that are not charged to any arm."""
        if not self.synced:
            while not self.saver.is_durable():
                time.sleep(1e-3)
        start_s = self.clock()
        saved = self.saver.finish()
        self.saved.append((saved, self._held_s))
        return saved.removal_s if self.synced else self.clock() - start_s


class SaverArm:
    """See Arm: whole intervals, at least ``length`` iterations of them."""

    taken = None

    def __init__(self, loop: Loop, attached: Attached, *, interval: int, length: int = 1) -> None:
        self.interval = interval
        self.iterations = interval * max(1, -(-length // interval))
        self._loop, self._attached = loop, attached
        self._uncounted_s = 0.0

    @property
    def num_saves(self) -> int:
        """The number of checkpoints in one window."""
        return self.iterations // self.interval

    def window(self) -> Window:
        """See Arm. It begins at the boundary of a checkpoint."""
        attached, self._uncounted_s = self._attached, 0.0
        with attached.hooks.attached():
            start_s = attached.clock()
            for index in range(self.iterations):
                self._pass_one(index)
            tail = self._drain()
            if not attached.queues:
                self._uncounted_s += attached.finish()
            self._loop.synchronize()
            seconds = attached.clock() - start_s - self._uncounted_s
        if attached.queues:
            attached.finish()
        return Window(seconds, self.iterations + tail, self.iterations)

    def _pass_one(self, index: int) -> None:
        is_due = index % self.interval == 0
        if is_due and index and not self._attached.queues:
            self._uncounted_s += self._attached.finish()
        self._attached.boundary(save=is_due)
        self._loop.iterate()

    def _drain(self) -> int:
        """Train until no background work is left; returns the number of iterations."""
        attached, count = self._attached, 0
        while not attached.saver.is_quiet():
            attached.boundary(save=False)
            self._loop.iterate()
            count += 1
        return count

    def close(self) -> None:
        """See Arm: whoever made the saver closes it."""
