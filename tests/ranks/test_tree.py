"""Who hands words to whom: the shape of the tree, for any number of ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from checkfreq.ranks.tree import Tree

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
