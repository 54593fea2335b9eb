"""Adds up what a server tells of one answer, and makes the events and timings of it that a worker would send."""

from __future__ import annotations

from collections import deque

from cpuchat.backend.remote.chunk import Chunk, Told
from cpuchat.protocol import AnyEvent, Channel, PrefillProgress, SpeculationUpdate, TextDelta
from cpuchat.timings import SpeculationFigures, Timings

_UPDATE_SECONDS = 0.25
_RECENT_PASSES = 32
_MOST_TOKENS = 1 << 31


class Tally:
    """The figures of one answer.

    Times are the server's where it tells them: what the way here costs is not booked as slow decoding. Tokens that it
    does not count are counted by the parts that it sends, which may hold several: then `approximate`.

    Args:
        started: when the request arrived at the backend, monotonic seconds.
        n_ctx: of the model, 0 = not known.
        round_trip: what the network takes to the server and back, in seconds.
    """

    def __init__(self, request_id: int, started: float, n_ctx: int, round_trip: float | None) -> None:
        self.text_size = 0
        self.lies = 0
        self.id = ""
        """The server's name for the answer."""
        self.finish = ""
        self._request_id, self._started, self._n_ctx, self._round_trip = request_id, started, n_ctx, round_trip
        self._told = Told()
        self._speculation_told: SpeculationFigures | None = None
        self._parts = 0  # with text
        self._counted = 0  # tokens in the deltas so far
        self._first_at: float | None = None
        self._newest_at = 0.0
        self._first_ms: float | None = None  # predicted_ms of the first text
        self._first_n = 1
        self._at_ms = 0.0
        self._pending: dict[Channel, str] = {}
        self._prefilled = False
        self._updated = float("-inf")
        self._recent: deque[tuple[int, int, int]] = deque(maxlen=_RECENT_PASSES)

    @property
    def has_text(self) -> bool:
        """Return whether text waits to be sent."""
        return bool(self._pending)

    @property
    def predicted_n(self) -> int:
        """Return the tokens written so far."""
        told = self._told.predicted_n
        return self._parts if told is None else told

    def add(self, chunk: Chunk, now: float) -> list[AnyEvent]:
        """Take in one part; returns the events that do not wait: progress of the prompt."""
        self.lies += chunk.lies
        self.id = self.id or chunk.id
        self.finish = chunk.finish or self.finish
        found: list[AnyEvent] = []
        self._check(chunk.told)
        self._told.update(chunk.told)
        if chunk.progress is not None and self._first_at is None:
            processed, total, cached = chunk.progress
            found.append(self._progress(processed, total, cached))
        if chunk.content or chunk.reasoning:
            self._parts += 1
            self._newest_at = now
            if self._first_at is None:
                self._first_at, self._first_ms = now, self._told.predicted_ms
                self._first_n = max(1, self.predicted_n)
                found += self._prefill_done()
            found_text: tuple[tuple[Channel, str], ...] = (("reasoning", chunk.reasoning), ("answer", chunk.content))
            for channel, text in found_text:
                if text:
                    self._pending[channel] = self._pending.get(channel, "") + text
                    self.text_size += len(text)
        return found

    def _check(self, told: Told) -> None:
        """Drop counts that cannot be: fewer tokens than before, or more than any answer has."""
        before, now = self._told.predicted_n, told.predicted_n
        if now is not None and (now > _MOST_TOKENS or (before is not None and now < before)):
            self.lies += 1
            told.predicted_n = told.predicted_ms = None
        if (told.draft_n_accepted or 0) > (told.draft_n or 0):
            self.lies += 1
            told.draft_n = told.draft_n_accepted = None

    def _progress(self, processed: int, total: int, cached: int) -> PrefillProgress:
        total = max(total, 1)
        processed = min(processed, total)
        self._prefilled = processed == total
        return PrefillProgress(
            request_id=self._request_id, processed=processed, total=total, cache_n=min(cached, processed)
        )

    def _prefill_done(self) -> list[AnyEvent]:
        total, cached = self._prompt_total(), self._told.cache_n or 0
        return [self._progress(total, total, cached)] if total and not self._prefilled else []

    def _prompt_total(self) -> int:
        told = self._told
        if told.prompt_total is not None:
            return told.prompt_total
        return (told.cache_n or 0) + (told.prompt_n or 0)

    def deltas(self, now: float) -> list[AnyEvent]:
        """Return the text that waits, and the speculation figures if it is time for them."""
        if not self._pending:
            return []
        self._advance()
        found: list[AnyEvent] = []
        predicted_n, last = self.predicted_n, len(self._pending) - 1
        for number, (channel, text) in enumerate(self._pending.items()):
            n_tokens = predicted_n - self._counted if number == last else 0  # a batch tells only their sum
            found.append(
                TextDelta(
                    request_id=self._request_id, text=text, channel=channel, n_tokens=max(0, n_tokens),
                    predicted_n=predicted_n, at_ms=self._at_ms,
                )
            )  # fmt: skip
        self._counted = max(predicted_n, self._counted)
        self._pending = {}
        figures = self._speculation()
        if figures is not None and figures.draft_n and now - self._updated >= _UPDATE_SECONDS:
            self._updated = now
            found.append(SpeculationUpdate(request_id=self._request_id, predicted_n=predicted_n, figures=figures))
        return found

    def _advance(self) -> None:
        """Move the time of the newest text, by the server's clock where it tells one."""
        if self._first_at is None:
            return
        at_ms = 1e3 * (self._newest_at - self._started)
        if self._first_ms is not None and self._told.predicted_ms is not None:
            at_ms = 1e3 * (self._first_at - self._started) + self._told.predicted_ms - self._first_ms
        self._at_ms = max(self._at_ms, at_ms)

    def speculate(self, figures: SpeculationFigures | None) -> None:
        """Take over figures that the server tells beside the answer."""
        self._speculation_told = figures

    def _speculation(self) -> SpeculationFigures | None:
        told = self._told
        if not told.draft_n:
            return self._speculation_told
        accepted = told.draft_n_accepted or 0
        passes = told.passes or max(1, self.predicted_n - 1 - accepted)
        newest = (passes, told.draft_n, accepted)
        if not self._recent or self._recent[-1] != newest:
            self._recent.append(newest)
        while len(self._recent) > 2 and passes - self._recent[1][0] >= _RECENT_PASSES:
            self._recent.popleft()
        before = self._recent[0] if passes - self._recent[0][0] >= _RECENT_PASSES // 2 else (0, 0, 0)
        return SpeculationFigures(
            passes=passes,
            draft_n=told.draft_n,
            draft_n_accepted=accepted,
            recent_draft_n=told.draft_n - before[1],
            recent_draft_n_accepted=accepted - before[2],
            by_position=told.by_position,
            source="server",
        )

    def timings(self, seed: int) -> Timings:
        """Return the figures of the answer as far as it came."""
        told, first = self._told, self._first_at
        n, ttft_ms = self.predicted_n, 0.0 if first is None else 1e3 * (first - self._started)
        if told.predicted_ms is not None:
            predicted_ms = told.predicted_ms
        else:
            # The first part may hold several tokens, which took no time here: only what came after it counts.
            spans, took = n - self._first_n, 0.0 if first is None else 1e3 * (self._newest_at - first)
            predicted_ms = took * (n - 1) / spans if spans > 0 else 0.0
        network_ms, queue_ms = self._shares(ttft_ms)
        speculation = self._speculation()
        total = self._prompt_total()
        prompt_n = told.prompt_n if told.prompt_n is not None else total - (told.cache_n or 0)
        return Timings(
            cache_n=told.cache_n or 0,
            prompt_n=max(0, prompt_n),
            prompt_ms=told.prompt_ms or 0.0,
            predicted_n=n,
            predicted_ms=predicted_ms,
            ttft_ms=ttft_ms,
            draft_n=speculation.draft_n if speculation is not None else 0,
            draft_n_accepted=speculation.draft_n_accepted if speculation is not None else 0,
            n_past=total + max(0, n - 1) if total else 0,
            n_ctx=self._n_ctx,
            seed=seed,
            speculation=speculation,
            network_ms=network_ms,
            queue_ms=queue_ms,
            approximate=told.predicted_n is None and n > 0,
        )

    def _shares(self, ttft_ms: float) -> tuple[float | None, float | None]:
        """Return what of the time to the first token went into (network, queue); None for what cannot be told apart.

        A server that tells only its prefill leaves queue and network in one: the network takes a round trip.
        """
        told = self._told
        if not ttft_ms:
            return None, None
        if told.ttft_ms is not None:
            return max(0.0, ttft_ms - told.ttft_ms), told.queue_ms
        if told.prompt_ms is None or self._round_trip is None:
            return None, told.queue_ms
        rest = max(0.0, ttft_ms - told.prompt_ms - (self._first_ms or 0.0))
        network = min(rest, 1e3 * self._round_trip)
        return network, rest - network if told.queue_ms is None else told.queue_ms
