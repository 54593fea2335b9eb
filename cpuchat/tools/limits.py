"""Limits on what tools return, and on how often they are called."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Awaitable, Callable

from cpuchat.errors import UsageError
from cpuchat.text import clean
from cpuchat.tool_calls import ToolCall, ToolResult

Count = Callable[[str], Awaitable[int | None]]
"""Counts the tokens of a text; None: it cannot."""
CALL_SECONDS = 60.0
"""A call that takes longer is stopped, unless its server's `timeout` says otherwise."""
START_SECONDS = 30.0
"""The first start of a server may download it (npx, uvx)."""
LONGEST_MESSAGE = 4_000_000
MOST_BYTES = 64_000_000
MOST_MESSAGES = 10_000
"""A server that writes more bytes in one message, or more bytes or messages during a call, is ended."""
MOST_TOOLS = 128
"""They are in every prompt."""
MOST_ROUNDS = 20
"""Answers with calls to one question."""
_MOST_REPEATS = 2
_LEAST_TOKENS = 1_000
_USUAL_TOKENS = 8_000  # of a free context that is not known
_CONTEXT_SHARE = 4  # a result takes at most this fraction of the free context
_CHARACTERS_PER_TOKEN = 3.0  # where they cannot be counted
_LONGEST_TOKEN = 20  # characters; longer ones are spaces


async def shortened(text: str, free_tokens: int | None, count: Count) -> tuple[str, int]:
    """Return a tool's result so that it takes a part of the context only, and its tokens: its beginning and end, with a
    note between.

    Args:
        free_tokens: of the context; None: not known.
    """
    most = max(_LEAST_TOKENS, (_USUAL_TOKENS if free_tokens is None else free_tokens) // _CONTEXT_SHARE)
    text = clean(text)
    kept = min(len(text), most * _LONGEST_TOKEN)
    while True:
        shown = text if kept >= len(text) else _beginning_and_end(text, kept)
        if len(shown.encode()) <= _LEAST_TOKENS:
            return shown, len(shown) // 3  # not worth asking
        counted = await count(shown)
        tokens = counted if counted is not None else round(len(shown) / _CHARACTERS_PER_TOKEN)
        if tokens <= most or kept <= _LEAST_TOKENS:
            return shown, tokens
        kept = max(_LEAST_TOKENS, min(int(0.95 * kept * most / tokens), kept - 100))


def _beginning_and_end(text: str, n_characters: int) -> str:
    tail = n_characters // 4
    head = n_characters - tail
    left_out = len(text) - n_characters
    return f"{text[:head]}\n[… {left_out:,} of {len(text):,} characters left out …]\n{text[-tail:]}"


class CallLimits:
    """Counts the calls of the answers to one question."""

    def __init__(self) -> None:
        self._rounds = 0
        self._made: Counter[tuple[str, str]] = Counter()

    def next_round(self) -> None:
        """Count one more answer with calls. Raises UsageError when there are too many."""
        self._rounds += 1
        if self._rounds > MOST_ROUNDS:
            raise UsageError(f"The model called tools {MOST_ROUNDS} times without an answer.", "Ask it to go on.")

    def refusal(self, call: ToolCall) -> ToolResult | None:
        """Return what the model is told in place of a call that it repeats; None: the call may be made."""
        made = call.name, json.dumps(call.arguments, sort_keys=True)
        self._made[made] += 1
        if self._made[made] <= _MOST_REPEATS:
            return None
        return ToolResult(
            text=f"Not run: {call.name} was called {_MOST_REPEATS} times with these arguments. Use those results.",
            failed=True,
        )


def timed_out(seconds: float) -> ToolResult:
    """Return what the model is told of a tool that took too long."""
    return ToolResult(text=f"The tool was stopped: no result after {seconds:.0f} s.", failed=True)
