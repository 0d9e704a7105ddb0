"""One run at a time writes under a prefix."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkfreq.errors import StorageError
from checkfreq.mirror.claim import LEASE_S, RENEW_EVERY_S, ClaimKeeper, Ownership
from checkfreq.mirror.client import RemoteObjects
from checkfreq.mirror.layout import CLAIM
from tests.mirror.checkpoints import local_remote, memory_remote


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["conditions", "none"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> RemoteObjects:
    """A store that honours conditions on writes, and one that cannot replace on them."""
    return memory_remote() if request.param == "conditions" else local_remote(tmp_path / "remote")


def keeper(remote: RemoteObjects, run: str, clock: Clock) -> ClaimKeeper:
    return ClaimKeeper(remote, run=run, clock=clock, wall=clock)


def test_a_prefix_that_nobody_claims_is_taken(remote: RemoteObjects, clock: Clock) -> None:
    claim = keeper(remote, "one", clock)
    assert claim.take() is Ownership.OURS
    assert list(remote.list("")) == [CLAIM]


def test_a_second_run_waits_and_is_refused_once_the_claim_is_renewed(
    remote: RemoteObjects, clock: Clock
) -> None:
    first, second = keeper(remote, "one", clock), keeper(remote, "two", clock)
    assert first.take() is Ownership.OURS
    assert second.take() is Ownership.WAITING
    assert "run one" in second.holder
    clock.now_s += RENEW_EVERY_S
    assert first.renew_if_due()
    assert second.take() is Ownership.REFUSED
    assert not second.is_ours


@pytest.mark.parametrize("ends", ["gives it up", "dies"])
def test_a_refused_run_gets_the_claim_once_the_other_has_ended(
    remote: RemoteObjects, clock: Clock, ends: str
) -> None:
    first, second = keeper(remote, "one", clock), keeper(remote, "two", clock)
    first.take()
    second.take()
    for _ in range(3):
        clock.now_s += RENEW_EVERY_S
        assert first.renew_if_due()
        assert second.take() is Ownership.REFUSED
    if ends == "gives it up":
        first.release()
    else:
        clock.now_s += LEASE_S - 1
        assert second.take() is Ownership.REFUSED
        clock.now_s += 1
    assert second.take() is Ownership.OURS
    assert second.is_contested
    assert not first.renew_if_due()


def test_the_claim_of_a_dead_run_is_taken_over_after_its_lease(
    remote: RemoteObjects, clock: Clock
) -> None:
    dead, heir = keeper(remote, "one", clock), keeper(remote, "two", clock)
    dead.take()
    assert heir.take() is Ownership.WAITING
    clock.now_s += LEASE_S - 2  # the service counts whole seconds of its own as well
    assert heir.take() is Ownership.WAITING
    clock.now_s += 2
    assert heir.take() is Ownership.OURS
    assert not dead.renew()
    assert not dead.is_ours


def test_the_same_directorys_claim_is_taken_over_at_once(
    remote: RemoteObjects, clock: Clock
) -> None:
    old, new = keeper(remote, "one", clock), keeper(remote, "one", clock)
    old.take()
    assert new.take() is Ownership.OURS
    assert not old.renew()


def test_a_claim_that_was_given_up_is_free(remote: RemoteObjects, clock: Clock) -> None:
    first, second = keeper(remote, "one", clock), keeper(remote, "two", clock)
    first.take()
    first.release()
    assert second.take() is Ownership.OURS
    first.release()  # not the second run's
    assert second.renew()


def test_a_claim_that_cannot_be_read_is_waited_out(remote: RemoteObjects, clock: Clock) -> None:
    remote.put(CLAIM, b"{}")
    claim = keeper(remote, "one", clock)
    assert claim.take() is Ownership.WAITING
    assert claim.holder == "an unreadable claim"
    clock.now_s += LEASE_S
    assert claim.take() is Ownership.OURS


def test_a_claim_is_renewed_when_it_is_due(remote: RemoteObjects, clock: Clock) -> None:
    claim = keeper(remote, "one", clock)
    claim.take()
    before = remote.get(CLAIM)[0]
    assert claim.renew_if_due()
    assert remote.get(CLAIM)[0] == before
    clock.now_s += RENEW_EVERY_S
    assert claim.is_due
    assert claim.renew_if_due()
    assert remote.get(CLAIM)[0] != before


class Whole(RemoteObjects):
    """Ranges are answered with the beginning of the object."""

    def read_into(self, key: str, view: memoryview, *, start: int) -> None:
        super().read_into(key, view, start=0)


def test_a_service_that_does_not_return_parts_of_objects_is_found_at_the_start(
    clock: Clock,
) -> None:
    inner = memory_remote()
    remote = Whole(inner._mirror, store=inner._store)
    with pytest.raises(StorageError, match="cannot be read back in parts.*expected b'ir'"):
        keeper(remote, "one", clock).take()
    assert list(remote.list("")) == []


class LostReply(RemoteObjects):
    """The claim is written, and the reply says that it was there already."""

    def create(self, key: str, data: bytes) -> str | None:
        super().create(key, data)
        raise FileExistsError(key)


def test_a_write_that_is_answered_with_a_conflict_of_its_own_counts(clock: Clock) -> None:
    inner = memory_remote()
    claim = keeper(LostReply(inner._mirror, store=inner._store), "one", clock)
    assert claim.take() is Ownership.OURS
    assert claim.renew()


def test_a_waiting_run_leaves_nothing_behind(remote: RemoteObjects, clock: Clock) -> None:
    keeper(remote, "one", clock).take()
    waiting = keeper(remote, "two", clock)
    waiting.take()
    waiting.release()
    assert list(remote.list("")) == [CLAIM]
