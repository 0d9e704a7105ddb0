"""Root, inner node and leaf die, hang or are told to stop, before every call to the store.

Seven processes that only meet, in a tree of three levels: 0 over 1 and 4, each over two leaves.
Whatever happens to one, all others notice within the timeout and name it. Nobody waits for longer
than a rank's deadline, and the runs wait side by side.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from checkfreq.ranks.tree import Tree
from tests.patience import slowness
from tests.ranks.light import Came, Run, outcome

pytestmark = [pytest.mark.dist, pytest.mark.crash, pytest.mark.more]

WORLD = 7
#: What each calls the store for in a meeting, at least: its own word; from those with children, a
#: look for their words, these, and the joined one or the decision; from all but rank 0, a look for
#: the decision, and it.
CALLS = {0: 4, 1: 6, 4: 6, 3: 3, 6: 3}
PLACES = [(rank, call) for rank, calls in CALLS.items() for call in range(calls)]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Any, Future[dict[int, Came]]]]:
    """Every run of this file, begun."""
    folder, timeout_s = tmp_path_factory.mktemp("tree"), 6.0 * slowness()
    with ThreadPoolExecutor(12) as pool:

        def begin(*key: Any, **settings: Any) -> Future[dict[int, Came]]:
            victim, action, call = key[:3]
            name = "-".join(map(str, key)).replace(" ", "_")
            options = {"timeout_s": timeout_s, **settings}
            return pool.submit(outcome, Run(folder / name, victim, action, call, **options))

        begun = {
            (rank, action, call): begin(rank, action, call)
            for action in ("dies", "hangs", "is told to stop")
            for rank, call in PLACES
        }
        for action in ("dies", "hangs"):
            for call in (1, 3):
                key = (0, action, call, "with the store")
                begun[key] = begin(*key, keeps_store=True)  # type: ignore[index]
        for rank in (0, 1, 3):
            key = (rank, "is interrupted", 1, "no deadline")
            begun[key] = begin(*key, timeout_s=3600.0)  # type: ignore[index]
            key = (rank, "hangs", 0, "all told")
            begun[key] = begin(  # type: ignore[index]
                *key,
                timeout_s=3600.0,
                hurried_timeout_s=timeout_s,
                also={6: ("tells all to stop", 1)},
            )
        yield begun  # type: ignore[misc]


def test_the_tree_is_the_one_that_is_meant() -> None:
    tree = Tree(WORLD, fan_in=2)
    assert [tree.node(rank).heads for rank in (0, 1, 4)] == [[1, 4], [2, 3], [5, 6]]


@pytest.mark.parametrize("action", ["dies", "hangs"])
@pytest.mark.parametrize(("rank", "call"), PLACES)
def test_a_lost_rank_is_named_by_all_others_whatever_it_was_doing(
    rank: int, call: int, action: str, ended: dict[Any, Future[dict[int, Came]]]
) -> None:
    came = ended[rank, action, call].result()
    assert came.keys() == {*range(WORLD)} - {rank}
    for other in came.values():
        assert other.ranks == (rank,), other
        assert f"rank {rank} did not come" in other.error
        assert other.phase in ("step 2", "step 3")


@pytest.mark.parametrize("action", ["dies", "hangs"])
@pytest.mark.parametrize(("rank", "call"), PLACES)
def test_nobody_waits_for_a_lost_rank_at_every_level_anew(
    rank: int, call: int, action: str, ended: dict[Any, Future[dict[int, Came]]]
) -> None:
    for other in ended[rank, action, call].result().values():
        timeout_s = float(other.error.partition(" come within ")[2].partition(" s ")[0])
        assert other.waited_s < 1.9 * timeout_s


@pytest.mark.parametrize(("rank", "call"), PLACES)
def test_a_stop_signal_to_any_rank_stops_all_in_the_same_meeting(
    rank: int, call: int, ended: dict[Any, Future[dict[int, Came]]]
) -> None:
    came = ended[rank, "is told to stop", call].result()
    assert came.keys() == {*range(WORLD)}
    assert {other.stopped_in for other in came.values()} in ({2}, {3}), came


@pytest.mark.parametrize("call", [1, 3])
@pytest.mark.parametrize("action", ["dies", "hangs"])
def test_a_rank_0_that_is_lost_with_the_store_is_named(
    action: str, call: int, ended: dict[Any, Future[dict[int, Came]]]
) -> None:
    came = ended[0, action, call, "with the store"].result()
    assert came.keys() == {*range(1, WORLD)}
    for other in came.values():
        assert other.ranks == (0,), other


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_rank_that_is_interrupted_while_it_waits_tells_the_others_at_once(
    rank: int, ended: dict[Any, Future[dict[int, Came]]]
) -> None:
    came = ended[rank, "is interrupted", 1, "no deadline"].result()
    assert came.pop(rank).error == "interrupted"
    assert len(came) == WORLD - 1
    for other in came.values():
        assert other.ranks == (rank,), other
        assert f"rank {rank} left the run: KeyboardInterrupt" in other.error


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_stop_signal_cuts_waits_that_have_an_hour_left(
    rank: int, ended: dict[Any, Future[dict[int, Came]]]
) -> None:
    came = ended[rank, "hangs", 0, "all told"].result()
    assert came.keys() >= {*range(WORLD)} - {rank, 6}
    for other in came.values():
        assert other.ranks == (rank,), other
