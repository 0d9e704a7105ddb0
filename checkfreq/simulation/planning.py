"""What an interval leads to: overhead, loss, bytes, goodput by size, what-ifs. Pure.

The interval is that of policy/frequency.py for measured costs. Goodput is the closed form of
policy/waste.py. A checkpoint that is written beside training is durable L after its boundary, so a
failure loses L of work on top, which counts as a longer restart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from checkfreq.errors import ConfigError
from checkfreq.policy.frequency import FrequencyPolicy, Reason
from checkfreq.policy.profile import Profile, is_amount
from checkfreq.policy.waste import goodput
from checkfreq.simulation.failures import Cluster, Rate
from checkfreq.types import Objective

DAY_S = 86_400.0
MONTH_DAYS = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What is asked of a run. ``restart_s``: from a failure until training continues."""

    max_overhead: float = 0.035
    restart_s: float = 120.0
    objective: Objective = Objective.BOUND
    num_slots: int = 2

    def __post_init__(self) -> None:
        _require_seconds("restart_s", self.restart_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Failing:
    """How often a run fails: at a published ``rate``, or every ``mtbf_s`` at ``num_gpus`` GPUs."""

    num_gpus: int = 1
    rate: Rate = Rate.RESEARCH
    mtbf_s: float | None = None

    def mtbf_at(self, num_gpus: int) -> float:
        """Mean time between failures at another size: half as long at twice the GPUs."""
        of_rate = Cluster(num_gpus, self.rate).mtbf_s
        if self.mtbf_s is None:
            return of_rate
        if self.num_gpus < 1:
            raise ConfigError(f"num_gpus: expected at least 1, got {self.num_gpus}")
        return self.mtbf_s * self.num_gpus / num_gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint of the whole run, and what it costs.

    profile: the costs; its ``state_bytes`` are not read here.
    num_bytes: of all ranks. written_bytes: of these, what is not linked to the one before.
    stall_s: the part of ``profile.cost_s`` for which training is held; None: unknown. It does not
        depend on storage, the rest of the cost does.
    """

    profile: Profile
    num_bytes: int
    written_bytes: int
    stall_s: float | None = None

    def __post_init__(self) -> None:
        _require_seconds("stall_s", self.stall_s or 0.0)

    def with_storage(self, factor: float) -> Checkpoint:
        """On storage that writes ``factor`` times as fast."""
        _require_factor("storage", factor)
        return self._with(persist=1 / factor, copy=1.0)

    def with_ranks(self, factor: float, *, is_storage_shared: bool) -> Checkpoint:
        """The same state divided among ``factor`` times as many ranks.

        Each copies so much less. Storage that they share takes the same time for all of it;
        storage of their own takes ``factor`` times less.
        """
        _require_factor("ranks", factor)
        return self._with(persist=1.0 if is_storage_shared else 1 / factor, copy=1 / factor)

    def _with(self, *, persist: float, copy: float) -> Checkpoint:
        old = self.profile
        persist_s = persist * old.persist_s
        copied_s = copy * max(0.0, old.durable_s - old.persist_s)
        durable_s = copied_s + persist_s
        scaled = _cost_factor(old, self.stall_s, durable_s)
        changed = replace(
            old.with_costs_scaled(scaled),
            host_copy_s=copy * old.host_copy_s,
            persist_s=persist_s,
            durable_s=durable_s,
        )
        return replace(self, profile=changed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What the planned interval leads to. Seconds, bytes, fractions.

    boundary_overhead: of the overhead, what boundaries add whatever the interval.
    mtbf_s: of the size ``num_gpus``. goodput: the part of all time that ends up as progress.
    lost_per_day_s: work that failures destroy in a day, restarts not included.
    """

    num_gpus: int
    mtbf_s: float
    interval_steps: int
    interval_s: float
    reason: Reason
    overhead: float
    boundary_overhead: float
    durable_s: float
    expected_loss_s: float
    lost_per_day_s: float
    checkpoints_per_day: float
    bytes_per_day: float
    goodput: float


def outlook(
    checkpoint: Checkpoint,
    bounds: Bounds,
    failing: Failing,
    *,
    num_gpus: int,
    knows_mtbf: bool = True,
) -> Outlook:
    """The plan at ``num_gpus`` GPUs. ``knows_mtbf``: whether the run is given its ``mtbf_s``."""
    mtbf_s = failing.mtbf_at(num_gpus)
    profile = checkpoint.profile
    policy = FrequencyPolicy(
        max_overhead=bounds.max_overhead,
        mtbf_s=mtbf_s if knows_mtbf else None,
        objective=bounds.objective,
        num_slots=bounds.num_slots,
    )
    plan = policy.plan(profile)
    work_s = plan.interval_steps * profile.iteration_s
    cost_s = work_s * plan.predicted_overhead  # that of the boundaries included
    per_day = DAY_S / (work_s + cost_s)
    return Outlook(
        num_gpus=num_gpus,
        mtbf_s=mtbf_s,
        interval_steps=plan.interval_steps,
        interval_s=work_s,
        reason=plan.reason,
        overhead=plan.predicted_overhead,
        boundary_overhead=plan.boundary_overhead,
        durable_s=profile.durable_s,
        expected_loss_s=plan.expected_loss_s,
        lost_per_day_s=min(DAY_S, plan.expected_loss_s * DAY_S / mtbf_s),
        checkpoints_per_day=per_day,
        bytes_per_day=per_day * checkpoint.written_bytes,
        goodput=goodput(
            work_s, cost_s=cost_s, mtbf_s=mtbf_s, restart_s=bounds.restart_s + profile.durable_s
        ),
    )


def _cost_factor(old: Profile, stall_s: float | None, durable_s: float) -> float:
    """By what the cost changes if a checkpoint is durable after ``durable_s`` instead.

    Beyond the stall, a checkpoint costs training some speed for as long as it is under way. Where
    the stall is unknown nothing changes, which is on the safe side for faster storage.
    """
    if stall_s is None or not old.cost_s > stall_s or not old.durable_s > stall_s:
        return 1.0
    part = max(0.0, durable_s - stall_s) / (old.durable_s - stall_s)
    return (stall_s + (old.cost_s - stall_s) * part) / old.cost_s


def _require_seconds(name: str, value: float) -> None:
    if not is_amount(value):
        raise ConfigError(f"{name}: expected finite seconds >= 0, got {value}")


def _require_factor(name: str, factor: float) -> None:
    if not 1e-6 <= factor <= 1e6:
        raise ConfigError(f"{name} factor: expected a number from 1e-6 to 1e6, got {factor}")
