"""From tokens to the events that carry their text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from cpuchat.engine.text.detokenizer import Detokenizer
from cpuchat.engine.text.reasoning import ReasoningSplitter
from cpuchat.engine.text.stops import StopMatcher
from cpuchat.protocol import Channel, Event, TextDelta

FRAME_SECONDS: Final = 0.08
"""Shortest time between two events of one answer; the first token's text does not wait."""


class TextStream:
    """Text of one answer: tokens in, `TextDelta` events out, at most one frame per `FRAME_SECONDS`.

    Stop strings count in the answer only, not in reasoning.

    Args:
        arrived: `perf_counter()` when the request came, the zero of `at_ms`.
    """

    def __init__(
        self,
        request_id: int,
        emit: Callable[[Event], None],
        detokenizer: Detokenizer,
        splitter: ReasoningSplitter,
        stops: tuple[str, ...],
        arrived: float,
    ) -> None:
        self._request_id = request_id
        self._emit = emit
        self._detokenize = detokenizer.feed
        self._detokenizer = detokenizer
        self._split = splitter.feed
        self._splitter = splitter
        self._matcher = StopMatcher(stops) if stops else None
        self._arrived = arrived
        self._done: list[tuple[Channel, str, str, int]] = []  # spans before the current one: who, text, tokens
        self._channel: Channel = "answer"
        self._drafter = ""
        self._parts: list[str] = []
        self._n_parts = 0  # tokens that `_parts` came from
        self._unsaid = 0  # tokens whose text is held back
        self._n_said = 0
        self._next_frame = 0.0

    @property
    def has_spoken(self) -> bool:
        """Something was emitted."""
        return self._n_said > 0

    def feed(self, token: int, now: float, drafter: str = "") -> bool:
        """Take one token written at `now`; True when a stop string is complete.

        `drafter`: who proposed it, "" for nobody. Text that only later tokens complete is theirs.
        """
        if drafter != self._drafter:
            self._close_span()
            self._drafter = drafter
        self._unsaid += 1
        text = self._detokenize(token)
        hit = bool(text) and self._add(self._split(text))
        if now >= self._next_frame:
            self.flush(now)
        return hit

    def feed_all(self, runs: list[tuple[str, list[int]]], now: float) -> None:
        """Take runs of (drafter, tokens), the last token written at `now`, and emit their text.

        Stop strings are not looked for.
        """
        for drafter, tokens in runs:
            if drafter != self._drafter:
                self._close_span()
                self._drafter = drafter
            for token in tokens:
                self._unsaid += 1
                if text := self._detokenize(token):
                    self._add(self._split(text))
        self.flush(now)

    def _add(self, pieces: list[tuple[Channel, str]]) -> bool:
        matcher = self._matcher
        for channel, text in pieces:
            hit = False
            if matcher is not None and channel == "answer":
                text, hit = matcher.feed(text)
            if text:
                self._append(channel, text)
            if hit:
                return True
        return False

    def _append(self, channel: Channel, text: str) -> None:
        if channel != self._channel:
            self._close_span()
            self._channel = channel
        self._parts.append(text)
        self._n_parts += self._unsaid
        self._unsaid = 0

    def _close_span(self) -> None:
        if self._parts:
            self._done.append((self._channel, self._drafter, "".join(self._parts), self._n_parts))
            self._parts.clear()
            self._n_parts = 0

    def flush(self, now: float) -> None:
        """Emit what can be said."""
        self._close_span()
        if not self._done:
            return
        at_ms = 1e3 * (now - self._arrived)
        for channel, drafter, text, n in self._done:
            self._n_said += n
            self._emit(
                TextDelta(
                    request_id=self._request_id,
                    text=text,
                    channel=channel,
                    n_tokens=n,
                    predicted_n=self._n_said,
                    at_ms=at_ms,
                    drafter=drafter,
                )
            )
        self._done.clear()
        self._next_frame = now + FRAME_SECONDS

    def finish(self, now: float, *, stopped: bool) -> None:
        """Emit all that is left. After a stop string (`stopped`) nothing that was held back is part of the text."""
        if not stopped:
            rest = self._detokenizer.flush()
            pieces = [*(self._split(rest) if rest else ()), *self._splitter.flush()]
            if not self._add(pieces) and self._matcher is not None and (held := self._matcher.flush()):
                self._append("answer", held)
        if self._unsaid:  # tokens without text of their own are counted all the same
            self._append(self._channel, "")
        self.flush(now)
