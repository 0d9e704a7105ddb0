"""A run killed by SIGKILL at random instants ends with the same bits as one never killed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.acceptance.cases import CASES
from tests.acceptance.killing import run_case

SMOKE = (
    *("AdamWWarmUpPerStepTwoWorkers", "TwoOptimizersOfAGan", "AccumulationAcrossEpochs"),
    *("IterableDatasetOfTwoWorkers", "DaliPictures"),
)
SLOW = ("CompiledModel", "TorchvisionResNet18", "UpdateThatWouldOvertakeTheCopy")

pytestmark = pytest.mark.crash


def marked(name: str) -> object:
    needs = [] if name in SMOKE else [pytest.mark.more]
    needs += [pytest.mark.slow] if name in SLOW else []
    for prefix, package in (("Torchvision", "torchvision"), ("Dali", "nvidia.dali")):
        if name.startswith(prefix):
            absent = find_spec(package.partition(".")[0]) is None or find_spec(package) is None
            needs.append(pytest.mark.skipif(absent, reason=f"{package} is not installed"))
    return pytest.param(name, marks=needs)


@pytest.mark.parametrize("name", [marked(name) for name in CASES])
def test_interrupted_equals_uninterrupted_bit_for_bit(name: str, tmp_path: Path) -> None:
    assert run_case(name, tmp_path, seed=1) >= 5
