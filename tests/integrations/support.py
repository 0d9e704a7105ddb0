"""State trees, comparisons, and what DCP wraps errors in."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException


def nested_state() -> dict[str, Any]:
    """Everything that a state dict may hold, at every depth."""
    return {
        "matrix": torch.arange(12.0).reshape(3, 4),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "transposed": torch.arange(6).reshape(2, 3).t(),
        "dtypes": {str(t.dtype): t for t in tensors_of_all_dtypes()},
        "numbers": [1, 2, 3],
        "mixed": [torch.ones(2), {"deep": [torch.zeros(1), 5]}],
        "pair": (torch.ones(1), "text"),
        "ordered": OrderedDict(a=torch.ones(2), b=None),
        "plain": {"int": 7, "float": 0.5, "text": "é", "none": None, "nothing": {}},
    }


def tensors_of_all_dtypes() -> list[Tensor]:
    """One of each dtype that matters, no two bytes alike."""
    numbers = torch.arange(1, 7)
    kinds = (torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.uint8, torch.int64)
    eight = (torch.float8_e4m3fn, torch.float8_e5m2)
    return [
        *(numbers.to(kind) for kind in (*kinds, *eight)),
        numbers % 2 == 0,
        torch.complex(numbers.float(), -numbers.float()),
        torch.complex(numbers.double(), -numbers.double()),
    ]


def blank(value: Any) -> Any:
    """The same tree with zeros, and None for whatever is no tensor."""
    if isinstance(value, Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return type(value)((key, blank(item)) for key, item in value.items())
    if isinstance(value, list) and any(isinstance(item, Tensor | dict) for item in value):
        return [blank(item) for item in value]
    return None


def same(one: Any, two: Any) -> bool:
    """Bitwise equal trees of the same types."""
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        alike = one.dtype == two.dtype and one.shape == two.shape
        return alike and _bytes(one) == _bytes(two)
    if type(one) is not type(two):
        return False
    if isinstance(one, dict):
        return list(one) == list(two) and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    return bool(one == two)


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().contiguous().flatten()
    return flat.view(torch.uint8).numpy().tobytes()


def failure_of(do: Callable[[], Any], *, rank: int = 0) -> BaseException:
    """The error inside the CheckpointException that ``do`` raises."""
    try:
        do()
    except CheckpointException as error:
        return error.failures[rank][0]
    raise AssertionError("it did not fail")


class Net(nn.Module):
    """A small model with all that matters: buffers, a 0-d counter, tied weights."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6))
        self.head = nn.Linear(6, 8, bias=False)
        self.tied = self.inner[2]

    def forward(self, x: Tensor) -> Tensor:
        """Logits of x [N, 6]."""
        out: Tensor = self.head(self.tied(self.inner(x).sum(1, keepdim=True).expand(-1, 8)))
        return out


def trained(seed: int = 0, *, steps: int = 1) -> tuple[Net, torch.optim.Optimizer]:
    """A model and its AdamW after some updates."""
    net = Net(seed)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for _ in range(steps):
        net(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, optimizer
