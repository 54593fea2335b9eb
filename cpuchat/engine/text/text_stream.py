"""From tokens to the events that carry their text."""

from __future__ import annotations

import codecs
from collections.abc import Callable

from cpuchat.engine.text.call_splitter import CallSplitter
from cpuchat.engine.text.reasoning import ReasoningSplitter, Unsplit
from cpuchat.engine.text.stops import StopMatcher
from cpuchat.protocol import FRAME_SECONDS, Channel, Event, TextDelta


class TextStream:
    """The text of one answer: tokens in, `TextDelta` events out, at most one frame per `frame_seconds`.

    Stop strings count in the answer only, not in reasoning. A UTF-8 sequence that continues in the next token waits for
    it; invalid UTF-8 becomes U+FFFD.

    Args:
        piece_of: returns the bytes of one token.
        arrived: `perf_counter()` when the request arrived, the zero of `at_ms`.
        frame_seconds: shortest time between two events; the first text does not wait.
    """

    def __init__(
        self,
        request_id: int,
        emit: Callable[[Event], None],
        piece_of: Callable[[int], bytes],
        splitter: ReasoningSplitter | Unsplit | CallSplitter,
        stops: tuple[str, ...],
        arrived: float,
        frame_seconds: float = FRAME_SECONDS,
    ) -> None:
        self.frame_seconds = frame_seconds
        self._request_id = request_id
        self._emit = emit
        self._piece_of = piece_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._decode = self._decoder.decode
        self._split = splitter.feed
        self._splitter = splitter
        self._matcher = StopMatcher(stops) if stops else None
        self._arrived = arrived
        self._spans: list[tuple[Channel, str, str, tuple[int, ...]]] = []
        # channel, drafter, text, length of each token's part; without the open one
        self._channel: Channel = "answer"
        self._drafter = ""
        self._parts: list[str] = []
        self._lengths: list[int] = []  # of the tokens that `_parts` came from
        self._n_held = 0  # tokens whose text is held back
        self._n_emitted = 0
        self._next_frame = 0.0

    @property
    def has_emitted(self) -> bool:
        """Something was emitted."""
        return self._n_emitted > 0

    def feed(self, token: int, now: float, drafter: str = "") -> bool:
        """Add one token generated at `now`; returns True when a stop string is complete.

        `drafter` proposed it, "" = none. Text that only later tokens complete is attributed to them.
        """
        hit = self._take(token, drafter)
        if now >= self._next_frame:
            self.flush(now)
        return hit

    def feed_all(self, runs: list[tuple[str, list[int]]], now: float) -> None:
        """Add runs of (drafter, tokens), the last token generated at `now`, and emit their text."""
        for drafter, tokens in runs:
            for token in tokens:
                self._take(token, drafter)
        self.flush(now)

    def _take(self, token: int, drafter: str) -> bool:
        if drafter != self._drafter:
            self._close_span()
            self._drafter = drafter
        self._n_held += 1
        text = self._decode(self._piece_of(token))
        return bool(text) and self._add(self._split(text))

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
        if self._n_held:
            self._lengths += [0] * (self._n_held - 1)
            self._lengths.append(len(text))
            self._n_held = 0
        elif self._lengths:
            self._lengths[-1] += len(text)

    def _close_span(self) -> None:
        if self._parts:
            self._spans.append((self._channel, self._drafter, "".join(self._parts), tuple(self._lengths)))
            self._parts.clear()
            self._lengths.clear()

    def flush(self, now: float) -> None:
        """Emit the text that is complete."""
        self._close_span()
        if not self._spans:
            return
        at_ms = 1e3 * (now - self._arrived)
        for channel, drafter, text, lengths in self._spans:
            self._n_emitted += len(lengths)
            self._emit(
                TextDelta(
                    request_id=self._request_id,
                    text=text,
                    channel=channel,
                    n_tokens=len(lengths),
                    lengths=lengths,
                    predicted_n=self._n_emitted,
                    at_ms=at_ms,
                    drafter=drafter,
                )
            )
        self._spans.clear()
        self._next_frame = now + self.frame_seconds

    def finish(self, now: float, *, stopped: bool) -> None:
        """Emit the rest. After a stop string (`stopped`) what was held back is not part of the text."""
        if not stopped:
            rest = self._decode(b"", final=True)
            pieces = [*(self._split(rest) if rest else ()), *self._splitter.flush()]
            if not self._add(pieces) and self._matcher is not None and (held := self._matcher.flush()):
                self._append("answer", held)
        if self._n_held:  # tokens without text are counted too
            self._append(self._channel, "")
        self.flush(now)
