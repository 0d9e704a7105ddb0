"""What ranks are to have alike is compared at the first checkpoint, and named if they do not."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from checkfreq import CFCheckpoint, CFManager, CFMode
from checkfreq.errors import StateError
from checkfreq.ranks.comparison import Differing, compare, is_rounding
from checkfreq.snapshot.cuda import CudaDevice
from checkfreq.snapshot.device import Device
from checkfreq.snapshot.digests import ValueDigests, digest_values
from checkfreq.state.capture import capture
from checkfreq.state.collector import LocalState
from checkfreq.types import Role
from tests.acceptance.ranks import Life, Rank, run, run_well
from tests.ranks import tiny
from tests.ranks.test_meetings import on_ranks
from tests.ranks.tiny import config

NAN, INF = float("nan"), float("inf")


# ---- digests


def everything(**tracked: Any) -> LocalState:
    whole = capture(CFCheckpoint(**tracked), role=Role(0, 2, (0, 1))).local
    assert whole is not None
    return whole


def digests(device: Device | None = None, **tracked: Any) -> dict[str, str]:
    values = digest_values(everything(**tracked), [], device or CudaDevice())
    assert values.are_known()
    return values.found


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.float8_e4m3fn, torch.complex128],
    ids=str,
)
def test_every_bit_of_a_tensor_counts_whatever_its_dtype(dtype: torch.dtype) -> None:
    one, other = torch.zeros(2, 3).to(dtype), torch.zeros(2, 3)
    other[1, 2] = 1.0
    assert digests(d={"x": one})["d.x"] == digests(d={"x": one.clone()})["d.x"]
    assert digests(d={"x": one})["d.x"] != digests(d={"x": other.to(dtype)})["d.x"]


def test_what_is_each_ranks_own_is_not_compared() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    found = digests(model=model, d={"x": 1}, per_rank=["model.0", "d"])
    assert found.keys() == {"model", "model.1.weight", "model.1.bias"}


class Busy:
    """A device that copies when the test says so; waiting for it is no method of it."""

    def __init__(self) -> None:
        self.queued: list[tuple[Tensor, Tensor]] = []

    def allocate_host(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), 77, dtype=torch.uint8)

    def current_stream(self, index: torch.device) -> str:
        return f"the training's of {index}"

    def copy(self, pairs: list[tuple[Tensor, Tensor]], *, stream: str) -> None:
        assert stream == "the training's of cuda:0"
        self.queued += pairs

    def record(self, stream: str) -> str:
        return stream

    def is_done(self, event: str) -> bool:
        return not self.queued

    def work(self) -> None:
        for target, source in self.queued:
            target.copy_(source)
        self.queued.clear()


def test_digests_of_device_tensors_come_when_the_device_is_done_and_nobody_waits() -> None:
    busy: Any = Busy()
    values = ValueDigests({"d": "as it is"})
    sums = {"d.x": torch.tensor(5), "d.y": torch.tensor(-7)}
    values.fetch_later({torch.device("cuda", 0): sums}, busy)
    assert values.digest() is None
    assert values.found == {"d": "as it is"}
    busy.work()
    assert values.digest() is not None
    assert values.digest() == values.digest()
    assert values.found == {"d": "as it is", "d.x": "sum 5", "d.y": "sum -7"}


# ---- what follows


@dataclass
class Held:
    """What a rank holds: digests by name, and the numbers behind them."""

    values: Mapping[str, str | None]
    numbers: Mapping[str, list[float]] = field(default_factory=dict)

    def values_digest(self) -> str | None:
        return None if None in self.values.values() else repr(self.values)

    def values_listing(self) -> dict[str, str]:
        return {name: digest for name, digest in self.values.items() if digest is not None}

    def weights(self) -> Collection[str]:
        return self.numbers.keys()

    def samples(self, names: Collection[str]) -> dict[str, list[float]]:
        return {name: self.numbers[name] for name in names}


def compared(*ranks: Held) -> list[Differing | None]:
    """What each rank is told, where words are joined in threes."""
    found = on_ranks(*[partial(compare, state=held) for held in ranks], fan_in=2)
    for one in found:
        assert one is None or isinstance(one, Differing), one
    return found


def test_ranks_are_named_by_what_is_not_as_on_rank_0_and_rounding_is_told_apart() -> None:
    first, other = {"a": "1", "b": "1", "c": "1"}, {"a": "1", "b": "2", "c": "2"}
    lacking = {"a": "1", "b": "2"}  # c is broadcast there, and the rank says so
    found = compared(*map(Held, [first, other, lacking, first, first, other]))
    assert found == [Differing({}, {"b": (1, 2, 5)})] * 6
    ranks = [Held({"v": "0", "w": str(r)}, {"v": [1.0], "w": [1.0 + r / 1000]}) for r in range(6)]
    ranks[4] = Held({"v": "x", "w": "0"}, {"v": [2.0], "w": [1.0]})
    assert compared(*ranks) == [Differing({"v": (4,)}, {"w": (1, 2, 3, 5)})] * 6


def test_nothing_is_compared_while_a_device_is_busy_anywhere() -> None:
    same = Held({"a": "1"})
    assert compared(same, same, same, Held({"a": None}), same) == [None] * 5
    assert compared(same, same, same, same, same) == [Differing({}, {})] * 5


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ([1.0, -2.0], [1.0001, -2.0], True),
        ([1.0, 2.0], [2.0, 1.0], False),
        ([NAN, INF, 1.0], [NAN, INF, 1.0], True),
        ([INF], [-INF], False),
        ([1.0], [1.0, 1.0], False),
    ],
)
def test_rounding_is_told_from_other_content(
    one: list[float], other: list[float], same: bool
) -> None:
    assert is_rounding(one, other) is same


# ---- for real


def stages(rank: Rank) -> dict[str, Any]:
    """Of equal shape, and another on each rank."""
    return trained(rank, lambda tensor: tensor.fill_(1.0 + rank.rank))


def rounded(rank: Rank) -> dict[str, Any]:
    return trained(rank, lambda tensor: tensor.mul_(1.0 + 1e-6 * rank.rank))


def trained(rank: Rank, change: Callable[[Tensor], object]) -> dict[str, Any]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with torch.no_grad():
        change(model[1].weight)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


KEPT: list[Any] = []


def mixed(rank: Rank) -> dict[str, Any]:
    """Rounding, statistics that nothing makes equal, a counter; buffers that are made equal by the
    next forward pass of a wrapper that is tracked, or of one that is not; and what is declared."""
    statistics, own = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    tracked, other = (DistributedDataParallel(nn.BatchNorm1d(2)) for _ in range(2))
    for norm in (statistics, own, tracked.module, other.module):
        norm.running_mean.fill_(float(rank.rank))
    KEPT.append(other)
    named = {"statistics": statistics, "own": own, "tracked": tracked, "inside": other.module}
    return {**rounded(rank), **named, "seen": {"batches": rank.rank}}


SCENARIOS: dict[str, tuple[Callable[[Rank], dict[str, Any]], dict[str, Any]]] = {
    "stages": (stages, {}),
    "unasked": (stages, {"rng": False}),  # all is rank 0's to write
    "mixed": (mixed, {"per_rank": ["own"]}),
}


def go_apart(rank: Rank) -> None:
    """With a directory each, whose weights are never the same."""
    chk = CFCheckpoint(**stages(rank))
    with CFManager(
        rank.chk_dir, chk, mode=CFMode.MANUAL, chk_freq=0, config=config(rank)
    ) as manager:
        manager.restore()
        manager.step()


@pytest.mark.dist
def test_directories_that_hold_different_weights_are_noticed_at_a_restore(tmp_path: Path) -> None:
    settings = {"local": True, "config": {"compare_ranks": False}}
    run_well(Life(go_apart, tmp_path, settings=settings))
    for one in run(Life(go_apart, tmp_path, number=1, settings={"local": True})):
        assert one.failure is not None
        assert one.failure.kind == "StateError"
        assert "model.1.weight (rank 1)" in one.failure.text
        assert "restore()" in one.failure.trace


def compare_all(rank: Rank) -> None:
    """Each scenario in a directory of its own: two checkpoints, or what was raised."""
    heard = tiny.Warnings()
    logging.getLogger("checkfreq").addHandler(heard)
    for name, (make, options) in SCENARIOS.items():
        heard.texts.clear()
        rank.settings["config"] = {"compare_ranks": name != "unasked"}
        chk = CFCheckpoint(**make(rank), **options)
        error = ""
        try:
            with CFManager(
                rank.life.folder / name,
                chk,
                mode=CFMode.MANUAL,
                chk_freq=1,
                config=config(rank),
            ) as manager:
                for _ in range(2):
                    manager.step()
                    manager.save(wait=True)
        except StateError as raised:
            error = str(raised)
        rank.send(name, error, list(heard.texts))


@pytest.mark.dist
def test_values_that_differ_are_named_once_at_the_first_checkpoint(tmp_path: Path) -> None:
    heard = run_well(Life(compare_all, tmp_path))
    for one in heard:
        error, _ = one.last("stages")
        assert "model.1.weight (rank 1)" in error
        assert "per_rank=" in error
        assert "model.0" not in error
        assert one.last("unasked") == ("", [])
    assert heard[1].last("mixed") == ("", [])
    error, (warning,) = heard[0].last("mixed")
    assert error == ""
    for name in ("model.1.weight", "statistics.running_mean", "seen"):
        assert f"{name} (rank 1)" in warning
    for name in ("own", "tracked", "inside"):
        assert f"{name}." not in warning
    lines = (tmp_path / "stages/events.jsonl").read_text().splitlines()
    (event,) = [e for e in map(json.loads, lines) if e["kind"] == "ranks differ"]
    assert event["lost"] == ["model.1.weight"]
