"""Where ``checkfreq plan`` has the costs from: profile.json, the events, the newest checkpoint.

profile.json has what the last run measured. Events have the same costs in their last ``plan`` or
``committed``, and besides how long a checkpoint held training and how much of it was written. What
a user gives counts for more than either.
"""

from __future__ import annotations

import contextlib
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkfreq.errors import CheckFreqError, ConfigError, NoCheckpointError
from checkfreq.pacing.profile_cache import StoredCosts, stored_costs
from checkfreq.policy.failure_rate import FailureRate
from checkfreq.policy.profile import LONGEST_S, Profile, is_amount
from checkfreq.store.store import CheckpointStore
from checkfreq.story.failing import failure_rate
from checkfreq.story.model import Story
from checkfreq.story.reading import EventReader
from checkfreq.types import Json

#: Checkpoints whose median stall counts.
_STALLS = 8
_COSTS = ("iteration_s", "overlap_s", "host_copy_s", "device_copy_s", "persist_s", "durable_s",
          "cost_s", "cost_error_s", "cost_upper_s", "boundary_s")  # fmt: skip


@dataclass(slots=True)
class Found:
    """What a directory tells. ``costs``: fields of a Profile by name. None: not known.

    sources: the files that were used, for people. failures: of earlier runs in the directory.
    """

    costs: dict[str, float] = field(default_factory=dict)
    stall_s: float | None = None
    num_bytes: int | None = None
    written_bytes: int | None = None
    world: int | None = None
    failures: FailureRate = field(default_factory=FailureRate)
    sources: list[str] = field(default_factory=list)


def found_in(store: CheckpointStore) -> Found:
    """What the directory tells; NoCheckpointError if there is no such directory.

    ConfigError for a profile.json that cannot be read.
    """
    if not store.ops.is_dir(store.root):
        raise NoCheckpointError(f"{store.root} is not a directory")
    found = Found()
    _add_events(found, EventReader(store.root).new())
    stored = _stored(store.root / "profile.json")
    if stored is not None:
        if stored.failures.more_than(found.failures):
            found.failures = stored.failures
        if stored.profile is not None:
            found.sources.append("profile.json")
            found.costs = _costs_in(stored.profile.to_dict())
            found.num_bytes = found.num_bytes or stored.profile.state_bytes
    _add_newest(found, store)
    return found


def profile_of(found: Found, given: dict[str, float | None]) -> Profile:
    """The costs, with those that were given in place of those that were found.

    ConfigError, naming the options, where the time of an iteration or of a checkpoint is missing.
    """
    own = {name: value for name, value in given.items() if value is not None}
    costs: dict[str, Any] = {**found.costs, **own}
    missing = [name for name in ("iteration_s", "cost_s", "persist_s") if name not in costs]
    if missing:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise ConfigError(
            f"plan: expected measured costs, found no {', '.join(missing)}. Name the directory of "
            "a run that has taken a checkpoint in CFMode.AUTO (it keeps profile.json there), or "
            f"give {options}"
        )
    if "cost_s" in own:  # the error and the limit were those of the other cost
        costs |= {"cost_upper_s": costs["cost_s"], "cost_error_s": 0.0}
    copy_s = costs.setdefault("host_copy_s", costs["cost_s"])
    if own.keys() & {"persist_s", "host_copy_s"} or "durable_s" not in costs:
        costs["durable_s"] = copy_s + costs["persist_s"]
    costs["cost_upper_s"] = max(costs["cost_s"], costs.get("cost_upper_s", 0.0))
    costs.setdefault("overlap_s", 0.0)
    return Profile(**costs, state_bytes=0)


def _costs_in(data: Json) -> dict[str, float]:
    """The fields of a Profile that are numbers a run can have measured."""
    named = ((name, _amount(data.get(name))) for name in _COSTS) if isinstance(data, dict) else ()
    return {name: value for name, value in named if value is not None and value <= LONGEST_S}


def _amount(value: Json) -> float | None:
    return float(value) if is_amount(value) else None


def _stored(path: Path) -> StoredCosts | None:
    try:
        return stored_costs(path)
    except FileNotFoundError:
        return None
    except ValueError as why:
        raise ConfigError(
            f"{path}: expected the measured costs of a run: {why}. Remove the file (the next run "
            "measures again), or give the costs as options and no directory"
        ) from None


def _add_events(found: Found, events: list[dict[str, Any]]) -> None:
    story = Story()
    story.add_all(events)
    found.failures = failure_rate(story)
    saves = [event for event in events if event.get("kind") == "committed"]
    for event in events:
        is_plan = event.get("kind") == "plan"
        costs = _costs_in(event if is_plan else event.get("costs"))
        found.costs = costs if {"iteration_s", "cost_s"} <= costs.keys() else found.costs
    told = (_amount(save.get("stall_s")) for save in saves[-_STALLS:])
    stalls = [stall_s for stall_s in told if stall_s is not None]
    if stalls:
        found.stall_s = statistics.median(stalls)
    num_bytes = _amount(saves[-1].get("num_bytes")) if saves else None
    if num_bytes is not None:
        linked_bytes = _amount(saves[-1].get("linked_bytes")) or 0.0
        found.num_bytes = int(num_bytes)
        found.written_bytes = max(0, int(num_bytes - linked_bytes))
    if found.costs or saves:
        found.sources.append("events.jsonl")


def _add_newest(found: Found, store: CheckpointStore) -> None:
    """The size of the newest checkpoint of which the record can be read."""
    for step in reversed(store.steps()):
        with contextlib.suppress(CheckFreqError):
            record = store.glance(step)
            found.world, found.num_bytes = record.world, record.num_bytes
            if found.written_bytes is None or found.written_bytes > record.num_bytes:
                found.written_bytes = record.num_bytes
            found.sources.append(f"step {step}")
            return
