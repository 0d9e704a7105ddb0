"""Gradients that a later update will use."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from checkfreq.errors import CorruptCheckpointError
from checkfreq.state.capture import GRADIENTS
from checkfreq.state.checkpoint import CFCheckpoint
from checkfreq.state.gradients import PendingGradients
from checkfreq.types import Role
from tests.contract.runs import managed
from tests.state.ranks import Manifest, part, restored
from tests.state.support import Shot, plan, restore, take


class Watched:
    """Two layers, an optimizer for each unless ``together``, and what is pending."""

    def __init__(self, *, together: bool = True) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
        self.optimizers = {
            f"optimizer{i or ''}": torch.optim.SGD(params, lr=0.1)
            for i, params in enumerate(
                [[*self.model.parameters()]]
                if together
                else [[*layer.parameters()] for layer in self.model]
            )
        }
        self.pending = PendingGradients(self.optimizers)
        self.chk = CFCheckpoint(model=self.model, **self.optimizers)

    def backward(self) -> None:
        self.model(torch.randn(4, 3)).square().mean().backward()

    def step(self) -> None:
        for optimizer in self.optimizers.values():
            optimizer.step()

    def gradients(self) -> list[Tensor | None]:
        return [parameter.grad for parameter in self.model.parameters()]

    def shot(self) -> Shot:
        return take(self.chk, gradients=self.pending.read())


@pytest.fixture
def watched() -> Iterator[Watched]:
    made = Watched()
    yield made
    made.pending.close()


@pytest.mark.parametrize("clears", [True, False])
def test_gradients_of_a_backward_pass_after_the_last_step_are_pending(
    watched: Watched, clears: bool
) -> None:
    """Before the first step and after one; not those that a step has used."""
    assert not watched.pending.read()
    watched.backward()
    ((name, found),) = watched.pending.read().items()
    assert name == "optimizer"
    assert [found[number] for number in range(4)] == watched.gradients()
    watched.step()
    watched.pending.pass_boundary()
    assert not watched.pending.read()
    if clears:
        watched.model.zero_grad()
    watched.backward()
    assert watched.pending.read()


def test_gradients_that_the_next_backward_pass_adds_to_are_kept_from_then_on(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for number in range(4):
        watched.backward()
        watched.step()
        watched.pending.pass_boundary()
        assert bool(watched.pending.read()) == (number > 0)
    assert len(caplog.records) == 1
    assert "optimizer: gradients are kept over the update" in caplog.text


@pytest.mark.parametrize("how", ["to none", "in place", "unseen"])
def test_gradients_that_are_cleared_before_the_next_backward_pass_are_not_kept(
    watched: Watched, how: str
) -> None:
    for _ in range(4):
        if how == "unseen":
            for gradient in watched.gradients():
                gradient.data.zero_() if gradient is not None else None  # no version changes
        else:
            watched.model.zero_grad(set_to_none=how == "to none")
        for _ in range(2):  # the second adds to the first
            watched.backward()
        watched.step()
        watched.pending.pass_boundary()
        assert not watched.pending.read()


def test_what_another_optimizers_backward_pass_adds_to_is_not_kept_if_it_is_cleared_then() -> None:
    """As a GAN's two are trained."""
    watched = Watched(together=False)
    discriminator, generator = watched.optimizers.values()
    for _ in range(4):
        for optimizer in (generator, discriminator):  # each backward pass reaches both
            optimizer.zero_grad()
            watched.backward()
            optimizer.step()
        watched.pending.pass_boundary()
        assert not watched.pending.read()
    watched.pending.close()


def test_gradients_that_are_assigned_are_kept_if_they_are_written_in_place_from_then_on() -> None:
    master = torch.ones(2)
    pending = PendingGradients({"o": (optimizer := torch.optim.SGD([master], lr=0.1))})
    for number in range(5):
        if number > 2 and master.grad is not None:
            master.grad.mul_(0.5).add_(1)
        else:
            master.grad = torch.ones(2)
        optimizer.step()
        pending.pass_boundary()
        assert bool(pending.read()) == (number > 2)
    pending.close()


