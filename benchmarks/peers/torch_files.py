"""One file per checkpoint: ``torch.save``, and safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from benchmarks.lab.saver import Training


class TorchSave:
    """``torch.save`` of both state dicts; ``torch.load`` and ``load_state_dict``."""

    def __init__(self, training: Training) -> None:
        self._training = training

    def save(self, folder: Path) -> None:
        """Returns when everything is written."""
        torch.save(self._training.state(), folder / "state.pt")

    def load(self, folder: Path) -> None:
        """Read into new memory on the CPU, then copy into the training."""
        state = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
        self._training.load(state)

    def close(self) -> None:
        """Nothing to release."""


class Safetensors:
    """Every tensor of model and optimizer in one file, the optimizer's settings as metadata."""

    def __init__(self, training: Training) -> None:
        self._training = training

    def save(self, folder: Path) -> None:
        """Returns when everything is written."""
        from safetensors.torch import save_file

        groups = json.dumps(self._training.optimizer.state_dict()["param_groups"])
        save_file(self._tensors(), folder / "state.safetensors", {"param_groups": groups})

    def load(self, folder: Path) -> None:
        """Read into the live tensors."""
        from safetensors import safe_open

        live = self._tensors()
        path, device = folder / "state.safetensors", str(next(iter(live.values())).device)
        with safe_open(path, framework="pt", device=device) as file, torch.no_grad():
            for name in file.keys():  # noqa: SIM118  # the file is not a mapping
                live[name].copy_(file.get_tensor(name))
            groups: list[dict[str, Any]] = json.loads(file.metadata()["param_groups"])
        for group, saved in zip(self._training.optimizer.param_groups, groups, strict=True):
            group.update({key: value for key, value in saved.items() if key != "params"})

    def _tensors(self) -> dict[str, torch.Tensor]:
        state = self._training.state()
        tensors = {f"model.{name}": tensor for name, tensor in state["model"].items()}
        for index, entries in state["optimizer"]["state"].items():
            tensors |= {f"optimizer.{index}.{name}": entries[name] for name in entries}
        return tensors

    def close(self) -> None:
        """Nothing to release."""
