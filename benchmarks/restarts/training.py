"""The training that `benchmarks.restarts` kills: a script that runs with any revision of checkfreq.

It uses nothing of this repository but what a user's script would. Into ``--marks`` it appends a
JSON line at each of its instants (``time.monotonic``, which all processes share). After
``--checkpoints`` durable checkpoints it stops training and waits, to be killed or told to stop.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import json
import os
import sys
import time
from typing import Any

_SCRIPT_S = time.monotonic()
_IDLE_S = 0.05
_INPUTS = 64
_LAYERS = 8
#: Functions of ours, by what they do: each revision has some of them.
_CALLS = {
    "make the session": ("checkfreq.session.session:Session.__init__",),
    "start the worker": ("checkfreq.persist.client:WorkerClient.start",),
    "wait for the directory": ("checkfreq.persist.client:WorkerClient.wait_opened",),
    "find": ("checkfreq.restore.restorer:Restorer.find",),
    "compare": (
        "checkfreq.session.restoring:Restoring._plan",
        "checkfreq.restore.in_place:InPlace.compare",
    ),
    "load": (
        "checkfreq.session.restoring:Restoring._load",
        "checkfreq.restore.in_place:InPlace.change",
    ),
}


class Marks:
    """Appends to the file of marks, each line in one write."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def add(self, name: str, at_s: float | None = None, **fields: object) -> None:
        """Something happened, now unless ``at_s`` says when."""
        at_s = time.monotonic() if at_s is None else at_s
        line = {"pid": os.getpid(), "mark": name, "at_s": at_s, **fields}
        os.write(self._file, (json.dumps(line) + "\n").encode())


class Calls:
    """Seconds spent in some functions of checkfreq, with what they call; by name, in order."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        for name, places in _CALLS.items():
            for place in places:
                with contextlib.suppress(ImportError, AttributeError):
                    self._time(name, *place.split(":"))

    def _time(self, name: str, module: str, path: str) -> None:
        owner_name, function_name = path.split(".")
        owner = getattr(importlib.import_module(module), owner_name)
        setattr(owner, function_name, self._timed(name, getattr(owner, function_name)))

    def _timed(self, name: str, function: Any) -> Any:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began_s = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent_s = time.perf_counter() - began_s
                self.seconds[name] = self.seconds.get(name, 0.0) + spent_s

        return timed


def main() -> None:
    """Train until told to wait, or to stop."""
    args = _arguments()
    marks = Marks(args.marks)
    marks.add("script", _SCRIPT_S)
    for package in ("torch", "checkfreq.manager", "iterators.cf_iterator"):
        importlib.import_module(package)
        marks.add(package.partition(".")[0])
    calls = Calls() if args.calls else None
    train(args, marks, calls)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--marks", required=True)
    parser.add_argument("--chk-dir", required=True)
    parser.add_argument("--mib", type=float, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--interval", type=int, required=True)
    parser.add_argument("--checkpoints", type=int, required=True)
    parser.add_argument("--keep-in-memory-s", type=float)
    parser.add_argument("--calls", action="store_true")
    return parser.parse_args()


def train(args: argparse.Namespace, marks: Marks, calls: Calls | None) -> None:
    """Parameters and both moments of AdamW are ``--mib``; the loader has worker processes."""
    import torch
    from torch import nn

    from checkfreq import CFCheckpoint, CFManager, CFMode, KeepLast
    from iterators import CFIterator

    torch.manual_seed(0)
    model = _model(args.mib)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs = torch.randn(1 << 16, _INPUTS)
    data = torch.utils.data.TensorDataset(inputs, inputs.square().sum(1, keepdim=True))
    loader = torch.utils.data.DataLoader(data, batch_size=8, shuffle=True, num_workers=args.workers)
    marks.add("built")
    with CFManager(
        args.chk_dir,
        CFCheckpoint(model=model, optimizer=optimizer),
        mode=CFMode.MANUAL,
        chk_freq=args.interval,
        retention=KeepLast(1),
        config=_config(args),
    ) as manager:
        batches = CFIterator(loader, cf_manager=manager)
        marks.add("manager")
        is_restored = manager.restore()
        marks.add("restored", step=manager.global_step if is_restored else None)
        num_updates = 0
        for _ in batches.epochs(1 << 30):
            for x, y in batches:
                if not num_updates:
                    marks.add("batch")
                nn.functional.mse_loss(model(x), y).backward()
                manager.weight_update()
                optimizer.zero_grad()
                num_updates += 1
                if num_updates == 1:
                    marks.add("update", calls=calls and calls.seconds)
                if manager.stats()["num_committed"] >= args.checkpoints:
                    _wait(manager, marks)


def _model(mib: float) -> Any:
    """Layers whose parameters are a third of ``mib``."""
    from torch import nn

    width = max(1, round((mib * 2**20 / 12 / _LAYERS) ** 0.5))
    layers = [layer for _ in range(_LAYERS) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(_INPUTS, width), *layers, nn.Linear(width, 1))


def _config(args: argparse.Namespace) -> Any:
    from checkfreq import CFConfig

    fields = {field.name for field in dataclasses.fields(CFConfig)}
    if args.keep_in_memory_s is None or "keep_in_memory_s" not in fields:
        return CFConfig()
    return CFConfig(keep_in_memory_s=args.keep_in_memory_s)


def _wait(manager: Any, marks: Marks) -> None:
    """Until killed; told to stop, leave."""
    marks.add("waiting", committed=manager.stats()["num_committed"])
    while not manager.should_stop:
        time.sleep(_IDLE_S)
    sys.exit(0)


if __name__ == "__main__":
    main()
