"""What trainers write: Lightning, transformers' Trainer, accelerate.

Each is called as its own training loop calls it, so that what it adds to the state (random
generators, a scheduler, its arguments) is there; that is small.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.imagenet.models import import_torchvision
from benchmarks.lab.saver import Training
from benchmarks.peers.folders import Pending


class Lightning:
    """``AsyncCheckpointIO`` over ``TorchCheckpointIO``: clones in the training thread."""

    def __init__(self, training: Training) -> None:
        import_torchvision()  # which lightning imports if it is there
        from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO

        self._training = training
        self._io = AsyncCheckpointIO(TorchCheckpointIO())

    def save(self, folder: Path) -> Pending:
        """Until every tensor is cloned; ``teardown`` is its way to wait, and to raise."""
        state = self._training.state()
        whole = {"state_dict": state["model"], "optimizer_states": [state["optimizer"]]}
        self._io.save_checkpoint(whole, str(folder / "state.ckpt"))
        return Pending(self._io.teardown)

    def load(self, folder: Path) -> None:
        """Into new memory, and from there into the training."""
        whole = self._io.load_checkpoint(str(folder / "state.ckpt"), weights_only=True)
        state = {"model": whole["state_dict"], "optimizer": whole["optimizer_states"][0]}
        self._training.load(state)

    def close(self) -> None:
        """End its thread."""
        self._io.teardown()


class Trainer:
    """transformers' Trainer: what ``save_strategy="steps"`` writes, optimizer and all."""

    def __init__(self, training: Training) -> None:
        import_torchvision()  # which transformers imports if it is there
        import transformers

        arguments = transformers.TrainingArguments(
            output_dir=".",  # each save has its own
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
        """All of it before it returns."""
        self._trainer.args.output_dir = str(folder)
        self._trainer._save_checkpoint(self._trainer.model, trial=None)

    def load(self, folder: Path) -> None:
        """As ``train(resume_from_checkpoint=...)`` does."""
        checkpoint = str(next(folder.glob("checkpoint-*")))
        self._trainer._load_from_checkpoint(checkpoint)
        self._trainer._load_optimizer_and_scheduler(checkpoint)
        self._trainer._load_rng_state(checkpoint)

    def close(self) -> None:
        """It holds nothing of the state."""


class Accelerate:
    """accelerate's ``save_state`` and ``load_state``."""

    def __init__(self, training: Training) -> None:
        from accelerate import Accelerator

        self._accelerator = Accelerator(cpu=not _is_on_cuda(training), device_placement=False)
        self._accelerator.prepare(training.model, training.optimizer)

    def save(self, folder: Path) -> None:
        """All of it before it returns."""
        self._accelerator.save_state(str(folder))

    def load(self, folder: Path) -> None:
        """Into new memory, and from there into the training."""
        self._accelerator.load_state(str(folder))

    def close(self) -> None:
        """Let go of the training."""
        self._accelerator.free_memory()


def _is_on_cuda(training: Training) -> bool:
    parameter: torch.Tensor = next(training.model.parameters())
    return parameter.is_cuda
