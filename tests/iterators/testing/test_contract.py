"""The digest tells apart what must be told apart, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from iterators.testing import digest


@dataclass
class Batch:
    image: torch.Tensor
    label: int


DIFFERENT: list[Any] = [
    *(None, 0, 0.0, -0.0, True, "0", b"0", [], (), {}, [0], [[0]], [0, 0]),
    *({"a": 0}, {"a": 1}, {"b": 0}),
    *(np.zeros(2), np.zeros(2, dtype=np.float32), np.zeros((1, 2)), np.float64(0)),
    *(torch.zeros(2), torch.zeros(1, 2), torch.zeros(2, dtype=torch.bfloat16)),
    *(torch.tensor([0.0, -0.0]), torch.tensor(0.0), torch.zeros(0)),
    *(Batch(torch.zeros(2), 1), Batch(torch.zeros(2), 2)),
]


def test_different_values_have_different_digests_and_each_has_one() -> None:
    assert len({digest(one) for one in DIFFERENT}) == len(DIFFERENT)
    assert [digest(one) for one in DIFFERENT] == [digest(one) for one in DIFFERENT]


def test_strides_are_not_content() -> None:
    square = torch.arange(6.0).reshape(2, 3)
    assert digest(square.t()) == digest(square.t().contiguous())
    assert digest(np.asarray(square).T) == digest(np.asarray(square).T.copy())
