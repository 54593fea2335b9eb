"""Limits on what tools return, and on how often they are called."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

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
"""They are in every prompt. Those that come after are not offered."""
MOST_ROUNDS = 20
"""Answers with calls to one question."""
_MOST_REPEATS = 2
_LEAST_TOKENS = 1_000  # where there is room for them
_ROOM_SHARE = 2  # of a free context that is nearly full: the answer needs some of it, too
_SHORT = 1_000  # bytes
_LEAST_KEPT = 100  # characters: about as long as the note of what is missing
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
    free = _USUAL_TOKENS if free_tokens is None else free_tokens
    most = max(free // _CONTEXT_SHARE, min(_LEAST_TOKENS, free // _ROOM_SHARE))
    text = clean(text)
    kept = min(len(text), max(most * _LONGEST_TOKEN, _LEAST_KEPT))
    while True:
        shown = text if kept >= len(text) else _beginning_and_end(text, kept)
        if (n_bytes := len(shown.encode())) <= min(_SHORT, most):  # a token has one at least
            return shown, n_bytes // 3  # not worth asking
        counted = await count(shown)
        tokens = counted if counted is not None else round(len(shown) / _CHARACTERS_PER_TOKEN)
        if tokens <= most or kept <= _LEAST_KEPT:
            return shown, tokens
        kept = max(_LEAST_KEPT, min(int(0.95 * kept * most / tokens), kept - 100))


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
        self._last: list[tuple[tuple[str, str], str]] = []

    def reached(self, calls: Sequence[ToolCall], results: Sequence[ToolResult]) -> str:
        """Count an answer with calls. Returns why the next one must do without, in a few words; "": it may call."""
        self._rounds += 1
        before, self._last = self._last, [(_made(call), one.text) for call, one in zip(calls, results, strict=True)]
        if self._last == before or all(self._made[_made(call)] > _MOST_REPEATS for call in calls):
            return "it repeated a call"
        return f"it had called tools {MOST_ROUNDS} times" if self._rounds >= MOST_ROUNDS else ""

    def refusal(self, call: ToolCall) -> ToolResult | None:
        """Return what the model is told in place of a call that it repeats; None: the call may be made."""
        self._made[_made(call)] += 1
        if self._made[_made(call)] <= _MOST_REPEATS:
            return None
        return ToolResult(
            text=f"Not run: {call.name} was called {_MOST_REPEATS} times with these arguments. Use those results.",
            failed=True,
        )


def _made(call: ToolCall) -> tuple[str, str]:
    return call.name, json.dumps(call.arguments, sort_keys=True)


def timed_out(seconds: float) -> ToolResult:
    """Return what the model is told of a tool that took too long."""
    return ToolResult(text=f"The tool was stopped: no result after {seconds:.0f} s.", failed=True)
