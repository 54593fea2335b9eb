"""Adds up what a server reports of one answer, and makes the events and timings that a worker would send."""

from __future__ import annotations

from cpuchat.backend.remote.stream import CallParts, Chunk
from cpuchat.protocol.messages import AnyEvent, Channel, PrefillProgress, SpeculationUpdate, TextDelta
from cpuchat.protocol.timings import SpeculationFigures, Timings

_UPDATE_SECONDS = 0.25
_MAX_TOKENS = 1 << 31


class StreamTally:
    """The figures of one answer.

    Times are the server's where it reports them: what the way here costs is not booked as slow decoding. Tokens that it
    does not count are counted by the parts that it sends, which may hold several: then `approximate`.

    Args:
        started: when the request arrived at the backend, monotonic seconds.
        n_ctx: of the model, 0 = not known.
    """

    def __init__(self, request_id: int, started: float, n_ctx: int) -> None:
        self.id = ""
        """The server's name for the answer."""
        self.finish = ""
        self.calls = CallParts()
        self._request_id, self._started, self._n_ctx = request_id, started, n_ctx
        self._figures: dict[str, float] = {}
        self._parts = self._counted = 0  # parts with text; tokens in the deltas so far
        self._first_at: float | None = None
        self._newest_at = self._at_ms = 0.0
        self._first_ms: float | None = None  # predicted_ms of the first text
        self._first_n = 1
        self._pending: dict[Channel, str] = {}
        self._prefilled = False
        self._updated = float("-inf")

    @property
    def has_text(self) -> bool:
        """Return whether text waits for `deltas`."""
        return bool(self._pending)

    def _count(self, name: str) -> int:
        return int(self._figures.get(name, 0))

    @property
    def predicted_n(self) -> int:
        """Return the tokens written so far."""
        return int(self._figures.get("predicted_n", self._parts))

    @property
    def prompt_total(self) -> int:
        """Return the tokens of the prompt, reused ones too; 0: not reported."""
        return int(self._figures.get("prompt_total", self._count("cache_n") + self._count("prompt_n")))

    def add(self, chunk: Chunk, now: float) -> list[AnyEvent]:
        """Take in one part; returns the events that do not wait: progress of the prompt."""
        self.id, self.finish = self.id or chunk.id, chunk.finish or self.finish
        self.calls.add(chunk.calls)
        found: list[AnyEvent] = []
        figures = dict(chunk.figures)
        if not self._figures.get("predicted_n", 0) <= figures.get("predicted_n", _MAX_TOKENS) <= _MAX_TOKENS:
            del figures["predicted_n"]
            figures.pop("predicted_ms", None)
        processed, total = figures.pop("processed", None), figures.pop("total", None)
        if total and processed is not None and self._first_at is None:
            cached = int(figures.setdefault("cache_n", 0))
            figures["prompt_n"] = max(0, processed - cached)
            found.append(self._progress(int(processed), int(total), cached))
        self._figures |= figures
        if chunk.content or chunk.reasoning:
            self._parts += 1
            self._newest_at = now
            if self._first_at is None:
                self._first_at, self._first_ms = now, self._figures.get("predicted_ms")
                self._first_n = max(1, self.predicted_n)
                if self.prompt_total and not self._prefilled:
                    found.append(self._progress(self.prompt_total, self.prompt_total, self._count("cache_n")))
            texts: tuple[tuple[Channel, str], ...] = (("reasoning", chunk.reasoning), ("answer", chunk.content))
            for channel, text in texts:
                if text:
                    self._pending[channel] = self._pending.get(channel, "") + text
        return found

    def _progress(self, processed: int, total: int, cached: int) -> PrefillProgress:
        processed = min(processed, total)
        self._prefilled = processed == total
        return PrefillProgress(
            request_id=self._request_id, processed=processed, total=total, cache_n=min(cached, processed)
        )

    def deltas(self, now: float) -> list[AnyEvent]:
        """Return the text that waits, and the speculation figures if it is time for them."""
        if not self._pending or self._first_at is None:
            return []
        at_ms = 1e3 * (self._newest_at - self._started)
        if self._first_ms is not None:  # by the server's clock
            at_ms = 1e3 * (self._first_at - self._started) + self._figures["predicted_ms"] - self._first_ms
        self._at_ms = max(self._at_ms, at_ms)
        found: list[AnyEvent] = []
        predicted_n, last = self.predicted_n, len(self._pending) - 1
        for number, (channel, text) in enumerate(self._pending.items()):
            n_tokens = predicted_n - self._counted if number == last else 0  # only the sum of a batch is known
            found.append(
                TextDelta(
                    request_id=self._request_id, text=text, channel=channel, n_tokens=max(0, n_tokens),
                    predicted_n=predicted_n, at_ms=self._at_ms,
                )
            )  # fmt: skip
        self._counted = max(predicted_n, self._counted)
        self._pending = {}
        figures = self._speculation()
        if figures is not None and now - self._updated >= _UPDATE_SECONDS:
            self._updated = now
            found.append(SpeculationUpdate(request_id=self._request_id, predicted_n=predicted_n, figures=figures))
        return found

    def _speculation(self) -> SpeculationFigures | None:
        drafted, accepted = self._count("draft_n"), self._count("draft_n_accepted")
        if not drafted or accepted > drafted:
            return None
        return SpeculationFigures(
            passes=max(1, self.predicted_n - 1 - accepted),  # also those that drafted nothing
            draft_n=drafted,
            draft_n_accepted=accepted,
            recent_draft_n=drafted,
            recent_draft_n_accepted=accepted,
            source="server",
        )

    def timings(self, seed: int) -> Timings:
        """Return the figures of the answer as far as it came."""
        figures, first, total, n = self._figures, self._first_at, self.prompt_total, self.predicted_n
        # The first part may hold several tokens, which took no time here: only what came after it counts.
        spans, took = n - self._first_n, 0.0 if first is None else 1e3 * (self._newest_at - first)
        predicted_ms = figures.get("predicted_ms", took * (n - 1) / spans if spans > 0 else 0.0)
        speculation = self._speculation()
        return Timings(
            cache_n=self._count("cache_n"),
            prompt_n=max(0, int(figures.get("prompt_n", total - self._count("cache_n")))),
            prompt_ms=figures.get("prompt_ms", 0.0),
            predicted_n=n,
            predicted_ms=predicted_ms,
            ttft_ms=0.0 if first is None else 1e3 * (first - self._started),
            draft_n=speculation.draft_n if speculation is not None else 0,
            draft_n_accepted=speculation.draft_n_accepted if speculation is not None else 0,
            n_past=total + max(0, n - 1) if total else 0,
            n_ctx=self._n_ctx,
            seed=seed,
            speculation=speculation,
            approximate="predicted_n" not in figures and n > 0,
            reused_known="cache_n" in figures or first is None,
        )
