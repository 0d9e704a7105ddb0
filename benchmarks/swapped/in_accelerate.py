"""pytest plugin: an ``Accelerator`` saves and loads its state with checkfreq."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from accelerate import Accelerator

from checkfreq import CFManager, CFMode
from checkfreq.integrations.accelerate import checkpoint_of

_save_state, _load_state = Accelerator.save_state, Accelerator.load_state


def _manager(accelerator: Accelerator, folder: Any) -> CFManager:
    return CFManager(folder, checkpoint_of(accelerator), mode=CFMode.MANUAL, chk_freq=0)


def save_state(self: Accelerator, *arguments: Any, **options: Any) -> Any:
    """Name and delete checkpoints as accelerate does; write what is in them with ours."""

    def save(output_dir: Any, *_: Any, **__: Any) -> Any:
        with _manager(self, output_dir) as manager:
            manager.step()
            manager.save(wait=True)
        return output_dir

    with patch("accelerate.accelerator.save_accelerator_state", save):
        return _save_state(self, *arguments, **options)


def load_state(self: Accelerator, *arguments: Any, **options: Any) -> Any:
    """Find the checkpoint as accelerate does; restore it with ours."""

    def load(input_dir: Any, *_: Any, **__: Any) -> dict[str, Any]:
        with _manager(self, input_dir) as manager:
            assert manager.restore()
        return {}

    with patch("accelerate.accelerator.load_accelerator_state", load):
        return _load_state(self, *arguments, **options)


Accelerator.save_state, Accelerator.load_state = save_state, load_state
