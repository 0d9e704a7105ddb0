"""AUTO over the times of recorded runs keeps its bound, and saves about as often as it allows."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.acceptance.command import checkfreq
from tests.acceptance.sizes import sized

RECORDED = Path(__file__).resolve().parents[2] / "benchmarks" / "traces" / "recorded"
TRACES = sorted(path.name.partition(".")[0] for path in RECORDED.glob("*.jsonl.gz"))
#: Noise that looks like cost, or hides it, where iterations take 1.5 ms: of the bound.
ALLOWED = 1.15


@pytest.mark.parametrize("bound", [0.035, 0.1])
@pytest.mark.parametrize("name", sized(TRACES, smoke=("quiet", "neighbour").__contains__))
def test_auto_keeps_the_bound_over_the_times_of_a_recorded_run(name: str, bound: float) -> None:
    trace = RECORDED / f"{name}.jsonl.gz"
    _, *arms = checkfreq("simulate", "--trace", trace, "--max-overhead", bound, status=0)
    auto = next(arm for arm in arms if arm["arm"] == "auto")
    assert auto["overhead"] <= ALLOWED * bound
    assert auto["checkpoints"] > 5
    assert auto["times_ideal"] <= 2.5, "it checkpoints far less often than the bound allows"
