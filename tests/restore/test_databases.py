"""What torch's own tests are run with, and a library of optimizers: exact through the disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.restore import databases
from tests.silence.training import start

pytestmark = pytest.mark.more


@pytest.mark.parametrize(
    ("program", "needs"),
    [
        (databases.torch_optimizers, "expecttest"),
        (databases.torch_schedulers, "expecttest"),
        (databases.torch_modules, "expecttest"),
        (databases.zoo, "pytorch_optimizer"),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_every_case_goes_on_with_the_same_bits(
    program: Callable[[str, int], list[str]], needs: str, tmp_path: Path
) -> None:
    pytest.importorskip(needs)
    ended = start(program, tmp_path)
    assert ended.exit_code == 0, ended.error
    assert ended.result == []
