"""Leaves out the oldest messages when a server rejects a prompt as too long."""

from __future__ import annotations

from collections.abc import Sequence

from cpuchat.protocol import Message

_GOAL = 0.75
"""Share of the context that the prompt may have after trimming: the next turns fit, and reuse what is cached."""
_PER_MESSAGE = 16  # characters that a template adds, about


def without_oldest(messages: Sequence[Message], needed: int, n_ctx: int) -> tuple[tuple[Message, ...], int] | None:
    """Return the messages without the oldest turns, and how many tokens that saves by their share of the characters.

    System messages and the last turn stay. None when nothing can be left out.

    Args:
        needed: tokens of the prompt with all of them.
    """
    starts = [number for number, message in enumerate(messages) if message.role == "user"]
    if len(starts) < 2:
        return None
    sizes = [len(message.content) + len(message.reasoning) + _PER_MESSAGE for message in messages]
    per_character = needed / sum(sizes)
    for start in starts[1:]:
        kept = [n for n, message in enumerate(messages) if n >= start or message.role == "system"]
        tokens = round(per_character * sum(sizes[n] for n in kept))
        if tokens <= _GOAL * n_ctx or start == starts[-1]:
            return tuple(messages[n] for n in kept), needed - tokens
    return None
