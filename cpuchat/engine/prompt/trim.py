"""Trimming a conversation to fit the context."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

import msgspec

from cpuchat.errors import ContextFull
from cpuchat.protocol import Message


class TrimResult(msgspec.Struct, frozen=True):
    """The remaining messages, and how much was dropped (in tokens of the rendered prompt)."""

    messages: list[Message]
    dropped_messages: int
    dropped_tokens: int


def trim_messages(
    count: Callable[[list[Message]], int],
    messages: Sequence[Message],
    budget: int,
    in_steps: bool = True,
    limit: int | None = None,
) -> TrimResult:
    """Drop the oldest turns until the prompt fits.

    System messages stay; the first other message that stays is the user's. At least the last user message and what
    follows it stay.

    Turns are dropped in steps of a quarter of the budget: if only the overflow was dropped, the beginning of the prompt
    of a full chat would change with every turn, and nothing of the KV cache could be reused. Without `in_steps` only
    the overflow is, for a prompt that none continues.

    Args:
        count: returns the tokens of a prompt with these messages; called about log2(turns) + 2 times.
        budget: tokens that the prompt may have: the context less the room for the answer.
        limit: tokens that what must stay may have, which leaves less room; None: `budget`.

    Raises:
        ContextFull: what must stay is longer than `limit`; the message holds the arithmetic.
    """
    everything = list(messages)
    total = count(everything)
    if total <= budget:
        return TrimResult(everything, 0, 0)
    starts = [i for i, m in enumerate(everything) if m.role == "user"]
    step = max(1, budget // 4) if in_steps else 1
    goal = total - -(-(total - budget) // step) * step
    # The oldest start that reaches the goal; a long last turn misses it but may still fit.
    oldest = bisect_left(
        starts, True, 1, max(len(starts) - 1, 1), key=lambda start: count(_kept_from(everything, start)) <= goal
    )
    kept = _kept_from(everything, starts[min(oldest, len(starts) - 1)]) if starts else everything
    size = count(kept)
    limit = budget if limit is None else limit
    if size > limit:
        raise _too_long(count, everything, size, limit)
    return TrimResult(kept, len(everything) - len(kept), total - size)


def require_room_for_last(count: Callable[[list[Message]], int], messages: Sequence[Message], budget: int) -> None:
    """Raise ContextFull if what `trim_messages` leaves at least is longer than `budget`."""
    last = max((i for i, m in enumerate(messages) if m.role == "user"), default=0)
    kept = _kept_from(messages, last)
    if (size := count(kept)) > budget:
        raise _too_long(count, kept, size, budget)


def _kept_from(messages: Sequence[Message], start: int) -> list[Message]:
    """Return the system messages, and all from `start` on."""
    return [m for i, m in enumerate(messages) if i >= start or m.role == "system"]


def _too_long(count: Callable[[list[Message]], int], messages: list[Message], needed: int, budget: int) -> ContextFull:
    system = [m for m in messages if m.role == "system"]
    last = [m for m in messages if m.role != "system"][-1:]
    alone = count(last) if system and last and last[0].role == "user" else needed
    share = f" ({needed - alone:,} of them for the system prompt)" if alone < needed else ""
    return ContextFull(
        f"The last message needs {needed:,} tokens{share}, but the context has room for {max(0, budget):,}.",
        "Shorten it.",
        alone=True,
    )
