"""The branches of a chat.

A message follows another one, its parent; messages with the same parent are siblings: alternative answers, or
edits of a question. Ids grow with time, so a message has a larger id than its parent, and the newest of a branch
is the end of one.
"""

from __future__ import annotations

from collections.abc import Iterable


class Tree:
    """The ids of a chat's messages; 0 is the beginning of the chat, from which the first one follows.

    A message whose parent is missing follows the last one before that. `leaf` is the end of the open branch.

    Args:
        rows: id and parent of each message, ids ascending.
        leaf: as stored; None, or one that does not exist: the newest message.
    """

    def __init__(self, rows: Iterable[tuple[int, object]] = (), leaf: object = None) -> None:
        self._parents: dict[int, int] = {}
        self._children: dict[int, list[int]] = {0: []}
        self.leaf: int = 0
        for id, parent in rows:
            if not isinstance(parent, int) or not 0 <= parent < id:
                parent = self.leaf
            while parent not in self._children:
                parent = max((known for known in self._parents if known < parent), default=0)
            self.add(id, parent)
        if isinstance(leaf, int) and leaf in self._parents:
            self.leaf = leaf

    def __contains__(self, id: int) -> bool:
        return id in self._parents

    def add(self, id: int, parent: int) -> None:
        """Add a message, which becomes the end of the open branch."""
        if id not in self._parents:
            self._parents[id] = parent
            self._children[id] = []
            self._children[parent].append(id)
        self.leaf = id

    def parent(self, id: int) -> int:
        """Return the message that this one follows; 0 at the beginning of the chat."""
        return self._parents[id]

    def path(self, id: int) -> list[int]:
        """Return the messages from the first one to this."""
        path: list[int] = []
        while id:
            path.append(id)
            id = self._parents[id]
        return path[::-1]

    def siblings(self, id: int) -> list[int]:
        """Return the messages with the same parent, oldest first, this one included."""
        return self._children[self._parents[id]] if id in self else [id]

    def children(self, id: int) -> list[int]:
        """Return the messages that follow this one directly, oldest first."""
        return list(self._children[id])

    def subtree(self, id: int) -> list[int]:
        """Return this message and all that follow from it; the last one is the newest. [] for an unknown one."""
        found = [id] if id in self else []
        for one in found:
            found += self._children[one]
        return sorted(found)

    def after_deletion(self, id: int) -> int:
        """Return where to go on when the branch from `id` is deleted: the end of the sibling beside it, else its
        parent; 0 when nothing is left.
        """
        siblings = self.siblings(id)
        at = siblings.index(id)
        beside = siblings[at - 1 : at] if at else siblings[1:2]
        return self.subtree(beside[0])[-1] if beside else self._parents[id]
