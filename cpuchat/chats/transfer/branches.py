"""Makes the branches of a chat from the nodes of another program's tree."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from cpuchat.chats.titles import title_of
from cpuchat.chats.transfer.portable import PortableChat, PortableMessage

_MOST_CHARACTERS = 100_000_000  # of a chat; branches repeat what they share of an answer
_PART_CHARACTERS = 50  # that a part counts for beside its own


@dataclass
class Node:
    """A node. `parent` is the key of the one before, None or a missing one for a root.

    `message` None: what follows it follows the message before it, as after the result of a tool.
    """

    parent: str | None
    message: PortableMessage | None
    created: float = 0.0


@dataclass
class _Turn:
    """One side's messages without a break, on one branch: `earlier`, then `message`. `id` None: not needed yet."""

    before: _Turn | None = None
    message: PortableMessage | None = None
    id: int | None = None
    earlier: _Turn | None = None


@dataclass
class _Branches:
    messages: list[PortableMessage] = field(default_factory=list)
    room: int = _MOST_CHARACTERS

    def add(self, turn: _Turn) -> int:
        """Return the number of the turn's message, which follows that of the turn before."""
        if turn.id is None:
            assert turn.before is not None and turn.before.id is not None
            turn.id = len(self.messages) + 1
            self.messages.append(msgspec.structs.replace(self._joined(turn), id=turn.id, parent=turn.before.id))
        return turn.id

    def _joined(self, turn: _Turn) -> PortableMessage:
        """Return the messages of a turn as one: each branch out of the middle of an answer has all before it."""
        parts: list[PortableMessage] = []
        last: _Turn | None = turn
        while last is not None:
            assert last.message is not None
            parts.append(last.message)
            self.room -= _PART_CHARACTERS + len(last.message.content) + len(last.message.reasoning)
            if self.room < 0:
                raise ValueError(f"its branches have more than {_MOST_CHARACTERS / 1e6:.0f} million characters")
            last = last.earlier
        parts.reverse()
        return (
            parts[0]
            if len(parts) == 1
            else msgspec.structs.replace(
                parts[-1],
                content=paragraphs(part.content for part in parts),
                reasoning=paragraphs(part.reasoning for part in parts),
                model=next((part.model for part in reversed(parts) if part.model), ""),
                created=parts[0].created,
            )
        )

    def follow(self, turn: _Turn, message: PortableMessage) -> _Turn:
        """Return the turn that `message` is in: an answer in several parts is one message."""
        if turn.message is not None and turn.message.role == message.role == "assistant":
            return _Turn(turn.before, message, earlier=turn)
        self.add(turn)
        return _Turn(turn, message)


def branches(nodes: Mapping[str, Node], current: str | None) -> tuple[list[PortableMessage], int | None]:
    """Return the messages of a tree, numbered, and the end of the branch with the node `current`, if it is one.

    Siblings are in the order of their times. Raises ValueError for more text than `_MOST_CHARACTERS`.
    """
    children: dict[str | None, list[str]] = {}
    for key, node in nodes.items():
        children.setdefault(node.parent if node.parent in nodes else None, []).append(key)
    for keys in children.values():
        keys.sort(key=lambda key: nodes[key].created)
    found = _Branches()
    ends: dict[str, _Turn] = {}
    left = [(key, _Turn(id=0)) for key in reversed(children.get(None, []))]
    while left:  # a circle is not reached from a root
        key, turn = left.pop()
        message = nodes[key].message
        ends[key] = turn = turn if message is None else found.follow(turn, message)
        below = children.get(key, [])
        if not below:
            found.add(turn)
        left += [(child, turn) for child in reversed(below)]
    leaf = ends[current].id if current in ends else None
    return found.messages, leaf or None


def imported_chat(
    messages: list[PortableMessage], leaf: int | None, *, title: str | None, created: float, updated: float,
    model: str = "", system_prompt: str = "",
) -> PortableChat:  # fmt: skip
    """Return the chat; its title is that of its first question unless given."""
    question = next((message.content for message in messages if message.role == "user"), "")
    return PortableChat(
        title=(title or "").strip() or title_of(question),
        created=created or updated,
        updated=updated or created,
        model=model or next((message.model for message in reversed(messages) if message.model), ""),
        system_prompt=system_prompt,
        leaf=leaf,
        messages=messages,
    )


def paragraphs(parts: Iterable[str]) -> str:
    return "\n\n".join(part.strip("\n") for part in parts if part.strip())
