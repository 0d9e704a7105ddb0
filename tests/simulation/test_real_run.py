"""A real run on this machine: what it records, and the policy given it again."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from checkfreq import CFCheckpoint, CFConfig, CFManager, CFMode, KeepLast
from checkfreq.policy.tuner import Iteration, Measured, RateTuner
from checkfreq.simulation.recorded import Recording, read_trace
from checkfreq.simulation.retrace import policy_of
from checkfreq.simulation.series import take_apart
from checkfreq.types import Objective


def trained(chk_dir: Path, *, num: int, durable: int, max_overhead: float) -> tuple[int, float]:
    """Train a small network, until some checkpoints are durable; returns the iterations after the
    first boundary, and their seconds."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.randn(256, 256)
    manager = CFManager(
        chk_dir,
        CFCheckpoint(model=model, optimizer=optimizer),
        retention=KeepLast(1),
        config=CFConfig(stop_signals=(), record_trace=True),
        mode=CFMode.AUTO,
        max_overhead=max_overhead,
    )
    instants = []
    with manager:
        while len(instants) < num or manager.stats()["num_committed"] < durable:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            manager.step()
            instants.append(time.perf_counter())
    return len(instants) - 1, instants[-1] - instants[0]


def told_again(run: Recording) -> list[tuple[int | None, int | None]]:
    """What the run's policy planned at each checkpoint, and plans when told the same again."""
    tuner = RateTuner(policy_of(take_apart(run)), dynamic=run.dynamic, cached=run.cached)
    tuner.continue_from(run.from_step)
    found = []
    told = sorted(run.checkpoints, key=lambda each: each.start_s + each.told_s)
    begun = sorted(run.checkpoints, key=lambda each: each.start_s)
    for at, (start_s, took_s) in enumerate(zip(run.start_s, run.took_s, strict=True)):
        end_s = start_s + took_s
        while begun and begun[0].start_s < end_s:
            one, plan = begun.pop(0), tuner.plan
            found.append((one.planned_steps, None if plan is None else plan.interval_steps))
            is_periodic = one.reason == "periodic"
            tuner.started(
                f"{one.step}", step=one.step, start_s=one.start_s, is_periodic=is_periodic
            )
        while told and told[0].start_s + told[0].told_s <= end_s and told[0] not in begun:
            one = told.pop(0)
            times = Measured(one.copy_s, one.persist_s, one.durable_s, one.state_bytes)
            tuner.ended(f"{one.step}", end_s=one.end_s, measured=times)
        if at not in run.uncounted:
            tuner.iteration(
                Iteration(
                    start_s,
                    end_s,
                    run.held_s[at],
                    None,
                    at not in run.irregular,
                    at not in run.busy,
                    run.waited_s.get(at, 0.0),
                )
            )
    return found


def test_the_policy_plans_again_what_it_planned_when_told_what_was_recorded(tmp_path: Path) -> None:
    num, seconds = trained(tmp_path, num=320, durable=6, max_overhead=0.9)
    run = read_trace(tmp_path)
    assert run.num_iterations == num
    assert sum(run.took_s) == pytest.approx(seconds, rel=0.05, abs=0.5)
    assert (run.max_overhead, run.objective, run.interval_steps) == (0.9, Objective.BOUND, None)
    plans = told_again(run)
    assert len(plans) >= 6
    for planned, again in plans:
        assert (planned is None) == (again is None)
        # Times are rounded, and a small change of the plan is damped.
        assert planned is None or again == pytest.approx(planned, rel=0.15, abs=1)
