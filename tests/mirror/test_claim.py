"""One run at a time writes under a prefix."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkfreq.mirror.claim import LEASE_S, RENEW_EVERY_S, ClaimKeeper, Ownership
from checkfreq.mirror.client import RemoteObjects
from checkfreq.mirror.layout import CLAIM
from tests.mirror.checkpoints import local_remote, memory_remote


class World:
    """A place that runs claim, on a clock that a test moves."""

    def __init__(self, remote: RemoteObjects) -> None:
        self.remote, self.now_s = remote, 1000.0

    def keeper(self, run: str) -> ClaimKeeper:
        clock = lambda: self.now_s  # noqa: E731
        return ClaimKeeper(self.remote, run=run, clock=clock, wall=clock)

    def taken(self, run: str) -> ClaimKeeper:
        made = self.keeper(run)
        assert made.take() is Ownership.OURS
        return made


@pytest.fixture(params=["conditions", "none"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    """A store that honours conditions on writes, and one that cannot replace on them."""
    honours = request.param == "conditions"
    return World(memory_remote() if honours else local_remote(tmp_path / "remote"))


def test_a_prefix_that_nobody_claims_is_taken_and_renewed_when_it_is_due(world: World) -> None:
    claim = world.taken("one")
    assert list(world.remote.list("")) == [CLAIM]
    before = world.remote.get(CLAIM)[0]
    assert claim.renew_if_due()
    assert world.remote.get(CLAIM)[0] == before
    world.now_s += RENEW_EVERY_S
    assert claim.is_due
    assert claim.renew_if_due()
    assert world.remote.get(CLAIM)[0] != before


def test_a_second_run_waits_and_is_refused_once_the_claim_is_renewed(world: World) -> None:
    first, second = world.taken("one"), world.keeper("two")
    assert second.take() is Ownership.WAITING
    assert "run one" in second.holder
    world.now_s += RENEW_EVERY_S
    assert first.renew_if_due()
    assert second.take() is Ownership.REFUSED
    assert not second.is_ours
    second.release()  # leaves nothing behind
    assert list(world.remote.list("")) == [CLAIM]
    assert first.renew()


@pytest.mark.parametrize("ends", ["gives it up", "dies"])
def test_a_refused_run_gets_the_claim_once_the_other_has_ended(world: World, ends: str) -> None:
    first, second = world.taken("one"), world.keeper("two")
    second.take()
    for _ in range(3):
        world.now_s += RENEW_EVERY_S
        assert first.renew_if_due()
        assert second.take() is Ownership.REFUSED
    if ends == "gives it up":
        first.release()
    else:
        world.now_s += LEASE_S - 1
        assert second.take() is Ownership.REFUSED
        world.now_s += 1
    assert second.take() is Ownership.OURS
    assert second.is_contested
    assert not first.renew_if_due()
    first.release()  # not the second run's
    assert second.renew()


def test_the_claim_of_a_dead_run_is_taken_over_after_its_lease(world: World) -> None:
    dead, heir = world.taken("one"), world.keeper("two")
    assert heir.take() is Ownership.WAITING
    world.now_s += LEASE_S - 2  # the service counts whole seconds of its own as well
    assert heir.take() is Ownership.WAITING
    world.now_s += 2
    assert heir.take() is Ownership.OURS
    assert not dead.renew()
    assert not dead.is_ours


def test_the_same_directorys_claim_is_taken_over_at_once(world: World) -> None:
    old = world.taken("one")
    world.taken("one")
    assert not old.renew()


class LostReply(RemoteObjects):
    """The claim is written, and the reply says that it was there already."""

    def create(self, key: str, data: bytes) -> str | None:
        super().create(key, data)
        raise FileExistsError(key)


def test_a_write_that_is_answered_with_a_conflict_of_its_own_counts() -> None:
    inner = memory_remote()
    assert World(LostReply(inner._mirror, store=inner._store)).taken("one").renew()
