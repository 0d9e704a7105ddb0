"""Ranks meet over a store: here threads of one process, with a store in its memory."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from checkfreq.errors import CheckFreqError, ConfigError, PersistError, RankError
from checkfreq.ranks.meetings import Meetings, ranks_of_process
from checkfreq.ranks.merging import Merge, said_by_each
from checkfreq.ranks.rendezvous import agree_on_token
from checkfreq.ranks.tree import FAN_IN, Tree

Act = Callable[[Meetings], Any]


def on_ranks(
    *acts: Act, timeout_s: float = 10.0, store: Any = None, fan_in: int = FAN_IN
) -> list[Any]:
    """What each rank's function returned or raised."""
    store = dist.HashStore() if store is None else store

    def run(rank: int) -> Any:
        meetings = Meetings(store, rank=rank, world=len(acts), timeout_s=timeout_s, fan_in=fan_in)
        try:
            return acts[rank](meetings)
        except CheckFreqError as error:
            return error

    with ThreadPoolExecutor(len(acts)) as pool:
        return list(pool.map(run, range(len(acts))))


def say(words: Any, phase: str = "step", merge: Merge = said_by_each) -> Act:
    return lambda meetings: meetings.meet(phase, words, merge=merge)


@pytest.mark.parametrize("world", [2, 16])
def test_words_that_are_joined_on_the_way_arrive_as_if_rank_0_heard_each(world: int) -> None:
    def act(meetings: Meetings) -> Any:
        return [meetings.meet("m", [meetings.rank, n], merge=said_by_each) for n in range(3)]

    heard = on_ranks(*[act] * world, fan_in=2)
    assert heard == [[[[rank, n] for rank in range(world)] for n in range(3)]] * world


def test_old_words_are_removed_from_the_store() -> None:
    store = dist.HashStore()

    def act(meetings: Meetings) -> None:
        for n in range(10):
            meetings.meet("m", n, merge=said_by_each)

    on_ranks(*[act] * 7, store=store, fan_in=2)
    assert store.num_keys() <= 2 * (7 + 3)


@pytest.mark.parametrize("gone", [{0}, {6}, {1, 2, 3}, {0, 1, 7, 8}])
def test_whoever_does_not_come_is_named_on_all_others_wherever_it_is_in_the_tree(
    gone: set[int],
) -> None:
    """Whose parent hears first that a rank is gone tells it to all, and leaves."""

    def act(meetings: Meetings) -> None:
        if meetings.rank in gone:
            return
        if meetings.rank == 0 and gone.isdisjoint(Tree(9, fan_in=2).node(0).heads):
            meetings.timeout_s = 60.0
        try:
            meetings.meet("step", None, merge=said_by_each)
        except RankError:
            meetings.leave("an error")
            raise

    for rank, error in enumerate(on_ranks(*[act] * 9, timeout_s=0.5, fan_in=2)):
        if rank not in gone:
            assert isinstance(error, RankError)
            assert (set(error.ranks), error.phase) == (gone, "step")
            assert len(gone) > 1 or "did not come within 0.5 s" in str(error)


class Died(BaseException):
    """A rank is no more."""


class Dying:
    """A store whose user dies before its ``calls``-th call, once it is armed."""

    def __init__(self, store: Any, calls: int) -> None:
        self._store, self._left, self.is_armed = store, calls, False

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def call(*args: Any) -> Any:
            self._left -= self.is_armed
            if self._left < 0:
                raise Died
            return method(*args)

        return method if name == "has_extended_api" else call


#: What each calls the store for in a meeting, at least: its own word; from those with children, a
#: look for their words, these, and the joined one or the decision; from all but rank 0, a look for
#: the decision, and it.
CALLS = {0: 4, 1: 6, 3: 3}
PLACES = [(rank, call) for rank, calls in CALLS.items() for call in range(calls)]


def lost(place: tuple[int, int]) -> list[Any]:
    """How a loop of meetings ends for each of seven ranks of which one dies at that place."""
    victim, calls = place
    store = dist.HashStore()

    def run(rank: int) -> Any:
        own = Dying(store, calls if rank == victim else 10**6)
        meetings = Meetings(own, rank=rank, world=7, timeout_s=2.0, fan_in=2)
        meetings.meet("step 1", None, merge=said_by_each)
        own.is_armed = True
        try:
            for step in range(2, 10):
                meetings.meet(f"step {step}", None, merge=said_by_each)
        except (Died, RankError) as ended:
            return ended

    with ThreadPoolExecutor(7) as pool:
        return list(pool.map(run, range(7)))


def test_root_inner_node_or_leaf_that_dies_before_any_call_is_named_by_all_others() -> None:
    with ThreadPoolExecutor(len(PLACES)) as pool:
        for (victim, _), ends in zip(PLACES, pool.map(lost, PLACES), strict=True):
            assert isinstance(ends.pop(victim), Died)
            for error in ends:
                assert isinstance(error, RankError)
                assert (error.ranks, error.phase) in [((victim,), "step 2"), ((victim,), "step 3")]


def test_a_rank_that_was_told_to_stop_waits_for_no_lost_one_for_long() -> None:
    meetings = Meetings(dist.HashStore(), rank=0, world=2, timeout_s=3600.0, hurried_timeout_s=0.2)
    meetings.is_hurried = lambda: True
    with pytest.raises(RankError, match="rank 1 did not come within 0.2 s"):
        meetings.meet("step", None, merge=said_by_each)


