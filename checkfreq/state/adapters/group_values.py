"""Values of an optimizer's param_groups: may a saved one replace a live one, and are they equal."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from checkfreq.state.adapters.fitting import alike
from checkfreq.state.classes import fields_of, is_plain


def may_replace(live: Any, saved: Any) -> bool:
    """Whether the saved value may replace a live entry of a group."""
    if not alike(live, saved) or (callable(live) and type(live) is not type(saved)):
        return False
    if isinstance(live, Tensor):
        if isinstance(saved, Tensor):
            return True
        try:
            torch.empty(1, dtype=live.dtype, device="cpu").fill_(saved)
        except (TypeError, RuntimeError, OverflowError):  # no number, or out of the dtype's range
            return False
    return True


def same(live: Any, saved: Any) -> bool:
    """Whether they are equal, as numbers, lists of them, or anything else."""
    if isinstance(live, Tensor) or isinstance(saved, Tensor):
        try:
            one, other = torch.as_tensor(live).cpu(), torch.as_tensor(saved).cpu()
        except (TypeError, ValueError, RuntimeError, OverflowError):  # no number, or too large
            return False
        return one.shape == other.shape and bool((one == other).all())
    if isinstance(live, list | tuple) and isinstance(saved, list | tuple):
        return len(live) == len(saved) and all(map(same, live, saved))
    if type(live) is type(saved) and is_plain(type(live)):
        live, saved = fields_of(live), fields_of(saved)
    if isinstance(live, dict) and isinstance(saved, dict):
        return live.keys() == saved.keys() and all(same(live[key], saved[key]) for key in live)
    return bool(live == saved)


def show(value: Any) -> str:
    """The value in at most 80 characters."""
    if isinstance(value, Tensor):
        value = value.item() if value.numel() == 1 else f"tensor{list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
