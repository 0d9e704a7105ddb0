"""The lines of `benchmarks.paper`: the paper's three arms, from one model's measurements."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.lab.derived import Stall, allowed_by_storage, recovery_s
from benchmarks.lab.estimate import Estimate, Sample, estimate
from benchmarks.lab.record import emit
from benchmarks.paper.trial import Measurements
from benchmarks.paper.workloads import Workload

_RECOVERY = "restore_s + k / 2 * iteration + durable_s"
_HELD_DERIVED = {
    "overhead": "held / (k * iteration)",
    "recovery_s": _RECOVERY,
}
_AUTO_DERIVED = {
    "cost_ms": "overhead * k * iteration",
    "rest_ms": "cost - boundary - wait",
    "recovery_s": _RECOVERY,
    "storage_limit": "raw_write / iteration",
}


class Report:
    """Prints one model's lines."""

    def __init__(self, workload: Workload, args: argparse.Namespace) -> None:
        self._workload, self._args = workload, args

    def emit(self, measured: Measurements) -> None:
        """``auto``, ``synchronous`` and ``epoch boundary``."""
        steps = measured.chosen.steps
        epoch_steps = measured.epoch_iterations or self._workload.epoch_iterations
        held = held_arm(measured, steps=steps), held_arm(measured, steps=epoch_steps)
        self._line(measured, "auto", auto_arm(measured, self._workload, bound=self._args.bound))
        self._line(measured, "synchronous", held[0])
        self._line(measured, "epoch boundary", {**held[1], "epoch": self._epoch(measured)})

    def failed(self, why: str) -> None:
        """The line of a model that failed."""
        self._emit("failed", {"failed": why})

    def _epoch(self, measured: Measurements) -> str:
        return self._workload.epoch if measured.epoch_iterations is None else "of --data"

    def _line(self, measured: Measurements, arm: str, fields: Mapping[str, Any]) -> None:
        restores = measured.restore_s
        common = {
            "parameters": measured.num_parameters,
            "state_mib": round(measured.state_bytes / 2**20, 1),
            "iteration_ms": _ms(measured.iteration_s),
            "restore_s": round(statistics.median(restores), 4),
            "restore_low_s": round(min(restores), 4),
            "restore_high_s": round(max(restores), 4),
        }
        self._emit(arm, {**common, **fields})

    def _emit(self, arm: str, fields: Mapping[str, Any]) -> None:
        work = self._workload
        emit(
            "paper",
            folder=Path(self._args.folder),
            packages=work.packages,
            model=work.model,
            arm=arm,
            preset=self._args.preset,
            device=work.kind,
            precision="bfloat16 autocast" if work.amp else "float32",
            batch=work.batch,
            **({"tokens": work.tokens} if work.is_language else {"image_size": work.image_size}),
            data="random" if self._args.data is None else "images",
            threads=self._args.threads,
            bound=self._args.bound,
            **fields,
        )


def auto_arm(measured: Measurements, workload: Workload, *, bound: float) -> dict[str, Any]:
    """The arm at AUTO's interval, measured in windows."""
    steps, windows = measured.chosen.steps, measured.windows
    return {
        "k": steps,
        "reason": measured.chosen.reason,
        "place": measured.chosen.place.value,
        "predicted_overhead": measured.chosen.predicted_overhead,
        **_of(windows.overhead.estimate),
        "overhead_all": round(windows.overhead.estimate_all.mean, 5),
        "rounds": windows.overhead.num_rounds,
        "left_out": windows.overhead.num_left_out,
        "taken": windows.overhead.taken,
        "checkpoints": windows.checkpoints,
        "seconds": round(windows.overhead.seconds, 1),
        **_cost(measured),
        **_storage(measured),
        "recovery_s": _recovery(measured, steps=steps, durable_s=windows.durable_s),
        "derived": _AUTO_DERIVED,
        **_verdict(measured, workload, bound=bound),
    }


