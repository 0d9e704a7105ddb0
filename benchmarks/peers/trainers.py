"""Checkpoints of trainers: Lightning, transformers' Trainer, accelerate.

Each is called as its own training loop calls it, so its additions to the state (random generators,
a scheduler, its arguments) are included; they are small.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.lab.saver import Training
from benchmarks.peers.folders import Pending
from checkfreq.examples.imagenet.models import import_torchvision


class Lightning:
    """``AsyncCheckpointIO`` over ``TorchCheckpointIO``: it clones in the training thread."""

    def __init__(self, training: Training) -> None:
        import_torchvision()  # lightning imports it if installed
        from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

        self._training = training
        self._io = AsyncCheckpointIO(TorchCheckpointIO())

    def save(self, folder: Path) -> Pending:
        """Returns when every tensor is cloned; ``teardown`` is its way to wait, and to raise."""
        state = self._training.state()
        whole = {"state_dict": state["model"], "optimizer_states": [state["optimizer"]]}
        self._io.save_checkpoint(whole, str(folder / "state.ckpt"))
        return Pending(self._io.teardown)

    def load(self, folder: Path) -> None:
        """Read into new memory, then copy into the training."""
        whole = self._io.load_checkpoint(str(folder / "state.ckpt"), weights_only=True)
        state = {"model": whole["state_dict"], "optimizer": whole["optimizer_states"][0]}
        self._training.load(state)

    def close(self) -> None:
        """End its thread."""
        self._io.teardown()


class Trainer:
    """transformers' Trainer: what ``save_strategy="steps"`` writes, the optimizer included."""

    def __init__(self, training: Training) -> None:
        import_torchvision()  # transformers imports it if installed
        import transformers

        arguments = transformers.TrainingArguments(
            output_dir=".",  # each save has its own folder
            report_to=[],
            disable_tqdm=True,
            use_cpu=not _is_on_cuda(training),
        )
        self._trainer = transformers.Trainer(
            training.model,
            arguments,
            optimizers=(training.optimizer, LambdaLR(training.optimizer, lambda _: 1.0)),
        )

    def save(self, folder: Path) -> None:
        """Returns when everything is written."""
        self._trainer.args.output_dir = str(folder)
        self._trainer._save_checkpoint(self._trainer.model, trial=None)

    def load(self, folder: Path) -> None:
        """Restore like ``train(resume_from_checkpoint=...)``."""
        checkpoint = str(next(folder.glob("checkpoint-*")))
        self._trainer._load_from_checkpoint(checkpoint)
        self._trainer._load_optimizer_and_scheduler(checkpoint)
        self._trainer._load_rng_state(checkpoint)

    def close(self) -> None:
        """Nothing to release: it holds no copy of the state."""


class Accelerate:
    """accelerate's ``save_state`` and ``load_state``."""

    def __init__(self, training: Training) -> None:
        from accelerate import Accelerator

        self._accelerator = Accelerator(cpu=not _is_on_cuda(training), device_placement=False)
        self._accelerator.prepare(training.model, training.optimizer)

    def save(self, folder: Path) -> None:
        """Returns when everything is written."""
        self._accelerator.save_state(str(folder))

    def load(self, folder: Path) -> None:
        """Read into new memory, then copy into the training."""
        self._accelerator.load_state(str(folder))

    def close(self) -> None:
        """Release the training."""
        self._accelerator.free_memory()


def _is_on_cuda(training: Training) -> bool:
    parameter: torch.Tensor = next(training.model.parameters())
    return parameter.is_cuda
