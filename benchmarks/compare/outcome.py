"""The result lines of measured rounds: one per arm and one per target. Pure.

A round has the seconds of every arm, by figure. Ratios are taken within a round.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.compare.runs import RAW
from benchmarks.lab.estimate import quartiles
from benchmarks.lab.saving import shown, spread
from benchmarks.peers import OURS, Peer

#: The highest ratio of ours to the best peer's figure; a ratio of 1 must be undercut.
TARGETS = {"held_s": 0.1, "durable_s": 0.5, "restore_s": 1.0}

#: Seconds by figure by arm, of one round.
Round = dict[str, dict[str, float]]

#: Compared with clean iterations, of which there are too few at the first save.
_NOT_OF_THE_FIRST = ("added_s", "iteration_s")


def arm_lines(
    peers: Sequence[Peer], rounds: Sequence[Round], failed: Mapping[str, str]
) -> list[dict[str, Any]]:
    """A line per arm, or why it failed; the first of the ``rounds`` is reported separately."""
    lines = [_arm_line(RAW, {"synced": True, "note": ""}, rounds)]
    for peer in peers:
        about = {"synced": peer.synced, "note": peer.note}
        if peer.name in failed:
            lines.append({"arm": peer.name, **about, "failed": failed[peer.name]})
        else:
            lines.append(_arm_line(peer.name, about, rounds))
    return lines


def _arm_line(name: str, about: Mapping[str, Any], rounds: Sequence[Round]) -> dict[str, Any]:
    first, *rest = rounds
    started = {
        f"first_{figure}": [value]
        for figure, value in first.get(name, {}).items()
        if figure not in _NOT_OF_THE_FIRST
    }
    return {
        "arm": name,
        **about,
        **_shown(started),
        **_shown(figures_of(rest, name)),
        **_ratios("ours", rest, OURS, name),
        **_ratios("against_raw", rest, RAW, name),
    }


def figures_of(rounds: Sequence[Round], arm: str) -> dict[str, list[float]]:
    """Every figure of an arm in the rounds that have it."""
    figures: dict[str, list[float]] = {}
    for each in rounds:
        for figure, value in each.get(arm, {}).items():
            figures.setdefault(figure, []).append(value)
    return figures


def ratios_of(rounds: Sequence[Round], above: str, below: str, figure: str) -> list[float]:
    """The ratios of two arms in the rounds that have both."""
    both = ((each.get(above, {}), each.get(below, {})) for each in rounds)
    return [one[figure] / other[figure] for one, other in both if figure in one and figure in other]


def _ratios(prefix: str, rounds: Sequence[Round], above: str, below: str) -> dict[str, float]:
    found = {figure: ratios_of(rounds, above, below, figure) for figure in TARGETS}
    return {
        f"{prefix}_{figure.removesuffix('_s')}": round(statistics.median(ratios), 4)
        for figure, ratios in found.items()
        if ratios
    }


def _shown(figures: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Medians and, of more than one value, quartiles."""
    limits = spread({name: values for name, values in figures.items() if len(values) > 1})
    return {
        **shown({name: statistics.median(values) for name, values in figures.items()}),
        **{f"{name}_quartiles": [low, limits["high"][name]] for name, low in limits["low"].items()},
    }


def target_lines(
    peers: Sequence[Peer], rounds: Sequence[Round], *, chosen: bool
) -> list[dict[str, Any]]:
    """Ours against the best synced peer, for each target and each group of peers.

    ``chosen``: only some peers took part, and the group is named so.
    """
    synced = [peer for peer in peers if peer.synced and peer.name != OURS]
    groups = {
        "chosen" if chosen else "all": synced,
        "chosen, as documented" if chosen else "as documented": [x for x in synced if not x.note],
    }
    found = (
        _target(figure, among, [peer.name for peer in group], rounds)
        for figure in TARGETS
        for among, group in groups.items()
    )
    return [line for line in found if line is not None]


def _target(
    figure: str, among: str, names: Sequence[str], rounds: Sequence[Round]
) -> dict[str, Any] | None:
    medians = {
        name: statistics.median(values)
        for name in names
        if (values := figures_of(rounds, name).get(figure))
    }
    if not medians:
        return None
    best = min(medians, key=lambda name: medians[name])
    ratios = ratios_of(rounds, OURS, best, figure)
    allowed = TARGETS[figure]
    return {
        "target": figure.removesuffix("_s"),
        "among": among,
        "peers": list(medians),
        "best": best,
        "ratio": round(statistics.median(ratios), 4),
        "ratio_quartiles": [round(one, 4) for one in quartiles(ratios)],
        "allowed": allowed,
        "met": _is_met(ratios, allowed),
    }


def _is_met(ratios: Sequence[float], allowed: float) -> bool | None:
    """None: the median meets the target, the upper quartile does not."""

    def is_within(ratio: float) -> bool:
        return ratio <= allowed if allowed < 1 else ratio < allowed

    if not is_within(statistics.median(ratios)):
        return False
    return True if is_within(quartiles(ratios)[1]) else None
