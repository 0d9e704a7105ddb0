"""Progress output and history."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from tqdm import tqdm

from checkfreq import CFManager
from checkfreq.examples.imagenet.ranks import Ranks
from iterators import CFIterator
from iterators.loop.cursor import EpochReport


class History:
    """Appends JSON lines to ``--history FILE``, each in one unbuffered write; None: nowhere.

    The first line of a process gives the time at which it had its data and its model.
    """

    def __init__(self, path: Path | None, ranks: Ranks) -> None:
        self._ranks = ranks
        self._file = None if path is None else path.open("ab", buffering=0)
        self._written: EpochReport | None = None

    def __enter__(self) -> History:
        self.write(ready_unix_s=time.time())
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, **line: Any) -> None:
        """Append one line; it survives a SIGKILL of this process."""
        if self._file is not None:
            self._file.write(json.dumps(line).encode() + b"\n")

    def write_epoch(self, batches: CFIterator | DataLoader[Any]) -> None:
        """What the last epoch served to all ranks, compared with every sample once.

        A plain loader cannot say, and a forced stop does not end an epoch.
        """
        report = batches.last_report if isinstance(batches, CFIterator) else None
        if report is not None and report is not self._written:
            self._written = report
            is_wrong = report.exact is not True or report.not_served > 0
            served, wrong = self._ranks.summed(report.served, is_wrong)
            self.write(epoch=report.epoch, served=int(served), exactly_once=not wrong)


class Progress:
    """The bar and the history of one epoch. Reads the loss only every ``--print-freq`` updates:
    each reading waits for the device, and for the other ranks."""

    def __init__(
        self,
        epoch: int,
        batches: CFIterator | DataLoader[Any],
        *,
        history: History,
        cf_manager: CFManager | None,
        args: argparse.Namespace,
        ranks: Ranks,
    ) -> None:
        self._epoch, self._history, self._cf_manager = epoch, history, cf_manager
        self._ranks = ranks
        self._print_freq: int = args.print_freq
        self._batch = batches.batch if isinstance(batches, CFIterator) else 0
        self._steps_per_epoch = len(batches)
        self._images, self._began_s = 0, time.monotonic()
        self._bar = tqdm(
            desc=f"epoch {epoch + 1}/{args.epochs}",
            total=self._steps_per_epoch,
            initial=self._batch,
            unit="batch",
            disable=True if args.quiet else None,  # None: only on a terminal
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    @property
    def epoch_is_over(self) -> bool:
        """False after a forced stop (``--steps-to-run``) in mid-epoch."""
        return self._batch == self._steps_per_epoch

    def update(
        self,
        *,
        loss: torch.Tensor,
        logits: torch.Tensor,
        target: torch.Tensor,
        counts: torch.Tensor,
    ) -> None:
        """One update was made. ``loss`` is a scalar, ``logits`` [N, C], ``target`` [N].

        ``counts`` [N] is 0 for pads, which are not images.
        """
        self._batch += 1
        self._images += int(counts.sum())
        figures: dict[str, float] = {}
        if self._batch % self._print_freq == 0:
            right = (logits.argmax(1) == target).cpu() * counts
            total, correct, images = self._ranks.summed(
                float(loss), float(right.sum()), float(counts.sum())
            )
            figures = {"loss": total / self._ranks.world, "accuracy": correct / max(images, 1)}
            self._show(**figures)
        step = self._epoch * self._steps_per_epoch + self._batch
        now = time.time()
        self._history.write(
            epoch=self._epoch, batch=self._batch, step=step, time_unix_s=now, **figures
        )
        self._bar.update()

    def _show(self, *, loss: float, accuracy: float) -> None:
        rate = self._ranks.world * self._images / (time.monotonic() - self._began_s)
        figures = {"loss": f"{loss:.3f}", "acc": f"{accuracy:.0%}", "images/s": f"{rate:.0f}"}
        if self._cf_manager is not None:
            figures["checkpoint"] = str(self._cf_manager.stats()["last_durable_step"] or "-")
        self._bar.set_postfix(figures, refresh=False)
