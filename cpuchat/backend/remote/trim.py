"""Leaves out the oldest messages when a server rejects a prompt as too long."""

from __future__ import annotations

from collections.abc import Sequence

from cpuchat.protocol import ANSWER_SHARE, Message

_PER_MESSAGE = 16  # characters that a template adds, about


def without_oldest(
    messages: Sequence[Message], needed: int, n_ctx: int, in_steps: bool = True
) -> tuple[tuple[Message, ...], int] | None:
    """Return the messages without the oldest turns, and how many tokens that saves by their share of the characters.

    System messages and the last turn stay. None when nothing can be left out. An eighth of the context is left for the
    answer. Turns go in steps of a quarter of the context: if only the overflow went, the prompt of a full chat would
    begin differently with every turn, and nothing that the server has cached could be reused. Without `in_steps`, for a
    prompt that none continues, in steps of a sixteenth: the server may report too few tokens.

    Args:
        needed: tokens of the prompt with all of them.
    """
    starts = [number for number, message in enumerate(messages) if message.role == "user"]
    if len(starts) < 2:
        return None
    sizes = [len(message.content) + len(message.reasoning) + _PER_MESSAGE for message in messages]
    per_character = needed / sum(sizes)
    step = max(1, n_ctx // (4 if in_steps else 16))
    excess = needed - (n_ctx - n_ctx // ANSWER_SHARE)
    goal = needed - max(1, -(-excess // step)) * step
    for start in starts[1:]:
        kept = [n for n, message in enumerate(messages) if n >= start or message.role == "system"]
        tokens = round(per_character * sum(sizes[n] for n in kept))
        if tokens <= goal or start == starts[-1]:
            return tuple(messages[n] for n in kept), needed - tokens
    return None
