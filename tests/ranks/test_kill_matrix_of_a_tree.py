"""SIGKILL of root, inner node and leaf at the points of a commit whose ranks make a tree.

Seven ranks meet in three levels: 0 over 1 and 4, each over two leaves. Each has a record of its
own, which the manifest names. See `kill_chains`.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from checkfreq.ranks.tree import Tree
from checkfreq.store import tree
from checkfreq.store.store import CheckpointStore
from tests.acceptance.ranks import run_well
from tests.ranks import tiny
from tests.ranks.kill_chains import Layout, kills_of, life_in, passes, run_chain

pytestmark = [pytest.mark.crash, pytest.mark.dist, pytest.mark.more]

LAYOUT = Layout(7, config={"tree_from_ranks": 2}, program=tiny.train_in_a_tree)
ROOT, INNER, LEAF = 0, 1, 3
#: And which of the points each passes: every one of those of a commit, a third of the others, since
#: `test_kill_matrix` tries all of them on two ranks.
VICTIMS = {
    "trainer of rank 0": slice(0, None, 3),
    "trainer of rank 1": slice(1, None, 3),
    "trainer of rank 3": slice(2, None, 3),
    "worker of rank 0": slice(None),
    "worker of rank 1": slice(1, None, 3),
    "worker of rank 3": slice(2, None, 3),
}


@pytest.fixture(scope="module")
def chains(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Future[None]]]:
    """Every chain, under way: they mostly wait."""
    reached = passes(tmp_path_factory.mktemp("passes") / "run", LAYOUT)
    with ThreadPoolExecutor(2) as pool:
        yield {
            victim: pool.submit(
                run_chain, tmp_path_factory.mktemp("chain"), kills_of(victim, reached)[some], LAYOUT
            )
            for victim, some in VICTIMS.items()
        }


def test_the_ranks_are_root_inner_node_and_leaf(tmp_path: Path) -> None:
    nodes = Tree(LAYOUT.world, fan_in=2)
    assert [nodes.node(rank).heads for rank in (ROOT, INNER, LEAF)] == [[1, 4], [2, 3], []]
    run_well(life_in(tmp_path, 0, LAYOUT, steps=2))
    root: Any = CheckpointStore(tmp_path / "chk").head(2)
    assert isinstance(root, tree.Tree)
    assert [*root.leaves] == [*range(LAYOUT.world)]


@pytest.mark.parametrize("victim", VICTIMS)
def test_a_kill_at_any_point_leaves_the_old_set_or_one_more_and_the_run_continues(
    victim: str, chains: dict[str, Future[None]]
) -> None:
    chains[victim].result()
