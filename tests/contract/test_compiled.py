"""A training step compiled as a whole: updates, boundaries and checkpoints are those of a loop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.contract.runs import Training, managed, running

#: torch warns of itself: of what its compiler imports, and that it breaks a graph at our call.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_every_update_and_boundary_inside_of_it_counts_once(chk_dir: Path) -> None:
    with running(chk_dir, chk_freq=1) as (training, manager):

        @torch.compile(backend="aot_eager")
        def iterate(x: torch.Tensor) -> None:
            training.model(x).square().mean().backward()
            manager.weight_update()
            training.optimizer.zero_grad()
            training.scheduler.step()
            manager.step()

        for number in range(1, 4):
            iterate(torch.randn(4, 3))
            assert (manager.update_attempts, manager.global_step) == (number, number)
            manager.wait()
        assert manager.stats()["num_committed"] == 3
        assert manager.stats()["num_failed"] == 0
    restored = Training(seed=1)
    with managed(chk_dir, restored.chk) as manager:
        manager.restore()
        assert manager.global_step == 3
        assert restored.state_bits() == training.state_bits()
