"""Windows (windows.py) of any `Saver` of benchmarks.peers, at an interval.

Who saves into two places in turn, as we do, needs no more than `boundary`; its window ends when it
has removed the checkpoint before, too. Of the others each save is waited for before the next. Its
user would have to remove the checkpoint before, then; that is done with the clock stopped, and so
is a sync of what was not synced.
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
    """A saver of a loop, whose hooks are on the optimizer in its own windows alone.

    ``queues``: it takes the next save while the last one is still on its way, and tidies up by
    itself. ``saved``: what became of the saves that were waited for, and for how long each held
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
        """The saver's."""
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
        """Have the last save over and done with; returns seconds that are nobody's cost."""
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
        """Checkpoints in one window."""
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
        """Train until nothing goes on in the background; returns the iterations it took."""
        attached, count = self._attached, 0
        while not attached.saver.is_quiet():
            attached.boundary(save=False)
            self._loop.iterate()
            count += 1
        return count

    def close(self) -> None:
        """See Arm: the saver is closed by who made it."""
