"""Each example, killed at a random instant and started again, ends with the bits of a whole run."""

from __future__ import annotations

import importlib.util
import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.examples.running import Example, output_of, said_in

pytestmark = [pytest.mark.more, pytest.mark.crash, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted(path.stem for path in (ROOT / "checkfreq/examples").glob("[!_]*.py"))
HAS_DALI = importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.dali")
MARKS = {
    "dali": [pytest.mark.dali, pytest.mark.skipif(not HAS_DALI, reason="DALI is not installed")],
    "ddp": [pytest.mark.dist],
    "fsdp": [pytest.mark.dist],
}
#: Three for DDP: of two numbers the order of summation makes no difference.
RANKS = {"ddp": 3, "fsdp": 2}


@dataclass(frozen=True, slots=True)
class Whole:
    """An example that ran to its end, in ``training_s`` from its first checkpoint on."""

    example: Example
    folder: Path
    training_s: float


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=MARKS.get(name, [])) for name in NAMES]
)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """The run to compare with."""
    name, folder = request.param, tmp_path_factory.mktemp(request.param)
    further = {"dali": (str(folder / "images"),), "compiled": ("aot_eager",)}
    example = Example(name, further.get(name, ()), RANKS.get(name, 1))
    return Whole(example, folder, example.run(folder))


def test_an_example_that_is_killed_prints_what_a_whole_run_prints(
    whole: Whole, tmp_path: Path
) -> None:
    within_s, dice = whole.training_s, random.Random()
    for attempt in range(8):
        folder = tmp_path / str(attempt)
        within_s *= 0.75  # a machine that has less to do than before outruns the kill
        if whole.example.run_killed(folder, within_s=within_s, dice=dice):
            break
    else:
        pytest.fail(f"it always ended before it was killed: {output_of(folder)}")
    expected, found = said_in(whole.folder), said_in(folder)
    assert expected[-1].startswith("digest"), output_of(whole.folder)
    assert found[-1] == expected[-1], output_of(folder)
    assert set(found) == set(expected), output_of(folder)
    assert not any(line.endswith("once per epoch: False") for line in found)


def test_an_example_that_has_ended_trains_nothing_when_it_is_started_again(whole: Whole) -> None:
    before = said_in(whole.folder)
    whole.example.run_again(whole.folder)
    after = said_in(whole.folder)[len(before) :]
    assert after[-1] == before[-1], output_of(whole.folder)
    assert not any(line.startswith(("epoch", "step")) for line in after)
