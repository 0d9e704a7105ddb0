"""A loop written with accelerate's ``Accelerator``, killed and resumed; and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from checkfreq.errors import ConfigError
from tests.integrations.killing import run_killed
from tests.integrations.programs import train_accelerated
from tests.patience import slowness

pytestmark = [pytest.mark.more, pytest.mark.crash]

NUM_SAMPLES, EPOCHS = 46, 3


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.dist)])
def test_a_killed_loop_ends_with_the_bits_of_one_never_killed(world: int, tmp_path: Path) -> None:
    # A successor may wait so long for parts that nobody will write any more.
    config = {"rank_timeout_s": 4.0 * slowness()} if world > 1 else {}
    whole = run_killed(train_accelerated, tmp_path, world=world, seed=3, config=config)
    batches = [data for rank in whole for kind, _, data in rank if kind == "batch"]
    for epoch in range(EPOCHS):
        used = sorted(i for one, ids, _ in batches if one == epoch for i in ids)
        assert used == list(range(NUM_SAMPLES))


@pytest.mark.parametrize("strategy", ["DEEPSPEED", "MEGATRON_LM", "XLA", "FSDP"])
def test_a_strategy_that_cannot_be_exact_is_refused_by_name(strategy: str) -> None:
    from accelerate.utils import DistributedType

    from checkfreq.integrations.accelerate.strategies import require_exact

    plugin = SimpleNamespace(fsdp_version=1) if strategy == "FSDP" else None
    accelerator = SimpleNamespace(
        distributed_type=DistributedType[strategy], state=SimpleNamespace(fsdp_plugin=plugin)
    )
    with pytest.raises(ConfigError, match=r"cannot be resumed bit for bit.*FSDP2"):
        require_exact(accelerator, "a test")


def test_an_accelerator_that_has_prepared_nothing_is_refused() -> None:
    from accelerate import Accelerator

    from checkfreq.integrations.accelerate import checkpoint_of

    with pytest.raises(ConfigError, match="has prepared the model and the optimizer"):
        checkpoint_of(Accelerator(cpu=True))
