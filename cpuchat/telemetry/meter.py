"""Turns a backend's events into figures: speeds, context, what a server reports, time left of a prompt.

Definitions: docs/figures.md. Rates while an answer is written use the worker's own clock (`TextDelta.at_ms`), so what
the way through pipe and event loop costs is not booked as slow decoding.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, TypeVar

import msgspec

from cpuchat.protocol.messages import (
    AnyEvent,
    ContextTrimmed,
    Event,
    Failed,
    GenerationFinished,
    LoadCancelled,
    LoadProgress,
    ModelLoaded,
    PrefillProgress,
    Speculation,
    SpeculationUpdate,
    StopReason,
    TextDelta,
)
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.protocol.reasons import DraftsOff
from cpuchat.protocol.timings import Reuse, SpeculationFigures, Timings, cores_share
from cpuchat.telemetry.machine import MachineSample
from cpuchat.telemetry.metric import NO_ANSWER, NO_MODEL, Metric, missing
from cpuchat.telemetry.roofline import (
    Decoding,
    Evaluated,
    Reach,
    Roofline,
    SampleAverage,
    plain_rate,
    roofline,
    whole_answer,
)

_T = TypeVar("_T")
AT_THE_END = "at the end"
"""Why a figure of a server is missing that it reports with the end of the answer."""
_MIN_SECONDS = 0.5  # of prefill, before its speed is known
_MIN_PREFILL = 64  # tokens of a prompt whose speed tells how long others take


def seconds_left(points: Sequence[tuple[float, int]], total: int) -> float | None:
    """Return the seconds until `total` tokens are evaluated; None before that can be told.

    The time of a token grows linearly with the tokens before it, which its attention reads: the slope comes from the
    two halves of what is done. `points`: (seconds, tokens evaluated), ascending; the first is where the clock began."""
    if not points:
        return None
    (start, first), (now, done) = points[0], points[-1]
    if now - start < _MIN_SECONDS or done <= first:
        return None
    mean = (now - start) / (done - first)
    middle, half = next(point for point in points if 2 * point[1] >= first + done)
    slope = 0.0  # seconds per token and token before it
    if first < half < done:
        growth = (now - middle) / (done - half) - (middle - start) / (half - first)
        slope = min(max(0.0, 2 * growth / (done - first)), 2 * mean / (done + first))
    return (total - done) * (mean + slope * (total - first) / 2)


_OFF: Metric[float] = missing("drafting is off")
_NO_COUNTS = SpeculationFigures()


@dataclass(frozen=True, slots=True)
class DraftingFigures:
    """The figures of drafting: `counts` as the worker or a server sent them last, and what follows from them.

    `wanted`: drafters are chosen; `adaptive`: the depth is not fixed by the user. Acceptance is accepted by drafted
    tokens (0-1). `tokens_per_pass` written per evaluation of the target. `depth` tokens are drafted per pass now, 0 =
    plain decoding, None: not known.
    `draft_share` of the decode time went into drafting that verification waited for (0-1). `plain_tok_s` is what plain
    decoding does here, `speed_up` the rate of this answer against it. `off` is why drafting is off, before the first
    counts, too."""

    counts: SpeculationFigures = _NO_COUNTS
    wanted: bool = False
    adaptive: bool = True
    depth: int | None = None
    off: DraftsOff | None = None
    acceptance: Metric[float] = _OFF
    tokens_per_pass: Metric[float] = _OFF
    draft_share: Metric[float] = _OFF
    plain_tok_s: Metric[float] = _OFF
    speed_up: Metric[float] = _OFF

    @property
    def is_off(self) -> bool:
        """Return whether drafting is off by the user's choice or by what was measured."""
        return not self.wanted or (self.off is not None and self.off.is_verdict)


