"""The first screen of benchmarks/README.md: findings and missed targets as generated sentences.

A sentence stands where a table would (see `benchmarks.tables`); "" where nothing was measured, or
where no target was missed.
"""

from __future__ import annotations

from itertools import chain
from statistics import median

from benchmarks.compare.runs import of_last_runs
from benchmarks.interference.table import last_runs
from benchmarks.interruptions.table import last_calls
from benchmarks.lab.tables import Line, Table, newest, percent
from benchmarks.overhead.table import MEASURED, SETTING
from benchmarks.paper.table import gains, ours


def frequency(lines: list[Line]) -> str:
    """The smallest interval within the bound, beside the best alternative's."""
    targets = [x for x in lines if x["what"] == "target"]
    if not targets:
        return ""
    x = targets[-1]
    return _bullet(
        "Smallest interval within the bound",
        f"at {percent(x['bound'])} overhead, {x['model']} can be checkpointed every {x['k']} "
        f"iterations; with the best alternative that is as durable ({x['rival']}), every "
        f"{x['k_rival']}.",
    )


def paper(lines: list[Line]) -> str:
    """What a failure costs, beside a checkpoint per epoch."""
    by_epoch = gains(lines)
    if not by_epoch:
        return ""
    ratios = list(chain.from_iterable(by_epoch.values()))
    return _bullet(
        "Recovery",
        f"over {len(ratios)} models, training is back where it was before a failure "
        f"{min(ratios):.0f} to {max(ratios):.0f} times as fast as with a checkpoint per epoch "
        f"({', '.join(by_epoch)}), {median(ratios):.0f} times in the median, not counting the "
        "start of the process.",
    )


def interruptions(lines: list[Line]) -> str:
    """The iterations that were trained again after kills."""
    runs = last_calls(lines)
    by_arm = {
        arm: sum(x["redone"] for x in runs if x["arm"] == arm) for arm in ("auto", "epoch boundary")
    }
    compared = [x["equal"] for x in runs if x["equal"] is not None]
    if not by_arm["epoch boundary"]:
        return ""
    same = "all" if all(compared) else f"{sum(compared)} of"
    return _bullet(
        "Repeated kills",
        f"{by_arm['auto']} iterations had to be trained again, against "
        f"{by_arm['epoch boundary']} with a checkpoint per epoch. Of the runs that finished, "
        f"{same} {len(compared)} ended with the same bits as a run that was never killed.",
    )


def interference(lines: list[Line]) -> str:
    """The interval before, during and after a second load."""
    runs = last_runs(lines)
    if not runs:
        return ""
    adaptive = {x["phase"]: x for x in runs[-1] if x["arm"] == "adaptive" and "phase" in x}
    during, after = adaptive["second load"], adaptive["alone again"]
    return _bullet(
        "A second job on the machine",
        f"checkpoints come every {during['k_start']} iterations before it, every {during['k_end']} "
        f"while it uses the CPU and the disk, and every {after['k_end']} after it.",
    )


def resume(lines: list[Line]) -> str:
    """How long it takes to enter the middle of the longest epoch."""
    entered = [x for x in lines if x["what"] == "resume" and x["arm"] == _ENTERED]
    middle = [x for x in newest(entered, "n", "place") if x["place"] == 0.5]
    if not middle:
        return ""
    x = max(middle, key=lambda x: int(x["n"]))
    return _bullet(
        "Resuming in the middle of an epoch",
        f"the first batch from the middle of {x['n']:,} samples is there after "
        f"{x['milliseconds']:.0f} ms; nothing is replayed.",
    )


_ENTERED = "checkfreq, DataLoader, 0 workers"

#: Why `benchmarks.compare` misses a target, where it does.
_REASONS = {
    "held": "Both only start a copy in that time. What follows delays training less with "
    "checkfreq, and its checkpoint is of one instant.",
    "durable": "The disk is the limit. More threads, other chunk sizes, or writing each chunk as "
    "soon as it is copied do not help.",
    "restore": "checkfreq verifies every byte that it reads. The alternatives verify nothing.",
}
_FIGURES = {
    "held": "Time for which a save stops training",
    "durable": "Time until a save is on disk",
    "restore": "Time to restore",
}


def compare_missed(lines: list[Line]) -> str:
    """Against every alternative that syncs, at the largest state."""
    targets = [x for x in of_last_runs(lines, "target", "among") if x["among"] == "all"]
    gib = max((x["gib"] for x in targets), default=0)
    return "".join(
        _bullet(
            f"{_FIGURES[x['target']]}, {gib:g} GiB",
            f"{x['ratio']:.2f} times that of {x['best']} (target: {x['allowed']:g}). "
            f"{_REASONS[x['target']]}",
        )
        for x in targets
        if x["gib"] == gib and x["met"] is False
    )


def paper_missed(lines: list[Line]) -> str:
    """Models whose overhead may be above the bound."""
    missed = [x for x in ours(lines) if not x["met"]]
    return "".join(
        _bullet(
            f"Overhead of {x['model']}",
            f"{percent(x['overhead'])} of {percent(x['bound'])}, but its confidence interval "
            f"({percent(x['low'])} to {percent(x['high'])}) reaches too far above the bound. More "
            "rounds would narrow it.",
        )
        for x in missed
    )


def overhead_missed(lines: list[Line]) -> str:
    """Runs whose overhead was not shown to be within the bound."""
    return "".join(
        _bullet(
            f"Overhead of {x['model']} at a bound of {percent(x['bound'])}",
            f"{percent(x['estimate'])}, but not shown to be within half a point of the bound: its "
            f"confidence interval reaches {percent(x['high'])}.",
        )
        for x in newest(lines, *SETTING)
        if x["arm"] in MEASURED and not x["met"]
    )


def decision_missed(lines: list[Line]) -> str:
    """What an iteration costs in which nothing is due."""
    return "".join(
        _bullet(
            "Cost of an iteration without a checkpoint",
            f"{x['added_us']:.0f} µs (target: {x['allowed_us']:.0f} µs), spent in Python.",
        )
        for x in newest(lines, "arm")
        if x["added_us"] > x["allowed_us"]
    )


def loading_missed(lines: list[Line]) -> str:
    """Loaders that the resumable order slows down too much."""
    loaders = newest([x for x in lines if x["what"] == "throughput"], "arm")
    missed = [x for x in loaders if x["added"] > x["allowed"]]
    if not missed:
        return ""
    return _bullet(
        "Loading of images",
        f"{len(missed)} of {len(loaders)} loaders are slowed by more than "
        f"{percent(missed[0]['allowed'])}, at most by {percent(max(x['added'] for x in missed))}: "
        "generators are seeded for every sample, and in DALI crop windows are computed by many "
        "small operators. This matters with small images.",
    )


def _bullet(name: str, text: str) -> str:
    return f"- **{name}**: {text}\n"


FINDINGS = {
    "finding_frequency": Table("frequency", frequency),
    "finding_paper": Table("paper", paper),
    "finding_interruptions": Table("interruptions", interruptions),
    "finding_interference": Table("interference", interference),
    "finding_resume": Table("iterators", resume),
    "missed_compare": Table("compare", compare_missed),
    "missed_paper": Table("paper", paper_missed),
    "missed_overhead": Table("overhead", overhead_missed),
    "missed_decision": Table("decision", decision_missed),
    "missed_loading": Table("iterators", loading_missed),
}
