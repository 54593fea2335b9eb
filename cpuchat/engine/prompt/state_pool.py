"""KV caches of several conversations in memory, for requests that do not name theirs.

Programs send a whole conversation with every request, several of them in turn. What a request continues is found by its
text and its tokens: nothing has to be named, edited and forked conversations included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from cpuchat.engine.llama.sequence import Sequence
from cpuchat.engine.prompt.token_history import TokenHistory
from cpuchat.hardware.memory import available_bytes
from cpuchat.prefix import common_prefix

_LEAST_TOKENS: Final = 32
"""Tokens from which on keeping or loading a state is worth it."""
_MOST_STATES: Final = 64
"""Each one is compared with every prompt."""
_KEEP_SHARE: Final = 16
"""A state is kept if at least one part in so many would be lost: copying a token costs about 10 µs, evaluating it again
some milliseconds."""


@dataclass(frozen=True)
class _Kept:
    owner: str
    history: TokenHistory
    tokens: list[int]
    state: np.ndarray


class StatePool:
    """States of one model, together at most `limit` bytes; the least recently used go first. Only those of the owner of
    the running request are compared with its prompt.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._owner = ""
        self._kept: list[_Kept] = []  # the least recently used first

    @property
    def n_bytes(self) -> int:
        """Return the size of all states."""
        return sum(kept.state.size for kept in self._kept)

    @property
    def histories(self) -> tuple[TokenHistory, ...]:
        """Return the texts with known tokens."""
        return tuple(kept.history for kept in self._own)

    @property
    def _own(self) -> list[_Kept]:
        return [kept for kept in self._kept if kept.owner == self._owner]

    def change_owner(self, sequence: Sequence, history: TokenHistory, owner: str) -> None:
        """Keep the sequence for its owner before another one's prompt."""
        if len(sequence) >= _LEAST_TOKENS:
            self._keep(sequence, history, spared=None)
        self._owner = owner

    def exchange(self, sequence: Sequence, history: TokenHistory, text: bytes, prompt: list[int]) -> TokenHistory:
        """Keep what `prompt` would drop from the sequence, and load the state that holds most of the prompt if it holds
        more than the sequence does.

        Args:
            history: of the conversation in the sequence.
            text: the rendered prompt, whose tokens are `prompt`.

        Returns:
            The history that knows most of `text`.
        """
        known = max((history, *self.histories), key=lambda one: one.shared(text))
        held = _usable(sequence.tokens, prompt, sequence)
        best = max(self._own, key=lambda kept: _usable(kept.tokens, prompt, sequence), default=None)
        if best is not None and _usable(best.tokens, prompt, sequence) < held + _LEAST_TOKENS:
            best = None
        lost = len(sequence) - (held if best is None else 0)
        if lost >= _LEAST_TOKENS and lost * _KEEP_SHARE >= len(sequence):
            self._keep(sequence, history, spared=best)
        if best is not None:
            self._kept = [kept for kept in self._kept if kept is not best]
            if sequence.set_state(best.tokens, best.state):
                self._kept.append(best)
        return known if known is history else known.copy()

    def _keep(self, sequence: Sequence, history: TokenHistory, spared: _Kept | None) -> None:
        """Copy the sequence unless it is held already; what it extends is dropped, but never `spared`."""
        tokens = sequence.tokens
        for kept in self._own:
            common = common_prefix(kept.tokens, tokens)
            if common == len(tokens) and (common == len(kept.tokens) or sequence.can_roll_back):
                return
        size = sequence.state_size()
        if size > self._limit:
            return
        if sequence.can_roll_back:
            self._kept = [
                kept
                for kept in self._kept
                if kept is spared or kept.owner != self._owner or common_prefix(kept.tokens, tokens) < len(kept.tokens)
            ]
        while len(self._kept) >= _MOST_STATES or self.n_bytes + size > self._limit or size > available_bytes() // 2:
            oldest = next((kept for kept in self._kept if kept is not spared), None)
            if oldest is None:
                return
            self._kept = [kept for kept in self._kept if kept is not oldest]
        self._kept.append(_Kept(self._owner, history.copy(), list(tokens), sequence.state()))


def _usable(tokens: list[int], prompt: list[int], sequence: Sequence) -> int:
    """Return how many tokens of `prompt` a state of `tokens` spares; one that cannot roll back is used whole."""
    common = common_prefix(tokens, prompt)
    return common if sequence.can_roll_back or common == len(tokens) else 0