def drafting(
    model: ModelInfo | None,
    asked: Speculation,
    figures: SpeculationFigures | None,
    predicted_n: int,
    decode_ms: float,
    tok_s: float | None,
    is_answered: bool,
    disturbed: bool = False,
) -> DraftingFigures:
    """Return the figures of an answer, drafted as `asked`. `figures`: the newest, taken when `predicted_n` tokens were
    generated in `decode_ms` milliseconds. `tok_s`: the rate to compare with plain decoding. `is_answered`: text has
    come. `disturbed`: other programs had cores, so that it tells nothing of plain decoding."""
    on_server = model is not None and bool(model.server)  # it counts by itself, and drafts as it was started
    drafts_off = model.drafts_off if model is not None else None
    adaptive = asked.depth == 0 and not on_server
    if not asked.drafters and figures is None and not on_server:
        return DraftingFigures(adaptive=adaptive)
    counts = figures or SpeculationFigures(off=drafts_off)
    nothing = "nothing drafted" if is_answered else NO_ANSWER
    depth = None if figures is None or on_server else asked.depth or counts.depth
    plain_ms, disturbed = counts.plain_ms, disturbed or counts.disturbed
    if figures is not None and not counts.draft_n and predicted_n > 1:  # its own average speed
        plain_ms = decode_ms / (predicted_n - 1)
    elif not plain_ms and model is not None and model.pass_ms:
        plain_ms = model.pass_ms[0]
    no_plain = "busy cores" if disturbed else "not reported" if counts.source else "not calibrated"
    plain = missing(no_plain) if disturbed or on_server or not plain_ms else Metric(1e3 / plain_ms)
    # Taken at two moments, so in the first instants of an answer the part can seem larger than the whole.
    long_enough = figures is not None and decode_ms >= max(counts.draft_ms, 1.0)
    timed = long_enough and not on_server and (counts.draft_n or counts.draft_ms)
    not_timed = "answer too short" if is_answered and depth is not None else nothing
    return DraftingFigures(
        counts=counts,
        wanted=True,
        adaptive=adaptive,
        depth=depth,
        off=counts.off or (drafts_off if not counts.draft_n else None),
        acceptance=_share(counts.draft_n_accepted, counts.draft_n, nothing),
        tokens_per_pass=Metric.of(counts.tokens_per_pass(predicted_n), nothing),
        draft_share=Metric(counts.draft_ms / decode_ms) if timed else missing(not_timed),
        plain_tok_s=plain,
        speed_up=Metric.of(None if disturbed else counts.speed_up(tok_s, predicted_n), plain.why or nothing),
    )


def _share(part: int, whole: int, why: str) -> Metric[float]:
    return Metric(part / whole) if whole else missing(why)


Phase = Literal["idle", "loading", "prefill", "decoding", "done"]

_OF_AN_ANSWER = (PrefillProgress, TextDelta, SpeculationUpdate, GenerationFinished, ContextTrimmed)
SAMPLE_MS = 500.0
HISTORY_SECONDS = 60
_LIVE_MS, _MIN_LIVE_MS = 1000.0, 100.0  # of a rate; in less time one pass with drafts would look like a speed


@dataclass(frozen=True, slots=True)
class ChatFigures:
    """The current figures.

    `load_fraction` 0-1, None: not loading, or of an unknown size. `prefill_*` in tokens of the prompt; `prefill_cached`
    of them were reused from the KV cache; `reuse` as in `Timings`. The rest takes `prefill_left_s`; None before that
    can be told. `ttft_s` from the request's arrival at the backend to the first text. `live_tok_s` over the last
    second, `decode_tok_s` over the answer from its first token to its last. `n_past` tokens in the context.
    `stop_reason` is None until the answer is complete, and where it `failed`. `history` is decoding speed, one sample
    per half second of decoding, oldest first, over answers too. `unreported` are the figures that a server does not
    report, and why. `approximate`: tokens are counted by the parts that a server sends."""

    phase: Phase
    load_fraction: float | None
    prefill_processed: int
    prefill_total: int
    prefill_cached: Metric[int]
    prefill_tok_s: Metric[float]
    ttft_s: Metric[float]
    live_tok_s: Metric[float]
    decode_tok_s: Metric[float]
    predicted_n: int
    n_past: Metric[int]
    n_ctx: Metric[int]
    stop_reason: StopReason | None
    history: tuple[float, ...]
    failed: bool
    drafting: DraftingFigures
    roofline: Roofline
    on_server: bool
    unreported: Mapping[str, str]
    approximate: bool
    reuse: Reuse | None
    prefill_left_s: float | None = None
    cores_share: float | None = None
    """Share of the cores that this answer got, where other programs had the rest; None elsewhere."""
    queued_s: float | None = None
    """As of `Timings`, once the answer is complete."""

    @property
    def tok_s(self) -> Metric[float]:
        """Return the live speed; where there is none, the average of the answer."""
        return self.decode_tok_s if self.live_tok_s.value is None else self.live_tok_s


