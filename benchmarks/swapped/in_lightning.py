"""pytest plugin: every ``Trainer.fit`` has a CheckFreqCallback that checkpoints each iteration."""

from __future__ import annotations

import os
import tempfile
from typing import Any

from checkfreq.examples.imagenet.models import import_torchvision

import_torchvision()  # Lightning's import of one that does not fit torch fails

from lightning.pytorch import Trainer  # noqa: E402

from checkfreq import CFMode  # noqa: E402
from checkfreq.integrations.lightning import CheckFreqCallback  # noqa: E402

_init = Trainer.__init__


class Swapped(CheckFreqCallback):
    """Each fit has a directory of its own: a second fit of a run trains no further."""

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        """See CheckFreqCallback."""
        self._chk_dir = tempfile.mkdtemp()
        super().setup(trainer, pl_module, stage)


def init(self: Trainer, *arguments: Any, **options: Any) -> None:
    """Add ours to whatever callbacks there are."""
    _init(self, *arguments, **options)
    self.callbacks.append(Swapped(tempfile.mkdtemp(), mode=CFMode.MANUAL, chk_freq=1))


if os.environ["CHECKFREQ_SWAPPED"] == "1":
    Trainer.__init__ = init
