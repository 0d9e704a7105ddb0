"""Small datasets whose samples betray which random generator made them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset


class Augmented(Dataset[Any]):
    """Sample ``i`` is its id and one draw from each of the three generators."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "id": index,
            "torch": torch.rand(2),
            "python": random.random(),
            "numpy": np.random.rand(),
        }


class Plain(Dataset[int]):
    """Sample ``i`` is ``i``."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index


class ByBatch(Augmented):
    """A dataset that fetches a batch at a time."""

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [self[index] for index in indices]


class Folder(Plain):
    """Shaped like torchvision's ``ImageFolder``."""

    def __init__(self, root: str, names: list[str]) -> None:
        super().__init__(len(names))
        self.root = root
        self.samples = [(f"{root}/{name}", label) for label, name in enumerate(names)]