def test_restored_gradients_are_kept_until_they_are_seen_to_be_cleared(watched: Watched) -> None:
    watched.pending.restored(["optimizer"])
    for number in range(3):
        watched.backward()
        watched.step()
        watched.pending.pass_boundary()
        assert bool(watched.pending.read()) == (number == 0)
        watched.model.zero_grad()


def test_the_gradients_of_an_optimizer_that_steps_less_often_are_pending_meanwhile() -> None:
    watched = Watched(together=False)
    often, rarely = watched.optimizers.values()
    for _ in range(3):
        watched.backward()
        often.step()
        often.zero_grad()
        watched.pending.pass_boundary()
        assert [*watched.pending.read()] == ["optimizer1"]
    rarely.step()
    assert not watched.pending.read()


def test_sparse_gradients_are_left_out_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 1))
    pending = PendingGradients({"optimizer": torch.optim.SGD(model.parameters(), lr=0.1)})
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            model(torch.tensor([1, 2])).mean().backward()
            assert [*pending.read()["optimizer"]] == [1, 2]
    (record,) = caplog.records
    assert "optimizer: sparse gradients" in record.message


def test_pending_gradients_come_back_bit_for_bit_each_time_they_are_applied(
    watched: Watched,
) -> None:
    watched.backward()
    shot, expected = watched.shot(), [one.clone() for one in watched.gradients() if one is not None]
    fresh = Watched()
    plan_ = restore(fresh.chk, shot)
    fresh.model.zero_grad()  # between the restore and the first batch
    for _ in range(2):
        plan_.apply_last()
        assert all(map(torch.equal, fresh.gradients(), expected))
        fresh.backward()  # adds to what was set, not to what will be
        fresh.model.zero_grad(set_to_none=False)
    assert fresh.pending.read() == {}


def test_a_malformed_record_of_gradients_is_corruption(watched: Watched) -> None:
    watched.backward()
    shot = watched.shot()
    record = shot.found.manifest.objects[GRADIENTS]
    for numbers in (7, {"optimizer": 3}, {"optimizer": [9]}):
        record["parameters"] = numbers
        with pytest.raises(CorruptCheckpointError, match="gradients"):
            plan(Watched().chk, shot)


def test_each_rank_gets_its_own_gradients_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parts, expected = [], []
    for rank in range(2):
        watched = Watched()
        watched.backward() if rank else None
        role = Role(rank, 2, (0, 1))
        parts.append(part(watched.chk, role, gradients=watched.pending.read()))
        expected.append(watched.gradients())
    manifest = Manifest.merged(parts)
    for rank in range(2):
        fresh = Watched()
        restored(fresh.chk, manifest, rank, world=2).apply_last()
        for found, wanted in zip(fresh.gradients(), expected[rank], strict=True):
            assert (found is None and wanted is None) or torch.equal(found, wanted)  # type: ignore[arg-type]
    for rank, world in ((0, 1), (2, 3)):
        fresh = Watched()
        restored(fresh.chk, manifest, rank, world=world).apply_last()
        assert fresh.gradients() == [None] * 4
        assert f"update (of 2 rank(s), here are {world})" in caplog.text


def test_a_step_that_a_scaler_skipped_has_used_its_gradients(tmp_path: Path) -> None:
    watched, scaler = Watched(), torch.amp.GradScaler("cpu")
    chk = CFCheckpoint(model=watched.model, scaler=scaler, **watched.optimizers)
    with managed(tmp_path, chk) as manager:
        scaler.scale(watched.model(torch.full((4, 3), torch.inf)).mean()).backward()
        manager.weight_update(scaler=scaler)
        manager.step()
        manager.save(wait=True)
    assert not [*tmp_path.glob("step-*/*gradients*")]
    watched.pending.close()