class Meter:
    """Meters answers; it must see every event of one backend, in order."""

    def __init__(self) -> None:
        self._n_ctx: int | None = None
        self._load_fraction: float | None = None
        self._history: deque[float] = deque(maxlen=int(HISTORY_SECONDS * 1000 / SAMPLE_MS))
        self._phase: Phase = "idle"
        self._n_past: int | None = None
        self.asked = Speculation()
        """How the running or the next answer is drafted."""
        self.reach = Reach()
        """What the cores of the loaded model reach by the newest measurement, on which the ceilings rest."""
        self._best_prefill: float | None = None  # tok/s since the model was loaded
        self._machine: MachineSample | None = None
        self._model: ModelInfo | None = None
        self._reported: set[str] = set()  # figures that the server did report, against `ModelInfo.unreported`
        self._reset()

    def _reset(self) -> None:
        self._request_id = 0
        self._prefill: PrefillProgress | None = None
        self._prefill_start: tuple[float, int] | None = None
        self._prefill_points: list[tuple[float, int]] = []  # since then
        self._prefill_rate: float | None = None
        self._ttft_s: float | None = None
        self._predicted_n = 0
        self._points: deque[tuple[float, int]] = deque()  # (at_ms, predicted_n), the last second and a bit
        self._first: tuple[float, int] | None = None
        self._next_sample = 0.0
        self._newest_at = 0.0
        self._stop_reason: StopReason | None = None
        self._cpu_wait: float | None = None
        self._cpu_ran: float | None = None
        self._timings: Timings | None = None  # of the answer, once it is complete
        self._failed = False
        self._reset_drafting()

    def _reset_drafting(self) -> None:
        self._figures: SpeculationFigures | None = None
        self._figures_at = (0, 0.0)  # tokens, and ms of decoding
        self._evaluated = Evaluated()
        self._average = SampleAverage()

    def machine(self, sample: MachineSample) -> None:
        """Record a sample of the counters (hardware.monitor); a few times a second is enough."""
        self._machine = sample
        if self._phase == "decoding":
            self._average.add(sample, self._predicted_n)

    def request_started(self, now: float) -> None:
        """Record that a request was sent: this clears the last answer's figures; prefill begins."""
        self._reset()
        self._phase = "prefill"
        self._prefill_start = (now, 0)

    def load_started(self) -> None:
        """Record that a model is going to be loaded: this clears the figures of the one before."""
        self._reset()
        self._without_model()
        self._phase = "loading"

    def chat_changed(self, n_past: int) -> None:
        """Record the switch to a chat with `n_past` tokens in its context, which clears the last answer's figures."""
        self._reset()
        self._history.clear()
        if self._phase != "loading":
            self._phase = "idle"
        self.in_context(n_past)

    def in_context(self, n_past: int) -> None:
        """Record that the open chat has `n_past` tokens in the context of the loaded model."""
        if self._n_ctx is not None:
            self._n_past = n_past

    def observe(self, event: Event, now: float) -> None:
        """Record an event. `now`: monotonic seconds, of the same clock in every call."""
        if isinstance(event, _OF_AN_ANSWER):
            if event.request_id != self._request_id:
                if self._request_id or self._phase != "prefill":
                    self._reset()
                self._request_id = event.request_id
            if self._phase in ("idle", "done"):
                self._phase = "prefill"
        match event:
            case TextDelta():
                self._text(event, now)
            case PrefillProgress():
                self._prefill_progress(event, now)
            case SpeculationUpdate():
                decode_ms = self._points[-1][0] - self._first[0] if self._first is not None and self._points else 0.0
                self._figures, self._figures_at = event.figures, (event.predicted_n, decode_ms)
                if event.figures.passes:
                    self._evaluated = Evaluated.of(event.figures, event.predicted_n)
            case GenerationFinished():
                self._finish(event)
            case ContextTrimmed():
                self._n_ctx = event.n_ctx
            case LoadProgress():
                if self._phase != "loading":
                    self._without_model()
                self._phase = "loading"
                self._load_fraction = min(1.0, event.done / event.total) if event.total > 1 else None
            case ModelLoaded():
                self._phase, self._load_fraction = "idle", None
                self._n_ctx, self._n_past = event.model.n_ctx or None, 0
                self._prefill_start = None  # a load in front of an answer is no prefill
                self._for_model(event.model)
            case LoadCancelled():
                # The figures of an answer stay, whose worker may have died: "no answer yet" would not be true of them.
                self._phase = "done" if self._phase in ("prefill", "decoding", "done") else "idle"
                self._load_fraction = None
                self._without_model()
            case Failed():
                self._failed = True
                self._load_fraction = None
                # A dying worker does not tell which request it was at.
                answered = bool(event.request_id) or self._phase in ("prefill", "decoding")
                self._phase = "done" if answered and self._phase != "loading" else "idle"

    def calibrated(self, model: ModelInfo) -> None:
        """Record that the passes of the loaded model were measured."""
        self._model = model

    def unloaded(self) -> None:
        """Record that there is no model any more; the figures of an answer stay."""
        if self._model is not None:
            self._n_ctx = self._n_past = None
            if self._phase == "idle":
                self._for_model(None)

    def _without_model(self) -> None:
        self._n_ctx = self._n_past = None
        self._for_model(None)

    def _for_model(self, model: ModelInfo | None) -> None:
        self._model, self._reported = model, set()
        if model is not None:
            self._timings = None
        self._best_prefill, self.reach = None, Reach()
        self._reset_drafting()

    @property
    def _on_server(self) -> bool:
        return self._model is not None and bool(self._model.server)

    def _prefill_progress(self, event: PrefillProgress, now: float) -> None:
        first, self._prefill = self._prefill is None, event
        self._n_past = event.processed
        start = self._prefill_start
        if self._on_server and (first or start is None):
            # The network and a queue before it are no prefill, and a size that comes with the first text gives no rate.
            self._prefill_start = start = (now, event.processed)
        elif start is None or start[1] < event.cache_n:
            # what was reused took no time: the clock runs from the request, the count from there on
            self._prefill_start = start = (start[0] if start else now, event.cache_n)
        if event.processed > start[1] and now > start[0]:
            self._prefill_rate = (event.processed - start[1]) / (now - start[0])
        if self._prefill_points[:1] != [start]:
            self._prefill_points = [start]
        if event.processed > start[1]:
            self._prefill_points.append((now, event.processed))

    def prefill_left_s(self, now: float | None = None) -> float | None:
        """Return the seconds that the rest of the prompt takes at `now` (None: at the newest event), at least 1; None
        before that can be told, and when all is read. Until this prompt has a rate it is that of those before, or the
        predicted one."""
        prefill = self._prefill
        if prefill is None:
            return None
        left = seconds_left(self._prefill_points, prefill.total)
        at, rest = self._prefill_points[-1][0], prefill.total - prefill.processed
        left = self.prefill_s(rest) if left is None else left
        if left is None or not rest:
            return None
        return max(1.0, left - max(0.0, (at if now is None else now) - at))

    def prefill_s(self, n_tokens: int) -> float | None:
        """Return about how many seconds the loaded model needs to read that many tokens; None when it is not known."""
        rate = self._best_prefill or self.reach.compute_tok_s
        return n_tokens / rate if rate else None

    def _prefilled(self, n_tokens: int, tok_s: float | None) -> None:
        """Record that `n_tokens` of a prompt were evaluated at `tok_s`. A short one only raises what is known."""
        if tok_s is not None and (n_tokens >= _MIN_PREFILL or self._best_prefill is not None):
            self._best_prefill = max(tok_s, self._best_prefill or 0.0)

    def _text(self, event: TextDelta, now: float) -> None:
        self._phase = "decoding"
        if event.cpu_wait is not None:
            self._cpu_wait, self._cpu_ran = event.cpu_wait, event.cpu_ran
        if self._first is None:
            self._first = (event.at_ms, event.predicted_n)
            self._ttft_s = event.at_ms / 1e3
            if self._prefill is not None:
                self._prefilled(self._prefill.processed - self._prefill.cache_n, self._prefill_rate)
            self._next_sample = event.at_ms + SAMPLE_MS
        points = self._points
        if points and event.at_ms <= points[-1][0]:  # two channels in one batch share a time
            points[-1] = (points[-1][0], event.predicted_n)
        else:
            points.append((event.at_ms, event.predicted_n))
        self._newest_at = now
        if self._prefill is not None:
            self._n_past = self._prefill.total + max(0, event.predicted_n - 1)  # the newest is not evaluated yet
        self._predicted_n = event.predicted_n
        while self._next_sample <= event.at_ms:
            written = self._tokens_at(self._next_sample) - self._tokens_at(self._next_sample - SAMPLE_MS)
            self._history.append(written / SAMPLE_MS * 1e3)
            self._next_sample += SAMPLE_MS
        # one point older than the window stays, to interpolate from
        while len(points) > 2 and points[1][0] <= min(event.at_ms - _LIVE_MS, self._next_sample - SAMPLE_MS):
            points.popleft()

    def _finish(self, event: GenerationFinished) -> None:
        timings = event.timings
        self._phase = "done"
        self._stop_reason = event.stop_reason
        self._predicted_n = timings.predicted_n
        self._prefill_rate = timings.prompt_per_second
        self._timings, self._cpu_wait = timings, timings.cpu_wait
        if timings.prompt_per_second is not None:
            self._reported.add("prefill_tok_s")
        if timings.reused_known and timings.prompt_n:
            self._reported.add("prefill_cached")
        self._figures, self._figures_at = timings.speculation, (timings.predicted_n, timings.predicted_ms)
        self._prefilled(timings.prompt_n, timings.prompt_per_second)
        if timings.ttft_ms > 0:
            self._ttft_s = timings.ttft_ms / 1e3
        if timings.n_ctx:
            self._n_past, self._n_ctx = timings.n_past, timings.n_ctx
        elif timings.n_past:
            self._n_past = timings.n_past

    def _tokens_at(self, ms: float) -> float:
        """Return the tokens generated until `ms`, interpolated between two deltas."""
        points = self._points
        before = points[0]
        if ms <= before[0]:
            return before[1]
        for point in points:
            if point[0] >= ms:
                share = (ms - before[0]) / (point[0] - before[0]) if point[0] > before[0] else 1.0
                return before[1] + share * (point[1] - before[1])
            before = point
        return before[1]

    def _live(self, now: float | None) -> float | None:
        """Return tok/s over the last second until `now`, at most that of the worker's clock; a delta that is not
        overdue does not lower the rate, so that models slower than a token per second have one, too."""
        points = self._points
        if self._phase != "decoding" or not points or points[-1][0] - points[0][0] < _MIN_LIVE_MS:
            return None
        newest = points[-1][0]
        overdue = 0.0
        if now is not None:
            usual = max(after[0] - before[0] for before, after in pairwise(points))
            overdue = max(0.0, (now - self._newest_at) * 1e3 - 2 * usual)
        end = newest + overdue
        start = max(min(end - _LIVE_MS, newest), points[0][0])
        written = self._tokens_at(newest) - self._tokens_at(start)
        return written / min(_LIVE_MS, end - points[0][0]) * 1e3

    def _decode(self) -> float | None:
        if self._timings is not None and self._timings.predicted_per_second is not None:
            return self._timings.predicted_per_second
        if self._first is None or not self._points or self._points[-1][0] - self._first[0] < _MIN_LIVE_MS:
            return None
        return (self._points[-1][1] - self._first[1]) / (self._points[-1][0] - self._first[0]) * 1e3

    def figures(self, now: float | None = None) -> ChatFigures:
        """Return the figures at `now` (monotonic seconds), which lowers the live rate while no token arrives."""
        prefill, timings = self._prefill, self._timings
        live, decode = self._live(now), self._decode()
        share = timings.cores_share if timings is not None else cores_share(self._cpu_wait, self._cpu_ran)
        of_model = self._model.unreported if self._model is not None else ()
        unreported = {name: why for name, why in of_model if name not in self._reported}
        no_model = "model is loading" if self._phase == "loading" else NO_MODEL
        no_answer = {"loading": "model is loading", "idle": NO_ANSWER}.get(self._phase, "")
        no_rate = no_answer or ("needs two tokens" if self._predicted_n else "no tokens generated")
        if self._phase == "prefill":
            no_rate = "no token yet"
        no_prefill = no_answer or self._why_no_prefill()

        def figure(name: str, value: _T | None, why: str) -> Metric[_T]:
            return Metric.of(value, unreported.get(name, why))

        return ChatFigures(
            phase=self._phase,
            load_fraction=self._load_fraction,
            prefill_processed=prefill.processed if prefill else 0,
            prefill_total=prefill.total if prefill else 0,
            prefill_cached=figure("prefill_cached", self._reused(), no_prefill),
            prefill_tok_s=figure("prefill_tok_s", self._prefill_rate, no_prefill),
            ttft_s=figure("ttft_s", self._ttft_s, no_rate),
            live_tok_s=figure("live_tok_s", live, "idle" if self._phase == "done" else no_rate),
            decode_tok_s=figure("decode_tok_s", decode, no_rate),
            predicted_n=self._predicted_n,
            n_past=figure("n_past", self._n_past, no_model if self._n_ctx is None else NO_ANSWER),
            n_ctx=figure("n_ctx", self._n_ctx, no_model),
            stop_reason=self._stop_reason,
            history=tuple(self._history),
            failed=self._failed,
            drafting=drafting(
                self._model,
                self.asked,
                self._figures,
                *self._figures_at,
                decode,
                self._first is not None,
                share is not None,
            ),
            roofline=self._roofline(self._decoding(decode)),
            on_server=self._on_server,
            unreported=unreported,
            approximate=timings.approximate if timings is not None else self._hides("tokens"),
            reuse=prefill.reuse if prefill else None,
            prefill_left_s=self.prefill_left_s(now) if self._phase == "prefill" else None,
            cores_share=share,
            queued_s=timings.queued_s if timings is not None else None,
        )

    def _decoding(self, average: float | None) -> Decoding:
        if self._timings is not None:
            return replace(whole_answer(self._timings), tok_s=average)
        whole = self._evaluated if self._evaluated.passes else Evaluated.of(None, self._predicted_n)
        return Decoding(average, whole, self._n_past or 0, plain_rate(self._figures))

    def _roofline(self, now: Decoding) -> Roofline:
        machine = self._machine
        if machine is not None and (self._timings is not None or self._phase == "decoding"):
            machine = self._average.sample(machine)
        return roofline(self._model, now, machine, self._average.joules_per_token, self.reach)

    def _hides(self, figure: str) -> bool:
        return self._model is not None and figure in dict(self._model.unreported)

    def _reused(self) -> int | None:
        """Return the reused tokens of the prompt, by its progress; None while a server does not tell."""
        timings = self._timings
        if timings is not None and self._on_server:
            return timings.cache_n if timings.reused_known else None
        if timings is None and self._hides("prefill_cached"):
            return None
        return self._prefill.cache_n if self._prefill is not None else 0

    def _why_no_prefill(self) -> str:
        """Return why an answer that has begun has no speed of its prompt."""
        if self._prefill is not None and 0 < self._prefill.total <= (self._reused() or 0) + 1:
            return "fully cached"
        if self._on_server and self._phase == "decoding":
            return AT_THE_END
        return "in progress" if self._phase == "prefill" else "none evaluated"


class ReasoningTime:
    """Adds to the timings at the end of an answer the time of its reasoning, up to the first text after it, and its
    tokens. An answer may take several requests."""

    def __init__(self) -> None:
        self._request_id: int | None = None
        self._last: float | None = None  # when its newest reasoning came, in ms
        self._n_tokens, self._ms = 0, 0.0

    def of(self, event: AnyEvent) -> AnyEvent:
        """Follow an event, and return it."""
        if isinstance(event, TextDelta):
            if event.request_id != self._request_id:
                self._request_id, self._last = event.request_id, None
            is_reasoning = event.channel == "reasoning"
            self._ms += event.at_ms - self._last if self._last is not None else 0.0
            self._last = event.at_ms if is_reasoning else None
            self._n_tokens += event.n_tokens if is_reasoning else 0
        elif isinstance(event, GenerationFinished) and self._n_tokens:
            timings = msgspec.structs.replace(event.timings, reasoning_n=self._n_tokens, reasoning_ms=self._ms)
            event = msgspec.structs.replace(event, timings=timings)
            self._request_id, self._last, self._n_tokens, self._ms = None, None, 0, 0.0
        return event