def test_a_rank_far_down_in_a_different_call_is_told_so() -> None:
    acts = [say(1, "save at step 3" if rank in (5, 6, 8) else "step 4") for rank in range(9)]
    for error in on_ranks(*acts, fan_in=2):
        assert isinstance(error, RankError)
        assert error.ranks == (5, 6, 8)
        assert "rank 0 is in step 4, ranks 5, 6, 8 are in save at step 3" in str(error)


def test_a_rank_that_leaves_ends_the_next_meeting_at_once_with_its_reason() -> None:
    def leaves(meetings: Meetings) -> None:
        meetings.meet("step", None, merge=said_by_each)
        meetings.leave("ValueError: nan loss")

    def stays(meetings: Meetings) -> None:
        for _ in range(2):
            meetings.meet("step", None, merge=said_by_each)

    for leaver in range(7):
        acts = [leaves if rank == leaver else stays for rank in range(7)]
        for rank, error in enumerate(on_ranks(*acts, fan_in=2)):
            if rank != leaver:
                assert isinstance(error, RankError)
                assert error.ranks == (leaver,)
                assert f"rank {leaver} left the run: ValueError: nan loss" in str(error)


def test_a_rank_that_is_interrupted_while_it_waits_says_so_at_once_to_the_others() -> None:
    store = dist.HashStore()
    first, second = (Meetings(store, rank=r, world=2, timeout_s=3600.0) for r in range(2))

    def interrupt() -> None:
        store.wait(["1/0"])  # rank 0 has come
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    # A shell starts background jobs with SIGINT ignored.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(interrupt)
            with pytest.raises(KeyboardInterrupt):
                first.meet("step", None, merge=said_by_each)
    finally:
        signal.signal(signal.SIGINT, previous)
    first.leave("KeyboardInterrupt")
    with pytest.raises(RankError, match="left the run: KeyboardInterrupt"):
        second.meet("step", None, merge=said_by_each)
    first.close()
    second.close()


def test_a_rank_half_way_up_that_is_interrupted_leaves_no_one_waiting() -> None:
    def join(words: Any) -> Any:
        raise KeyboardInterrupt

    def half_way(meetings: Meetings) -> None:
        try:
            meetings.meet("step", 1, merge=Merge(lambda r, said: said, join, sum))
        except KeyboardInterrupt:
            meetings.leave("KeyboardInterrupt")

    def act(meetings: Meetings) -> Any:
        return half_way(meetings) if meetings.rank == 4 else say(1)(meetings)

    assert Tree(7, fan_in=2).node(4).heads == [5, 6]
    for rank, error in enumerate(on_ranks(*[act] * 7, timeout_s=3600.0, fan_in=2)):
        if rank != 4:
            assert isinstance(error, RankError)
            assert "rank 4 left the run: KeyboardInterrupt" in str(error)


def test_what_fails_on_one_rank_is_an_error_on_all_and_its_own_there() -> None:
    def act(meetings: Meetings) -> Any:
        def work() -> int:
            if meetings.rank == 1:
                raise PersistError("disk full", step=3, phase="write")
            return meetings.rank

        return meetings.act("wait()", work)

    first, second, third = on_ranks(act, act, act)
    assert type(second) is PersistError
    assert second.phase == "write"
    for error in (first, third):
        assert isinstance(error, RankError)
        assert error.ranks == (1,)
        assert str(error) == "wait() failed on rank 1: PersistError: disk full"


def test_until_names_the_ranks_that_wait_in_vain() -> None:
    def act(meetings: Meetings) -> None:
        meetings.until(
            "wait()", lambda s: meetings.rank != 1, left_s=lambda waited_s: 0.0, what="a slot"
        )

    for error in on_ranks(act, act):
        assert isinstance(error, RankError)
        assert error.ranks == (1,)
        assert "rank 1 waited 0 s for a slot in vain" in str(error)


def test_closing_waits_for_the_others_to_hear_the_last_decision() -> None:
    heard = []

    def first(meetings: Meetings) -> None:
        meetings.meet("close()", None, merge=said_by_each)
        meetings.close()
        heard.append(0)

    def second(meetings: Meetings) -> None:
        meetings.meet("close()", None, merge=said_by_each)
        heard.append(1)
        meetings.close()

    on_ranks(first, second)
    assert heard == [1, 0]


def test_a_process_launched_as_one_of_several_must_be_connected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ConfigError, match="WORLD_SIZE=4.*init_process_group"):
        ranks_of_process()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert ranks_of_process() == (0, 1)


def rendezvous(store: Any, world: int, *, timeout_s: float = 10.0) -> list[Any]:
    def run(rank: int) -> Any:
        try:
            return agree_on_token(store, rank=rank, world=world, timeout_s=timeout_s)
        except RankError as error:
            return error

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(run, range(world)))


def test_words_of_an_earlier_life_in_the_same_store_are_not_taken_for_this_ones() -> None:
    store = dist.HashStore()
    earlier = {rendezvous(store, 3)[0] for _ in range(5)}
    tokens = rendezvous(store, 4)  # one rank more than in those lives
    assert len(set(tokens)) == 1
    assert tokens[0] not in earlier


def test_a_member_does_not_follow_an_earlier_lifes_token_while_rank_0_is_late() -> None:
    store = dist.HashStore()
    rendezvous(store, 2)
    with pytest.raises(RankError, match="rank 1 waited .* did not come within 0.1 s") as caught:
        agree_on_token(store, rank=1, world=2, timeout_s=0.1)
    assert caught.value.ranks == (0,)
