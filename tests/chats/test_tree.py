"""Tests the tree of a chat's messages."""

from __future__ import annotations

import pytest

from cpuchat.chats.records import Tree


def test_the_newest_message_ends_the_open_branch_unless_another_does() -> None:
    rows = [(1, 0), (2, 1), (3, 2), (4, 1), (5, 4)]
    tree = Tree(rows)
    assert (tree.leaf, tree.path(tree.leaf)) == (5, [1, 4, 5])
    assert Tree(rows, leaf=3).path(3) == [1, 2, 3]
    assert Tree(rows, leaf=99).leaf == 5 and Tree().leaf == 0
    assert tree.siblings(4) == [2, 4] and tree.siblings(5) == [5]
    assert tree.subtree(1) == [1, 2, 3, 4, 5] and tree.subtree(2) == [2, 3]
    assert tree.after_deletion(2) == 5 and tree.after_deletion(4) == 3
    assert tree.after_deletion(5) == 4 and tree.after_deletion(1) == 0


@pytest.mark.parametrize("parent", [None, "x", 1.5, -1, 3, 99, b"\xff"])
def test_a_message_without_a_sound_parent_follows_the_one_before(parent: object) -> None:
    tree = Tree([(1, 0), (2, 1), (3, parent), (7, 5), (8, 5)])
    assert tree.path(3) == [1, 2, 3]
    assert tree.siblings(7) == [7, 8]  # what both followed is lost; they are still two answers to it
    assert tree.path(7) == [1, 2, 3, 7]
