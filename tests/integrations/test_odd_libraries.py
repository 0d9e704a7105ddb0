"""Optimizers and averages of other libraries, quantised weights: interrupted equals uninterrupted.

Each case trains a few steps, is captured, and goes on; a second instance, of another seed and with
no steps or a few, is restored and goes on too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import checkfreq
from checkfreq import CFCheckpoint, CFManager, CFMode
from tests.integrations import vision  # noqa: F401  # before transformers
from tests.restore.test_odd_states import odd_bits
from tests.state.support import restore, take

pytestmark = [
    pytest.mark.more,
    pytest.mark.filterwarnings("ignore"),  # the libraries' own, at their import
]

Make = Callable[[nn.Module], Any]


@pytest.fixture(autouse=True)
def _uncompiled() -> Iterator[None]:
    """torchao compiles its optimizers, which takes minutes and changes nothing here."""
    with torch.compiler.set_stance("force_eager"):
        yield


def small_net() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))


def run(make: Make, seed: int) -> tuple[dict[str, Any], Callable[[], None]]:
    torch.manual_seed(seed)
    model = small_net()
    optimizer = make(model)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(4, 64)).square().mean().backward()
        optimizer.step()

    return {"model": model, "optimizer": optimizer}, step


def state_bits(tracked: dict[str, Any]) -> dict[str, Any]:
    return {name: odd_bits(value.state_dict()) for name, value in tracked.items()}


def check(
    make_run: Callable[[int], tuple[dict[str, Any], Callable[[], None]]],
    strays: Iterable[int] = (0, 2),
) -> None:
    for stray in strays:
        first, step = make_run(1)
        for _ in range(2):
            step()
        shot = take(CFCheckpoint(**first))
        for _ in range(2):
            step()
        second, step = make_run(2)
        for _ in range(stray):
            step()
        restore(CFCheckpoint(**second), shot)
        for _ in range(2):
            step()
        assert state_bits(second) == state_bits(first)


def _of(library: str, name: str, **options: Any) -> Make:
    def make(model: nn.Module) -> Any:
        module = pytest.importorskip(library)
        return getattr(module, name)(model.parameters(), **{"lr": 0.01, **options})

    return make


def _muon(model: nn.Module) -> Any:
    return torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.01)


def _schedule_free(model: nn.Module) -> Any:
    optimizer = _of("schedulefree", "AdamWScheduleFree", warmup_steps=3)(model)
    optimizer.train()
    return optimizer


OPTIMIZERS: dict[str, Make] = {
    "torch Muon": _muon,
    "transformers Adafactor": _of("transformers.optimization", "Adafactor", lr=None),
    "schedulefree": _schedule_free,
    "Shampoo": _of("pytorch_optimizer", "Shampoo"),
    "torchao AdamW8bit": _of("torchao.optim", "AdamW8bit", block_size=64),
    "torchao AdamW4bit": _of("torchao.optim", "AdamW4bit", block_size=64),
    "torchao AdamWFp8": _of("torchao.optim", "AdamWFp8", block_size=64),
    "bitsandbytes Adam8bit": _of("bitsandbytes.optim", "Adam8bit", min_8bit_size=16),
    "bitsandbytes Lion8bit": _of("bitsandbytes.optim", "Lion8bit", min_8bit_size=16),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_an_optimizer_continues_with_the_same_bits(make: Make) -> None:
    check(lambda seed: run(make, seed))


class _Averaged:
    """A library's average that is updated with the parameters."""

    def __init__(self, average: Any, update: Callable[[], None]) -> None:
        self.average, self.update = average, update


def _torch_average(model: nn.Module) -> _Averaged:
    average = torch.optim.swa_utils.AveragedModel(model)
    return _Averaged(average, lambda: average.update_parameters(model))


def _torch_ema(model: nn.Module) -> _Averaged:
    library = pytest.importorskip("torch_ema")
    average = library.ExponentialMovingAverage(model.parameters(), decay=0.9)
    return _Averaged(average, average.update)


def _ema_pytorch(model: nn.Module) -> _Averaged:
    library = pytest.importorskip("ema_pytorch")
    average = library.EMA(model, update_after_step=1, update_every=1, include_online_model=False)
    return _Averaged(average, average.update)


@pytest.mark.parametrize("average_of", [_torch_average, _torch_ema, _ema_pytorch])
def test_an_average_of_the_weights_continues(
    average_of: Callable[[nn.Module], _Averaged],
) -> None:
    def make(seed: int) -> tuple[dict[str, Any], Callable[[], None]]:
        tracked, train = run(lambda m: torch.optim.SGD(m.parameters(), lr=0.1), seed)
        averaged = average_of(tracked["model"])

        def step() -> None:
            train()
            averaged.update()

        return {**tracked, "average": averaged.average}, step

    check(make)


class TestQuantisedWeights:
    """torchao's, below an adapter that is trained."""

    def make(self, seed: int, *, group_size: int = 32) -> nn.Module:
        quantization = pytest.importorskip("torchao.quantization")
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 4))
        rows = quantization.PerGroup(group_size)
        quantization.quantize_(model[0], quantization.Int8WeightOnlyConfig(granularity=rows))
        return model

    def test_they_are_restored_into_live_ones(self) -> None:
        first, second = self.make(1), self.make(2)
        weight = second[0].weight  # type: ignore[index]
        restore(CFCheckpoint(model=second), take(CFCheckpoint(model=first)))
        assert odd_bits(second.state_dict()) == odd_bits(first.state_dict())
        assert torch.equal(second(torch.ones(1, 64)), first(torch.ones(1, 64)))
        assert second[0].weight is weight  # type: ignore[index]

    def test_loaded_without_the_model_they_are_dicts_of_their_parts(self, tmp_path: Path) -> None:
        model = self.make(1)
        chk = CFCheckpoint(model=model)
        with CFManager(tmp_path, chk, mode=CFMode.MANUAL, chk_freq=0) as manager:
            manager.step()
            manager.save(wait=True)
        loaded = checkfreq.load(tmp_path)["model"]
        names, _ = model[0].weight.__tensor_flatten__()  # type: ignore[index, operator]
        assert sorted(loaded["0.weight"]) == sorted(names)
        other = self.make(2)
        checkfreq.load(tmp_path, into={"model": other})
        assert odd_bits(other.state_dict()) == odd_bits(model.state_dict())
