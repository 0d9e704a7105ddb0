"""What ``checkfreq plan`` prints: tables, notes, JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from checkfreq.cli import text
from checkfreq.policy.failure_rate import FailureRate
from checkfreq.policy.frequency import BOUNDARY_SHARE, Reason
from checkfreq.simulation.planning import Bounds, Checkpoint, Failing, Outlook
from checkfreq.simulation.prices import Bill, Prices
from checkfreq.types import size_text

#: The case, and the line of the plot, in which nothing is changed.
NOW = "now"
_HEAD = ("", "INTERVAL", "ITERATIONS", "DECIDED BY", "OVERHEAD", "LOSS", "BYTES/DAY", "S3/MONTH")
_CLUSTER_HEAD = (
    "GPUS",
    "MTBF",
    "INTERVAL",
    "ITERATIONS",
    "OVERHEAD",
    "LOSS",
    "LOST/DAY",
    "GOODPUT",
)


@dataclass(frozen=True, slots=True)
class Row:
    """One case: its name, what is planned for it, and a month on S3."""

    name: str
    checkpoint: Checkpoint
    plan: Outlook
    bill: Bill

    def to_json(self) -> dict[str, object]:
        """One JSON object."""
        plan = {**asdict(self.plan), "reason": self.plan.reason.value}
        return {"case": self.name, **plan, "s3": {**asdict(self.bill), "total": self.bill.total}}


@dataclass(frozen=True, slots=True)
class Document:
    """All that was planned. ``clusters``: by what is drawn as one line, sizes ascending."""

    sources: list[str]
    checkpoint: Checkpoint
    bounds: Bounds
    failing: Failing
    prices: Prices
    failures: FailureRate
    cases: list[Row]
    clusters: dict[str, list[Outlook]]

    def to_json(self) -> dict[str, object]:
        """One JSON document."""
        profile = self.checkpoint.profile
        return {
            "sources": self.sources,
            "given": {
                "iteration_s": profile.iteration_s,
                "cost_s": profile.cost_s,
                "stall_s": self.checkpoint.stall_s,
                "host_copy_s": profile.host_copy_s,
                "persist_s": profile.persist_s,
                "durable_s": profile.durable_s,
                "num_bytes": self.checkpoint.num_bytes,
                "written_bytes": self.checkpoint.written_bytes,
                "ranks": self.failing.num_gpus,
                "restart_s": self.bounds.restart_s,
                "max_overhead": self.bounds.max_overhead,
                "objective": self.bounds.objective.value,
                "rate": None if self.failing.mtbf_s else self.failing.rate.name.lower(),
                "mtbf_s": self.failing.mtbf_s,
                "mtbf_s_in_history": self.failures.mtbf_s,
                "failures_in_history": {
                    "running_s": self.failures.running_s,
                    **self.failures.facts(),
                },
                "prices": asdict(self.prices),
            },
            "cases": [row.to_json() for row in self.cases],
            "clusters": [
                {**asdict(plan), "reason": plan.reason.value} for plan in self.clusters[NOW]
            ],
        }

    def lines(self) -> Iterator[str]:
        """What is printed."""
        profile, checkpoint = self.checkpoint.profile, self.checkpoint
        yield f"Costs from {', '.join(self.sources)}: an iteration {_span(profile.iteration_s)};"
        yield (
            f"a checkpoint of {size_text(checkpoint.num_bytes)} adds {_span(profile.cost_s)}, and "
            f"is durable after {_span(profile.durable_s)}."
        )
        yield ""
        yield text.table(_HEAD, [_case_cells(row) for row in self.cases])
        yield ""
        yield text.table(_CLUSTER_HEAD, [_size_cells(plan) for plan in self.clusters[NOW]])
        yield ""
        yield from self._notes()

    def _notes(self) -> Iterator[str]:
        bounds, failing = self.bounds, self.failing
        how = f"as published ({failing.rate.name.lower()})"
        if failing.mtbf_s:
            how = f"every {_span(failing.mtbf_s)} at {failing.num_gpus} GPUs"
        kept = self.cases[0].bill
        yield "INTERVAL: work between two checkpoints. OVERHEAD: added to the work, at most"
        bound = f"{100 * bounds.max_overhead:.3g} %"
        now = self.cases[0].plan
        share = BOUNDARY_SHARE * bounds.max_overhead
        if now.reason is Reason.BUDGET and now.boundary_overhead > share:
            beside = f"{100 * now.boundary_overhead:.3g} %"
            yield f"{100 * share:.3g} % by checkpoints, half of {bound}; beside them boundaries add"
            yield f"{beside}, which no interval changes: iterations are too short."
        else:
            yield f"{bound} unless goodput asks for more."
        yield f"LOSS: work that a failure destroys; a restart takes {_span(bounds.restart_s)} more."
        yield f"GOODPUT: of all time, with failures {how}; each run is given its MTBF as mtbf_s."
        yield f"S3/MONTH: {size_text(kept.stored_bytes)} kept, and now {kept.uploads_per_day:.0f}"
        yield "uploads a day, at list prices of 2025 (--price-...); fewer with --upload-every-s."
        if self.checkpoint.stall_s is None:
            yield "Faster storage lowers no cost here: --stall-s tells which part is not storage's."
        every_s = self.failures.mean_s
        if every_s is not None and failing.mtbf_s is None:
            yield f"Runs in this directory failed {self.failures.explain()}:"
            yield f"--mtbf-s {every_s:.0f}."


def _case_cells(row: Row) -> Sequence[str]:
    plan = row.plan
    return (
        row.name,
        _span(plan.interval_s),
        str(plan.interval_steps),
        plan.reason.value,
        f"{100 * plan.overhead:.2f} %",
        _span(plan.expected_loss_s),
        size_text(round(plan.bytes_per_day)),
        f"{row.bill.total:,.2f}",
    )


def _size_cells(plan: Outlook) -> Sequence[str]:
    return (
        str(plan.num_gpus),
        _span(plan.mtbf_s),
        _span(plan.interval_s),
        str(plan.interval_steps),
        f"{100 * plan.overhead:.2f} %",
        _span(plan.expected_loss_s),
        _span(plan.lost_per_day_s),
        f"{100 * plan.goodput:.2f} %",
    )


def _span(seconds: float) -> str:
    """``3.1 ms``, ``18.0 min``, ``3.1 h``, ``12.0 d``."""
    for unit, size in (("d", 86_400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{1e3 * seconds:.3g} ms"
