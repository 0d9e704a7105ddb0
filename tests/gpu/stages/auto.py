"""The overhead of AUTO at its default bound against no manager, in windows that alternate.

ResNet-50 in mixed precision at 64 images trains with an AUTO manager until that has an interval.
Then windows with it, each until nothing is in flight, take turns with windows in which the
optimizer has no hook and nobody calls ``step()``; benchmarks/lab/paired.py says what is counted.
They are timed by events of the device. A line per round, with the estimate so far and its 95 %
interval; the claim is that of the last one. Windows with a manager that takes no checkpoint tell
what of it boundaries cost.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.lab.estimate import Estimate, Sample, estimate, sample
from benchmarks.lab.paired import Hooks, LiveArm, Window, clean_window
from benchmarks.lab.training import Loop
from benchmarks.lab.warm_up import warmed_up
from checkfreq import CFManager
from tests.gpu.stages.lines import is_dry, say, scratch

_BOUND = 0.035
#: Until AUTO has chosen, at most; until the last window begins.
_WARM_UP_S, _SECONDS = 8.0, 120.0
#: Rounds at least: fewer than three give no interval.
_ROUNDS = 4
_WINDOW = 24  # iterations


def main() -> None:
    """Print a line per round."""
    began_s, dry = time.monotonic(), is_dry()
    torch.backends.cudnn.benchmark = True
    loop = _small() if dry else _large()
    clean_window(loop, 5)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(scratch())
        idle = Idle(loop, loop.manager(Path(folder) / "idle", interval=0))
        stack.callback(idle.manager.close)
        manager = loop.manager(Path(folder) / "auto", max_overhead=_BOUND)
        live = warmed_up(loop, manager, at_most_s=4.0 if dry else _WARM_UP_S)
        stack.callback(live.close)
        chosen = manager.stats()
        k, num_before = chosen["interval_steps"], 0 if dry else chosen["num_committed"]
        say("interval", k=k, place=chosen["place"], s=round(time.monotonic() - began_s, 1))
        length = 8 if dry else max(_WINDOW, 2 * k)
        arm = LiveArm(live, length=length)
        idle.window(length)  # its slots are made
        found = rounds(loop, arm, idle, until_s=began_s + (8.0 if dry else _SECONDS))
        taken = manager.stats()["num_committed"] - num_before
        say("checkpoints in the windows", num=taken, ok=taken > 0)
        if not dry:
            say("overhead is within the bound", bound=_BOUND, ok=found.meets(_BOUND))


def _large() -> Loop:
    return Loop("resnet50", batch=64, image_size=224, device="cuda", amp=True, num_classes=1000)


def _small() -> Loop:
    return Loop("resnet18", batch=2)


class Idle:
    """A manager that passes boundaries and takes no checkpoint."""

    def __init__(self, loop: Loop, manager: CFManager) -> None:
        self.manager = manager
        self._loop = loop
        self._hooks = Hooks(loop.optimizer)

    def window(self, iterations: int) -> Window:
        """Train one window with it."""
        start_s = time.perf_counter()
        with self._hooks.attached():
            for _ in range(iterations):
                self._loop.iterate()
                self.manager.step()
            self._loop.synchronize()
        return Window(time.perf_counter() - start_s, iterations, iterations)


def rounds(loop: Loop, arm: LiveArm, idle: Idle, *, until_s: float) -> Estimate:
    """Rounds of a window with the manager between two without; dry, one may be enough.

    Each third one is of ``idle``, whose manager passes boundaries and takes no checkpoint.
    """
    samples: list[Sample] = []
    idle_samples: list[Sample] = []
    before = timed(lambda: clean_window(loop, arm.iterations), loop.device)
    for number in itertools.count():
        is_idle = number % 3 == 1
        own = idle_samples if is_idle else samples
        train = partial(idle.window, arm.iterations) if is_idle else arm.window
        window = timed(train, loop.device)
        after = timed(lambda: clean_window(loop, arm.iterations), loop.device)
        clean_s = [before.iteration_s, after.iteration_s]
        own.append(
            sample(
                seconds=window.seconds,
                iterations=window.iterations,
                covered=window.covered,
                clean_s=clean_s,
            )
        )
        before, found = after, estimate(own)
        say(
            "boundaries alone" if is_idle else "round",
            iteration_ms=round(sum(clean_s) / 2 * 1e3, 3),
            iterations=window.covered,
            overhead=round(found.mean, 5),
            low=_finite(found.low),
            high=_finite(found.high),
        )
        if len(samples) >= (1 if is_dry() else _ROUNDS) and time.monotonic() > until_s:
            return estimate(samples)
    raise AssertionError("unreachable")


def timed(train: Callable[[], Window], device: torch.device) -> Window:
    """A window, by the device's clock: nothing is queued before it, nor when it ends."""
    if device.type != "cuda":
        return train()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    window = train()
    end.record()
    end.synchronize()
    return replace(window, seconds=begin.elapsed_time(end) / 1e3)


def _finite(limit: float) -> float | None:
    return round(limit, 5) if math.isfinite(limit) else None


if __name__ == "__main__":
    main()
