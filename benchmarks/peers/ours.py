"""Ours: a manager that saves on request and keeps one checkpoint."""

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
    """With ``split`` every rank writes a part of replicated state; ``place`` of the snapshots."""

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
        """A boundary of the manager."""
        self._is_fresh = False
        if save:
            self._began_s = time.perf_counter()
        self._manager.step()
        if save:
            self._manager.save()
            self._step = self._manager.global_step

    def updating(self) -> AbstractContextManager[None]:
        """Wait for the copy if it is not done."""
        return self._manager.updating()

    def is_durable(self) -> bool:
        """Only the leader knows."""
        stats = self._manager.stats()
        durable = stats["last_durable_step"]
        is_there = durable is not None and durable >= self._step
        return _is_led() or is_there or stats["num_failed"] > 0

    def is_quiet(self) -> bool:
        """The worker has answered everything; answers are processed at boundaries."""
        return self.is_durable() and self._manager._pipeline.is_quiet

    def finish(self) -> Saved:
        """From the call to the worker's commit, on one clock; returns when the disk is idle."""
        self._manager.wait()
        committed = self._committed()
        self._wait_until_pruned()
        durable_s = committed["durable_monotonic_s"] - self._began_s
        return Saved(durable_s, committed["persist_s"])

    def _committed(self) -> Mapping[str, Any]:
        """The event of the last save; only the leader, which prunes after it, writes events."""
        if not _is_led():
            last = events(self._folder, "committed")[-1]
            assert last["step"] == self._step
            return last
        event = self._manager.last_event
        assert event is not None
        assert (event.kind, event.step) == ("committed", self._step)
        return event.data

    def _wait_until_pruned(self) -> None:
        """Wait for the removal of the previous checkpoint: it must not disturb another arm."""
        deadline_s = time.monotonic() + _PRUNED_WITHIN_S
        while sum(1 for kind in ("step-*", ".trash-*") for _ in self._folder.glob(kind)) > 1:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"nothing was pruned within {_PRUNED_WITHIN_S:.0f} s")
            time.sleep(0.01)

    def prepare_restore(self) -> None:
        """A manager restores only once, before training begins, so a new one takes over."""
        self._leave()
        self._manager, self._is_fresh = self._new_manager(), True

    def restore(self) -> None:
        """The manager's restore, which must be its first call."""
        assert self._is_fresh, "prepare_restore comes first"
        self._is_fresh = False
        assert self._manager.restore()

    def rest(self) -> None:
        """After a restore the manager prepares its slots in the background: end it."""
        self._leave()

    def discard(self) -> None:
        """Keep the checkpoint: a manager always has one."""

    def files(self) -> list[Path]:
        """The files of the newest checkpoint."""
        return sorted(path for path in self._folder.glob("step-*/*") if path.is_file())

    def close(self) -> None:
        """End the worker; the current checkpoint stays the newest."""
        self._leave()

    def _leave(self) -> None:
        """Leave as a failing loop does: work in flight is finished, nothing more is saved."""
        error = InterruptedError("the measurement is over")
        self._manager.__exit__(type(error), error, None)


def _is_led() -> bool:
    """Whether a different rank leads this one."""
    return dist.is_initialized() and dist.get_rank() != 0
