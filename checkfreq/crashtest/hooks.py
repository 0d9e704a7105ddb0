"""What torch calls in a process that is recorded: losses, seeds, loaders, weight updates.

Installed once, when torch has been imported under a crash test, and in no other process.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import DataLoader

from checkfreq.crashtest.plan import life_folder, plan_in
from checkfreq.crashtest.recorder import Recorder

_installed: list[Recorder] = []


def install() -> Recorder:
    """The recorder of this process; the first call installs the hooks."""
    if not _installed:
        folder = life_folder()
        recorder = Recorder(folder, plan_in(folder))
        _installed.append(recorder)
        _hook_updates(recorder)
        _hook_forwards(recorder)
        _hook_losses(recorder)
        _hook_seeds(recorder)
        _hook_loaders(recorder)
    return _installed[0]


def _hook_updates(recorder: Recorder) -> None:
    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        recorder.before_update()

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        recorder.after_update()

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def _hook_forwards(recorder: Recorder) -> None:
    def before(module: Any, args: Any) -> None:
        # A compiler that traces this hook sees a constant here, and leaves the rest out.
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            recorder.used()

    register_module_forward_pre_hook(before)
    warnings.filterwarnings("ignore", message=".*when there are global hooks on modules")


def _hook_losses(recorder: Recorder) -> None:
    kind: Any = torch.Tensor
    backward = kind.backward

    @functools.wraps(backward)
    def recorded(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        recorder.loss(self)
        return backward(self, *args, **kwargs)

    kind.backward = recorded


def _hook_seeds(recorder: Recorder) -> None:
    _wrap_seed(recorder, torch, "manual_seed", "torch.manual_seed")
    _wrap_seed(recorder, random, "seed", "random.seed")
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        _wrap_seed(recorder, numpy.random, "seed", "numpy.random.seed")


def _wrap_seed(recorder: Recorder, owner: Any, name: str, title: str) -> None:
    seed: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(seed)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        recorder.seeded(title, args)
        return seed(*args, **kwargs)

    setattr(owner, name, recorded)


class _Watched:
    """A loader's iterator that tells of its batches, and is that iterator in all else."""

    def __init__(self, inner: Any, name: str, recorder: Recorder) -> None:
        self._inner, self._name, self._recorder = inner, name, recorder

    def __iter__(self) -> _Watched:
        return self

    def __next__(self) -> Any:
        self._recorder.before_fetch()
        batch = next(self._inner)
        self._recorder.fetched(self._name, batch)
        return batch

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _hook_loaders(recorder: Recorder) -> None:
    kind: Any = DataLoader
    start = kind.__iter__

    @functools.wraps(start)
    def recorded(self: Any) -> Iterator[Any]:
        if _is_of_iterators(self) or not recorder.is_here:
            inner: Iterator[Any] = start(self)
            return inner
        name = _name_of(self)
        recorder.before_fetch()
        recorder.before_start()
        inner = start(self)
        recorder.after_start(name)
        return _Watched(inner, name, recorder)

    kind.__iter__ = recorded


def _is_of_iterators(loader: Any) -> bool:
    """Whether CFIterator runs this loader; it tells of the batches itself."""
    parts = (loader, loader.dataset, loader.sampler, loader.batch_sampler, loader.collate_fn)
    return any(type(part).__module__.partition(".")[0] == "iterators" for part in parts)


def _name_of(loader: Any) -> str:
    size = ""
    with contextlib.suppress(Exception):  # a dataset of the user's
        size = f", {len(loader.dataset)} samples"
    return f"DataLoader({type(loader.dataset).__name__}{size}, batch_size={loader.batch_size})"
