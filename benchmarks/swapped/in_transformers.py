"""pytest plugin: a ``Trainer`` has a CheckFreqCallback, and resumes from its checkpoints.

The checkpoint-N that a test resumes from is found as the Trainer finds it; ours of step N is
restored in its place, so a test that has changed what is in the Trainer's own sees no difference.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

from checkfreq.examples.imagenet.models import import_torchvision

import_torchvision()  # transformers' import of one that does not fit torch fails

from transformers import Trainer, TrainerState  # noqa: E402
from transformers.trainer_utils import get_last_checkpoint  # noqa: E402

from checkfreq import CFManager, CFMode, KeepLast  # noqa: E402
from checkfreq.integrations.transformers import CheckFreqCallback  # noqa: E402

_train = Trainer.train
_step = CFManager.step


def step(self: CFManager, *given: Any, **options: Any) -> Any:
    """Each step's checkpoint is durable before the next: a test may resume from any."""
    passed = _step(self, *given, **options)
    self.wait()
    return passed


def train(self: Trainer, resume_from_checkpoint: Any = None, *rest: Any, **options: Any) -> Any:
    """Checkpoint each update beside the Trainer's own; resume from the step that was asked for."""
    given = resume_from_checkpoint
    folder = get_last_checkpoint(self.args.output_dir) if given is True else given
    if given and not Path(folder or "", "trainer_state.json").exists():
        return _train(self, given, *rest, **options)  # which says so
    settings: dict[str, Any] = {"mode": CFMode.MANUAL, "chk_freq": 1, "retention": KeepLast(1000)}
    restore = CFManager.restore
    if given:
        state = TrainerState.load_from_json(str(Path(folder, "trainer_state.json")))
        restore = functools.partialmethod(restore, step=state.global_step)
    runs_dir = Path(folder).parent if given else Path(self.args.output_dir)
    callback = CheckFreqCallback(runs_dir / "checkfreq", fresh=not given, **settings)
    self.add_callback(callback)
    with patch.object(Trainer, "train", _train):
        callback.attach(self)
    try:
        with patch.object(CFManager, "restore", restore):
            trained = self.train(None, *rest, **options)
    finally:
        self.remove_callback(callback)
        del self.train  # the callback's
    assert callback.manager is not None
    assert callback.manager.latest_step() == self.state.global_step
    return trained


if os.environ["CHECKFREQ_SWAPPED"] == "1":
    Trainer.train = train
    CFManager.step = step
