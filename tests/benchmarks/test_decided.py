"""A decider in our engine: its input, and when it has had enough time."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.frequency.decided import DecidedManager
from benchmarks.lab.training import Loop
from checkfreq.policy.tuner import Iteration, Measured, Verdict


class Every:
    """Takes a checkpoint every so many steps, unless one is in flight; records its input."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._active: str | None = None
        self.iterations: list[Iteration] = []
        self.started_s: dict[str, float] = {}
        self.ended_s: dict[str, float] = {}
        self.measured: list[Measured | None] = []

    def iteration(self, iteration: Iteration) -> None:
        self.iterations.append(iteration)

    def started(self, attempt: str, *, step: int, start_s: float, is_periodic: bool) -> None:
        assert (attempt, is_periodic, self._active) == (str(step), True, None)
        self._active = attempt
        self.started_s[attempt] = start_s

    def ended(self, attempt: str, *, end_s: float, measured: Measured | None) -> None:
        assert attempt == self._active
        self._active = None
        self.ended_s[attempt] = end_s
        self.measured.append(measured)

    def due(self, *, step: int, now_s: float) -> Verdict:
        return Verdict.TAKE if self._active is None and step % self._steps == 0 else Verdict.NOT_YET


def test_a_decider_gets_each_iteration_and_its_checkpoints(tmp_path: Path) -> None:
    decider, loop = Every(2), Loop("transformer", batch=1, tokens=4)
    decided = DecidedManager(loop, tmp_path, decider)
    decided.live.stretch(lambda: len(decider.ended_s) == 2, after=decided.boundary)
    decided.live.close()
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    committed = {str(x["step"]): x for x in events if x["kind"] == "committed"}
    assert decider.ended_s == {
        step: committed[step]["durable_monotonic_s"] for step in decider.ended_s
    }
    for (step, end_s), measured in zip(decider.ended_s.items(), decider.measured, strict=True):
        assert measured is not None
        assert measured.persist_s == committed[step]["persist_s"]
        assert measured.durable_s == end_s - decider.started_s[step] > 0
        assert measured.state_bytes == committed[step]["num_bytes"] > 0
    pairs = zip(decider.iterations, decider.iterations[1:], strict=False)
    assert all(before.end_s < after.start_s for before, after in pairs)  # what is told is in none
    begins = {each.start_s for each in decider.iterations}
    # and a checkpoint's call is in the next, of which the stretch's last one may have none
    assert {x for x in decider.started_s.values() if x <= max(begins)} <= begins
    assert begins & set(decider.started_s.values())
