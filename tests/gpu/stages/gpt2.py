"""The interval that AUTO chooses for a third of the layers of GPT-2 XL, or for all, at 3.5 %.

    python -m tests.gpu.stages.gpt2 [--dry] [--whole]

``--whole``: 48 layers, 1.5 billion parameters, whose slots alone take a minute to prepare.
The overhead is what the second checkpoint and those after it cost the iterations that they touched,
by events of the device, relative to ``k`` iterations that none touched: those between checkpoints,
and some without a manager at the end. There are fewer layers where memory or disk are too small, or
where a checkpoint would take too long to write.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.lab.capacity import shortage
from benchmarks.lab.events import events
from benchmarks.lab.language import LANGUAGE_MODELS
from benchmarks.lab.paired import drain, passed
from benchmarks.lab.rawio import RawWriter
from benchmarks.lab.training import Loop
from checkfreq import CFManager
from tests.gpu.stages.lines import say
from tests.gpu.stages.resuming import Stage, part

BOUND = 0.035
#: What a measurement of some seconds may be off by.
_MARGIN = 0.005
_WIDTH, _VOCABULARY, _TOKENS = 1600, 50257, 1024
_IS_WHOLE = "--whole" in sys.argv
#: Layers; the seconds of training with the manager, and of a write: all at most.
_LAYERS, _AT_MOST_S, _WRITTEN_WITHIN_S = (48, 80.0, 12.0) if _IS_WHOLE else (16, 25.0, 4.0)
_ADAMW_BYTES = 12  # of a parameter and its moments
_ON_DEVICE = 3.0  # state, gradients, what AdamW and the activations take, relative to the state
_CHECKPOINTS = 3
_GIB = 2**30


def main() -> None:
    """Print each checkpoint, and the interval with its overhead."""
    stage = Stage.begin()
    with part("gpt2") as folder:
        measure(stage, folder)


def measure(stage: Stage, folder: Path) -> None:
    """A line for each checkpoint as it is durable, and one for the interval."""
    layers, why = _layers(stage, folder)
    name = f"gpt2-xl of {layers} layers"
    LANGUAGE_MODELS[name] = LANGUAGE_MODELS["gpt2-xl"] | {"n_layer": layers}
    batch, tokens = (2, 32) if stage.is_dry else (4, _TOKENS)
    loop = Loop(name, batch=batch, tokens=tokens, device=stage.device, amp=True, small=stage.is_dry)
    clock = Clock(loop)
    at_most_s, num_after = (20.0, 8) if stage.is_dry else (_AT_MOST_S, 16)
    clock.iterate(3)  # memory is allocated, kernels are loaded
    manager = loop.manager(folder / "chk", max_overhead=BOUND)
    try:
        trained = _trained(clock, manager, folder / "chk", at_most_s)
        stats, committed = manager.stats(), events(folder / "chk", "committed")
    finally:
        error = InterruptedError("the measurement is over")
        manager.__exit__(type(error), error, None)
    after_s = clock.times(num_after)
    about = {
        "model": "a small GPT-2" if stage.is_dry else name,
        "why_not_more": why,
        "gib": round(stats["state_bytes"] / _GIB, 3),
        **{name: stats[name] for name in ("place", "reason")},
        "k": stats["interval_steps"],
    }
    if about["k"] is None or len(committed) < 2:
        claim = {"ok": False} if _IS_WHOLE and not stage.is_dry else {}  # else the time is short
        say("interval", **about, why="there were too few checkpoints in this time", **claim)
        return
    clean_s = [one for one, touched in trained[committed[0]["at_step"] :] if not touched]
    iteration_s = statistics.fmean([*clean_s, *after_s])
    later = [one - iteration_s for one, touched in trained[committed[1]["step"] :] if touched]
    cost_s = sum(later) / (len(committed) - 1)
    overhead = cost_s / (about["k"] * iteration_s)
    figures = {"iteration_s": iteration_s, "cost_s": cost_s, "overhead": overhead}
    about |= {name: round(value, 5) for name, value in figures.items()}
    say("interval", **about, bound=BOUND, ok=stage.is_dry or overhead <= BOUND + _MARGIN)


def _trained(
    clock: Clock, manager: CFManager, chk_dir: Path, at_most_s: float
) -> list[tuple[float, bool]]:
    """The seconds of each iteration from step 1 on, and whether a checkpoint touched it.

    Those are all from its boundary until two after it was durable; the last ones are without
    boundaries.
    """
    is_late, seconds, num_said = passed(at_most_s), clock.begun(), 0
    in_flight: list[bool] = []
    while not is_late() and num_said < _CHECKPOINTS:
        in_flight.append(manager.stats()["num_in_flight"] > 0)
        clock.iterate()
        manager.step()
        if manager.stats()["num_committed"] > num_said:
            num_said += 1
            _tell(manager, events(chk_dir, "committed")[-1])
    in_flight += [True] * drain(clock, manager)
    touched = [any(in_flight[max(0, at - 2) : at + 1]) for at in range(len(in_flight))]
    return list(zip(seconds(), touched, strict=True))


def _tell(manager: CFManager, commit: dict[str, Any]) -> None:
    figures = {name: round(commit[name], 5) for name in ("stall_s", "copy_s", "persist_s")}
    say("checkpoint", step=commit["step"], **figures, k=manager.stats()["interval_steps"])


class Clock:
    """Iterations of a loop, and when each ended: on the device, by events of its stream."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._is_device = loop.device.type == "cuda"
        self._marks: list[Any] = []

    def iterate(self, count: int = 1) -> None:
        """Train; the host does not wait."""
        for _ in range(count):
            self._loop.iterate()
            self._mark()

    def times(self, count: int) -> list[float]:
        """Train that many iterations; the seconds of each."""
        seconds = self.begun()
        self.iterate(count)
        return seconds()

    def begun(self) -> Callable[[], list[float]]:
        """Returns a function: the seconds of each iteration since this call."""
        self._loop.synchronize()
        self._marks.clear()
        self._mark()
        return self._seconds

    def _mark(self) -> None:
        if self._is_device:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def _seconds(self) -> list[float]:
        self._loop.synchronize()
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if self._is_device:
            return [one.elapsed_time(other) / 1e3 for one, other in pairs]
        return [other - one for one, other in pairs]


def _layers(stage: Stage, folder: Path) -> tuple[int, str]:
    """How many layers this machine takes, and why not all; "" if it takes all."""
    probe_bytes = (8 << 20) if stage.is_dry else _GIB
    with RawWriter(folder / "probe", probe_bytes, source_bytes=64 << 20) as writer:
        bytes_per_s = probe_bytes / writer.once()
    say("disk", raw_write_gib_per_s=round(bytes_per_s / _GIB, 3))
    if stage.is_dry:
        return _LAYERS, ""
    why = ""
    for layers in range(_LAYERS, 0, -4):
        num_bytes = _state_bytes(layers)
        too_little = shortage(num_bytes, torch.device("cuda"), folder, on_device=_ON_DEVICE)
        if too_little is None and num_bytes <= _WRITTEN_WITHIN_S * bytes_per_s:
            return layers, why
        why = why or too_little or f"a write would take {num_bytes / bytes_per_s:.0f} s"
    raise MemoryError(why)


def _state_bytes(layers: int) -> int:
    embedded = (_VOCABULARY + _TOKENS) * _WIDTH
    return _ADAMW_BYTES * (layers * 12 * _WIDTH**2 + embedded)


if __name__ == "__main__":
    main()
