"""Ours: a manager that saves when told to and keeps one checkpoint."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.lab.events import events
from benchmarks.lab.saver import Saved, Training
from checkfreq import CFCheckpoint, CFConfig, CFManager, CFMode, KeepLast
from checkfreq.types import SnapshotPlace

_PRUNED_WITHIN_S = 60.0


class CheckFreq:
    """With ``split`` every rank writes a part of what all have; ``place`` of the snapshots."""

    def __init__(
        self,
        folder: Path,
        training: Training,
        *,
        split: bool = False,
        place: SnapshotPlace | None = None,
    ) -> None:
        self._folder, self._training, self._split, self._place = folder, training, split, place
        self._step, self._began_s = 0, 0.0
        self._manager, self._is_fresh = self._new_manager(), True

    def _new_manager(self) -> CFManager:
        return CFManager(
            self._folder,
            CFCheckpoint(model=self._training.model, optimizer=self._training.optimizer),
            mode=CFMode.MANUAL,
            chk_freq=0,
            retention=KeepLast(1),
            config=CFConfig(split_replicated=self._split, snapshot_place=self._place),
        )

    def boundary(self, *, save: bool) -> None:
        """One of the manager's."""
        self._is_fresh = False
        if save:
            self._began_s = time.perf_counter()
        self._manager.step()
        if save:
            self._manager.save()
            self._step = self._manager.global_step

    def updating(self) -> AbstractContextManager[None]:
        """Waits for the copy, if that is not done."""
        return self._manager.updating()

    def is_durable(self) -> bool:
        """The leader knows."""
        stats = self._manager.stats()
        durable = stats["last_durable_step"]
        is_there = durable is not None and durable >= self._step
        return _is_led() or is_there or stats["num_failed"] > 0

    def is_quiet(self) -> bool:
        """The worker has answered everything; its answers are taken in at boundaries."""
        return self.is_durable() and self._manager._pipeline.is_quiet

    def finish(self) -> Saved:
        """From the call to the worker's commit, by one clock; returns when the disk has rest."""
        self._manager.wait()
        committed = self._committed()
        self._wait_until_pruned()
        durable_s = committed["durable_monotonic_s"] - self._began_s
        return Saved(durable_s, committed["persist_s"])

    def _committed(self) -> Mapping[str, Any]:
        """The last save's event; only the leader, who prunes after it, writes events down."""
        if not _is_led():
            last = events(self._folder, "committed")[-1]
            assert last["step"] == self._step
            return last
        event = self._manager.last_event
        assert event is not None
        assert (event.kind, event.step) == ("committed", self._step)
        return event.data

    def _wait_until_pruned(self) -> None:
        """The checkpoint before is gone: its removal must not fall into another arm's sample."""
        deadline_s = time.monotonic() + _PRUNED_WITHIN_S
        while sum(1 for kind in ("step-*", ".trash-*") for _ in self._folder.glob(kind)) > 1:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"nothing was pruned within {_PRUNED_WITHIN_S:.0f} s")
            time.sleep(0.01)

    def prepare_restore(self) -> None:
        """A manager restores once, before training begins: a new one takes over."""
        self._leave()
        self._manager, self._is_fresh = self._new_manager(), True

    def restore(self) -> None:
        """The manager's, which does nothing before it."""
        assert self._is_fresh, "prepare_restore comes first"
        self._is_fresh = False
        assert self._manager.restore()

    def rest(self) -> None:
        """Behind its restore a manager makes its slots ready: this one is over."""
        self._leave()

    def discard(self) -> None:
        """A manager has a checkpoint at all times."""

    def files(self) -> list[Path]:
        """What the newest checkpoint consists of."""
        return sorted(path for path in self._folder.glob("step-*/*") if path.is_file())

    def close(self) -> None:
        """End the worker; the checkpoint that is there stays the newest."""
        self._leave()

    def _leave(self) -> None:
        """As a failing loop does: what is in flight is finished, nothing more is saved."""
        error = InterruptedError("the measurement is over")
        self._manager.__exit__(type(error), error, None)


def _is_led() -> bool:
    """Whether another rank leads this one."""
    return dist.is_initialized() and dist.get_rank() != 0