def _cost(measured: Measurements) -> dict[str, float | None]:
    """The cost of a checkpoint, in its parts."""
    windows, found = measured.windows, measured.windows.overhead.estimate
    interval_s = measured.chosen.steps * measured.iteration_s
    cost_s = found.mean * interval_s
    stall = Stall.of(cost_s=cost_s, held_s=windows.held_s, wait_s=windows.wait_s)
    return {
        "cost_ms": _ms(cost_s),
        "cost_low_ms": _finite_ms(found.low * interval_s),
        "cost_high_ms": _finite_ms(found.high * interval_s),
        "boundary_ms": _ms(stall.boundary_s),
        "wait_ms": _ms(stall.wait_s),
        "rest_ms": _ms(stall.rest_s),
        "stall_of_iteration": round(windows.held_s / measured.iteration_s, 4),
    }


def _storage(measured: Measurements) -> dict[str, float]:
    """The time to write the same bytes raw, and the interval that allows."""
    limit = measured.raw_write_s / measured.iteration_s
    return {
        "persist_s": round(measured.windows.persist_s, 4),
        "durable_s": round(measured.windows.durable_s, 4),
        "raw_write_s": round(measured.raw_write_s, 4),
        "storage_limit": round(limit, 3),
        "k_against_limit": round(measured.chosen.steps / limit, 3),
    }


def _verdict(measured: Measurements, workload: Workload, *, bound: float) -> dict[str, Any]:
    overhead = measured.windows.overhead
    target, is_met = judged(
        workload,
        measured.chosen.steps,
        overhead.estimate,
        bound=bound,
        limit=measured.raw_write_s / measured.iteration_s,
        stall_of_iteration=measured.windows.held_s / measured.iteration_s,
    )
    return {"target": target, "met": is_met and overhead.is_taken}


def held_arm(measured: Measurements, *, steps: int) -> dict[str, Any]:
    """An arm in which training stops every ``steps`` iterations until the checkpoint is durable."""
    still_s, iteration_s = measured.windows.still_s, measured.iteration_s
    found = estimate([Sample(each, steps * iteration_s) for each in still_s])
    held_s = statistics.mean(still_s)
    return {
        "k": steps,
        **_of(found),
        "held_ms": _ms(held_s),
        "stall_of_iteration": round(held_s / iteration_s, 4),
        "durable_s": round(held_s, 4),
        "recovery_s": _recovery(measured, steps=steps, durable_s=held_s),
        "derived": _HELD_DERIVED,
    }


def judged(
    workload: Workload,
    steps: int,
    found: Estimate,
    *,
    bound: float,
    limit: float,
    stall_of_iteration: float,
) -> tuple[str, bool]:
    """The target for this workload, and whether it is met."""
    if workload.model == "gpt2-xl":
        is_met = steps <= allowed_by_storage(limit) and stall_of_iteration < 0.01
        return "k within 1.1 of the storage limit, stall below 1 % of an iteration", is_met
    is_kept = found.meets(bound)
    if workload.is_target:
        return f"k at most 2, overhead at most {100 * bound:g} %", is_kept and steps <= 2
    return f"overhead at most {100 * bound:g} %", is_kept


def _recovery(measured: Measurements, *, steps: int, durable_s: float) -> float:
    restore_s = statistics.median(measured.restore_s)
    found = recovery_s(
        restore_s=restore_s, steps=steps, iteration_s=measured.iteration_s, durable_s=durable_s
    )
    return round(found, 4)


def _of(found: Estimate) -> dict[str, float | None]:
    return {
        "overhead": round(found.mean, 5),
        "low": round(found.low, 5) if math.isfinite(found.low) else None,
        "high": round(found.high, 5) if math.isfinite(found.high) else None,
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def _finite_ms(seconds: float) -> float | None:
    return _ms(seconds) if math.isfinite(seconds) else None
