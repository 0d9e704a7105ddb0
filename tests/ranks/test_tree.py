"""Who hands words to whom: the shape of the tree, for any number of ranks."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkfreq.ranks.tree import FAN_IN, Tree

WORLDS, FAN_INS = st.integers(1, 120), st.integers(2, 20)


def height(tree: Tree) -> int:
    """Of blocks of about equal size, a largest one has the greatest depth."""
    rank, levels = 0, 0
    while children := tree.node(rank).children:
        rank, levels = max(children, key=len).start, levels + 1
    return levels


@given(WORLDS, FAN_INS)
def test_every_rank_has_one_parent_and_no_rank_more_children_than_the_fan_in(
    world: int, fan_in: int
) -> None:
    tree = Tree(world, fan_in=fan_in)
    nodes = [tree.node(rank) for rank in range(world)]
    assert sorted(head for node in nodes for head in node.heads) == [*range(1, world)]
    assert all(len(node.children) <= fan_in for node in nodes)
    for rank, node in enumerate(nodes):
        assert [rank, *(r for block in node.children for r in block)] == [*node.block]
        assert [tree.node(head).block for head in node.heads] == [*node.children]


@given(WORLDS, FAN_INS)
def test_no_tree_of_that_fan_in_is_lower(world: int, fan_in: int) -> None:
    found = height(Tree(world, fan_in=fan_in))
    assert sum(fan_in**level for level in range(found + 1)) >= world
    assert sum(fan_in**level for level in range(found)) < world


@pytest.mark.parametrize("world", [17, 64, 256, 512, 1024, 4096, 10**5])
def test_rank_0_reads_about_as_many_words_of_thousands_of_ranks_as_of_a_few(world: int) -> None:
    tree = Tree(world)
    assert len(tree.node(0).heads) <= FAN_IN
    assert height(tree) <= math.ceil(math.log(world, FAN_IN))
