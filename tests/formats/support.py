"""States with everything that is hard to keep, and checkpoints of them."""

from __future__ import annotations

import os
from collections import OrderedDict, defaultdict, deque
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from checkfreq import CFCheckpoint, CFConfig, CFManager, CFMode
from tests.integrations.support import tensors_of_all_dtypes


class Odd(nn.Module):
    """Tied weights, a 0-d counter, a buffer without elements, extra state, odd dtypes."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(8, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.rough = nn.Parameter(torch.randn(3, 5).bfloat16())
        self.turned = nn.Parameter(torch.randn(5, 3).t())
        self.register_buffer("none", torch.empty(0, 2))
        for number, tensor in enumerate(tensors_of_all_dtypes()):
            self.register_buffer(f"odd{number}", tensor.clone())
        self.notes: dict[str, Any] = {"seen": seed, "mean": torch.tensor(0.5 + seed)}

    def get_extra_state(self) -> Any:
        """What a module may keep beside its tensors."""
        return self.notes

    def set_extra_state(self, state: Any) -> None:
        """Take it back."""
        self.notes = state

    def forward(self, x: Tensor) -> Tensor:
        """Logits of numbers x [N]."""
        logits: Tensor = self.head(self.norm(self.embed(x)))
        return logits + self.rough.float().sum() + self.turned.sum()


def a_history() -> dict[str, Any]:
    """Containers and values of every kind that a tracked dict may hold."""
    return {
        "losses": [1.5, float("inf"), 2],
        "by epoch": {0: 0.5, 1: torch.tensor(0.25)},
        "none": None,
        "pair": (torch.arange(3), "text"),
        "queue": deque([1, torch.ones(2)], maxlen=4),
        "array": numpy.arange(6, dtype=numpy.float32).reshape(2, 3),
        "scalar": numpy.float64(1.5),
        "counts": defaultdict(int, {"a": 1}),
        "ordered": OrderedDict(z=1, a=torch.zeros(0, 3)),
        "took": timedelta(seconds=3),
        "where": Path("a/b"),
        "empty": {},
        "half": torch.tensor([1, 2], dtype=torch.bfloat16),
        "complex": 1 + 2j,
        "view": torch.arange(12.0).reshape(3, 4)[:, 1],
        "raw": b"\x00\xff",
        "packed": [True, False] * 50,
    }


class Trap:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("sprung",)


def parts(seed: int = 0) -> dict[str, Any]:
    """Live objects of each kind."""
    model = Odd(seed)
    trained = [p for p in model.parameters() if p.is_floating_point()]
    optimizer = torch.optim.AdamW(trained, lr=0.01 + seed)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    history = a_history() if seed == 0 else {}
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "history": history}


def save(chk_dir: Path, objects: dict[str, Any] | None = None, *, steps: int = 3) -> dict[str, Any]:
    """Train for some steps, and commit a checkpoint of the last one; returns what was tracked."""
    tracked = parts() if objects is None else objects
    with CFManager(chk_dir, CFCheckpoint(**tracked), mode=CFMode.MANUAL, chk_freq=0) as cf_manager:
        for _ in range(steps):
            model, optimizer = tracked["model"], tracked["optimizer"]
            model(torch.arange(8)).square().mean().backward()
            cf_manager.weight_update()
            optimizer.zero_grad()
            tracked["scheduler"].step()
            cf_manager.step()
        cf_manager.save(wait=True)
    return tracked


def restored(chk_dir: Path) -> dict[str, Any]:
    """The state in other live objects, after a manager has restored it; who saved it is not asked,
    since an import does not say."""
    tracked = parts(seed=1)
    trusting = CFConfig(trust_extra_state=True)
    settings: dict[str, Any] = {"mode": CFMode.MANUAL, "chk_freq": 0, "config": trusting}
    with CFManager(chk_dir, CFCheckpoint(**tracked), **settings) as cf_manager:
        assert cf_manager.restore()
    return states_of(tracked)


def states_of(tracked: dict[str, Any]) -> dict[str, Any]:
    """The state dicts of live objects."""
    return {
        name: dict(value) if isinstance(value, dict) else value.state_dict()
        for name, value in tracked.items()
    }


def same(one: Any, two: Any) -> bool:
    """Bitwise equal trees of the same types; state dicts of any mapping, in any order."""
    if isinstance(one, Tensor) and isinstance(two, Tensor):
        alike = (one.dtype, one.shape) == (two.dtype, two.shape)
        return alike and _bytes(one) == _bytes(two)
    if isinstance(one, numpy.ndarray):
        return (
            isinstance(two, numpy.ndarray)
            and (one.dtype, one.shape) == (two.dtype, two.shape)
            and one.tobytes() == two.tobytes()
        )
    if type(one) in (dict, OrderedDict) and type(two) in (dict, OrderedDict):
        ordered = type(one) is not type(two) or list(one) == list(two) or type(one) is dict
        return one.keys() == two.keys() and ordered and all(same(one[k], two[k]) for k in one)
    if type(one) is not type(two):
        return False
    if isinstance(one, list | tuple | deque):
        return len(one) == len(two) and all(map(same, one, two))
    return bool(one == two)


def _bytes(tensor: Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()
