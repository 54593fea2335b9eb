"""Reads a streamed answer, whatever the server's dialect: bounded, with its numbers checked, and as events.

Parts come as server-sent events, or as one JSON object per line; calls of tools as OpenAI has them, or as Ollama does,
whose arguments are objects. `StreamTally` adds up what a server reports and makes the events and timings that a
worker would send.
"""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cpuchat.base.errors import ServerError
from cpuchat.protocol.messages import (
    AnyEvent,
    Channel,
    Message,
    PrefillProgress,
    Queued,
    ServerLoad,
    SpeculationUpdate,
    TextDelta,
    ToolCall,
)
from cpuchat.protocol.timings import SpeculationFigures, Timings

MOST_EVENT = 1 << 20
"""Bytes of one event at most: an ordinary one has a few hundred."""
_DONE = b"[DONE]"


async def lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Split a byte stream at LF, CR LF or CR. A last line without its end is dropped if it was cut. Raises ServerError:
    a line is longer than `MOST_EVENT`.
    """
    rest = bytearray()
    async for chunk in chunks:
        rest += chunk
        if b"\n" in chunk:
            *whole, last = bytes(rest).split(b"\n")
            rest = bytearray(last)
            for line in whole:
                for part in line.removesuffix(b"\r").split(b"\r"):
                    _require_size(part)
                    yield part
        _require_size(rest)
    last = bytes(rest).removeprefix(b"data:").strip()
    with contextlib.suppress(ServerError):
        if last == _DONE or decoded(last):
            yield bytes(rest)


def _require_size(line: bytes | bytearray) -> None:
    if len(line) > MOST_EVENT:
        raise ServerError(
            f"The server sent an event of more than {MOST_EVENT >> 20} MiB.",
            "Is this really an inference server? Check its address and its log.",
        )


async def events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the data of server-sent events; comments (which keep the connection open) and other fields are skipped.
    Raises ServerError: as `lines`.
    """
    data: list[bytes] = []
    async for line in lines(chunks):
        if not line:
            if data:
                yield b"\n".join(data)
            data = []
            continue
        field, _, value = line.partition(b":")
        if field in (b"data", b"error"):  # llama-server has sent errors in a field of that name
            value = value.removeprefix(b" ")
            if data and value.startswith((b"{", _DONE)):  # some servers leave out the empty line between events
                yield b"\n".join(data)
                data = []
            data.append(value)
            _require_size(b"".join(data) if len(data) > 1 else data[0])
    if data:  # the empty line at the end is missing
        yield b"\n".join(data)


async def objects(chunks: AsyncIterator[bytes], *, by_line: bool) -> AsyncIterator[dict[str, Any] | None]:
    """Yield the JSON objects of a stream, of events or (`by_line`) of lines; None at `[DONE]`, which ends it. Raises
    ServerError: what came is not a JSON object, or too long.
    """
    parts = lines(chunks) if by_line else events(chunks)
    async for data in parts:
        if data.strip() == _DONE:
            yield None
            return
        if data.strip() and not data.startswith(b":"):  # some keep a connection open by a comment in an event
            yield decoded(data)


def decoded(data: bytes) -> dict[str, Any]:
    """Decode one JSON object; NaN and Infinity pass, which some servers write for numbers. Raises ServerError: it is
    not one.
    """
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise _invalid(data) from None
    if not isinstance(value, dict):
        raise _invalid(data)
    return value


def _invalid(data: bytes) -> ServerError:
    start = data[:60].decode(errors="replace")
    return ServerError(
        f"The server sent invalid JSON: {start!r}{'…' if len(data) > 60 else ''}.",
        "Check the server's log, or a proxy in between.",
    )


def error_words(found: Any, depth: int = 6) -> str:
    """Return what a server says of an error, also in FastAPI's lists with the places of fields; "" for nothing."""
    if isinstance(found, list):
        return "; ".join(filter(None, (error_words(one, depth - 1) for one in found[:4] if depth)))
    if not isinstance(found, dict):
        return valid_text(found)
    place = valid_text(".".join(map(str, found["loc"]))) if isinstance(found.get("loc"), list) else ""
    said = [error_words(found.get(name), depth - 1) for name in ("error", "message", "detail", "msg") if depth]
    return ": ".join(filter(None, (place, next(filter(None, said), ""))))


def valid_text(value: Any, kind: str = "text") -> str:
    """Return a text from JSON, also one in parts of a `kind`, "" for anything else; lone surrogates are replaced."""
    if isinstance(value, list):
        return "".join(valid_text(part.get(kind)) for part in value if isinstance(part, dict))
    if not isinstance(value, str):
        return ""
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


_MOST = 1e15  # of any count or time: what is larger is a mistake


@dataclass(frozen=True, slots=True)
class Attempt:
    """The attempt at a request that was answered: monotonic seconds at which it began, seconds to connect in it."""

    started: float
    connect_s: float = 0.0


@dataclass(slots=True)
class Reported:
    """Counts and times in milliseconds that a server reports; None where it does not.

    `prompt_n` prompt tokens evaluated, `cache_n` reused, or `prompt_total` where only their sum is known;
    `predicted_n` tokens written so far. `predicted_ms` from the first of them by the server's clock, `ttft_ms` by it
    too. `load_ms` went into loading the model.
    """

    prompt_total: int | None = None
    cache_n: int | None = None
    prompt_n: int | None = None
    prompt_ms: float | None = None
    predicted_n: int | None = None
    predicted_ms: float | None = None
    ttft_ms: float | None = None
    queue_ms: float | None = None
    load_ms: float | None = None
    draft_n: int | None = None
    draft_n_accepted: int | None = None

    def update(self, newer: Reported) -> None:
        """Take over what `newer` has."""
        for name in Reported.__slots__:
            value = getattr(newer, name)
            if value is not None:
                setattr(self, name, value)


@dataclass(slots=True)
class Chunk:
    """One part of an answer. `ahead` requests are answered before it; `progress` is (processed, total, reused) tokens
    of the prompt. `finish` says why the answer ended, in the words of OpenAI ("stop", "length"). `id` is the server's
    name for the answer. `lies` counts numbers that cannot be: negative, or not a number. `calls` are
    parts of calls of tools as they were sent (`CallParts`).
    """

    content: str = ""
    reasoning: str = ""
    ahead: int | None = None
    progress: tuple[int, int, int] | None = None
    finish: str = ""
    id: str = ""
    reported: Reported = field(default_factory=Reported)
    lies: int = 0
    calls: Any = None

    def report(self, values: Any, figures: Mapping[str, str], scale: float = 1.0) -> None:
        """Take over figures from an object of a server, by the names of `Reported`; times are multiplied by `scale`."""
        numbers = Numbers(values)
        for name, key in figures.items():
            setattr(self.reported, name, numbers.ms(key, scale) if name.endswith("_ms") else numbers.count(key))
        self.lies += numbers.lies


class Numbers:
    """Reads numbers from an object of a server, and counts those that cannot be."""

    def __init__(self, values: Any) -> None:
        self._values: dict[str, Any] = values if isinstance(values, dict) else {}
        self.lies = 0

    def ms(self, name: str, scale: float = 1.0) -> float | None:
        """Return a time times `scale`; None when it is missing or cannot be."""
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _MOST / scale:
            self.lies += 1
            return None
        return float(value * scale)

    def count(self, name: str) -> int | None:
        """Return a count; None when it is missing or cannot be."""
        value = self.ms(name)
        return None if value is None else int(value)


_MOST_CALLS = 64
_LONGEST = 1 << 20  # characters of a call's arguments


def with_calls(found: dict[str, Any], message: Message, *, as_text: bool) -> dict[str, Any]:
    """Return a message for a server with the calls that it has, or with which call it answers. `as_text`: arguments are
    JSON in a string.
    """
    if message.role == "tool":
        return {**found, "tool_call_id": message.call_id, "name" if as_text else "tool_name": message.tool}
    if not message.calls:
        return found
    return {**found, "tool_calls": [call.declaration(as_text=as_text) for call in message.calls]}


@dataclass(slots=True)
class _Part:
    id: str = ""
    name: str = ""
    text: str = ""
    arguments: dict[str, Any] | None = None

    def differs(self, call_id: str) -> bool:
        """Return whether a name with this id (which may be missing) begins another call."""
        if call_id and self.id:
            return call_id != self.id
        return self.arguments is not None or (self.text.endswith("}") and not _call(self).problem)


class CallParts:
    """The calls of one answer, from the parts in which a server sends them."""

    def __init__(self) -> None:
        self._parts: list[_Part] = []
        self._open: dict[int, _Part] = {}
        self._newest = 0

    def add(self, sent: Any) -> None:
        """Take in `tool_calls` of a part of an answer; what is none is left out."""
        if not isinstance(sent, list):
            return
        for number, one in enumerate(sent[:_MOST_CALLS]):
            function = one.get("function") if isinstance(one, dict) else None
            if not isinstance(function, dict):
                continue
            name, call_id, index = valid_text(function.get("name")), valid_text(one.get("id")), one.get("index")
            if not isinstance(index, int):  # a part of the newest call, or whole calls
                index = number if len(sent) > 1 else self._newest
            part = self._open.get(index)
            # Some servers give all calls one index, or repeat the name in each part.
            if part is None or (name and part.name and part.differs(call_id)):
                if len(self._parts) >= _MOST_CALLS:
                    continue
                part = self._open[index] = _Part()
                self._parts.append(part)
            self._newest = index
            part.id, part.name = part.id or call_id, part.name or name
            arguments = function.get("arguments")
            if isinstance(arguments, dict):
                part.arguments = arguments
            elif len(part.text) <= _LONGEST:
                part.text += valid_text(arguments)

    def calls(self) -> tuple[ToolCall, ...]:
        """Return the calls, in the order in which they began."""
        return tuple(_call(part) for part in self._parts if part.name)


def _call(part: _Part) -> ToolCall:
    arguments: Any = part.arguments
    if arguments is None:
        try:
            arguments = json.loads(part.text, strict=False) if part.text.strip() else {}
            arguments = json.loads(arguments, strict=False) if isinstance(arguments, str) else arguments
        except (ValueError, RecursionError):
            return ToolCall(name=part.name, id=part.id, problem="The arguments are not valid JSON.")
    if not isinstance(arguments, dict):
        return ToolCall(name=part.name, id=part.id, problem="The arguments are not a JSON object.")
    return ToolCall(name=part.name, id=part.id, arguments=arguments)


_UPDATE_SECONDS = 0.25
_RECENT_PASSES = 32
_MOST_TOKENS = 1 << 31
_LEAST_QUEUE_MS = 100.0
"""A shorter wait that nothing explains is no queue unless one was seen: tokenizing, or this process was busy."""


class StreamTally:
    """The figures of one answer.

    Times are the server's where it reports them: what the way here costs is not booked as slow decoding. Tokens that it
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
        self.calls = CallParts()
        self._request_id, self._started, self._n_ctx, self._round_trip = request_id, started, n_ctx, round_trip
        self.attempt = Attempt(started)
        """The one that was answered: not the first, if the server was not reached or was busy."""
        self._reported = Reported()
        self.server_figures: SpeculationFigures | None = None
        """What the server reports beside the answer."""
        self._parts = 0  # with text
        self._counted = 0  # tokens in the deltas so far
        self._first_at: float | None = None
        self._newest_at = 0.0
        self._first_ms: float | None = None  # predicted_ms of the first text
        self._first_n = 1
        self._at_ms = 0.0
        self._pending: dict[Channel, str] = {}
        self._prefilled = False
        self._waited = False  # for other requests, as far as the server tells
        self._updated = float("-inf")
        self._recent: deque[tuple[int, int, int]] = deque(maxlen=_RECENT_PASSES)

    @property
    def has_text(self) -> bool:
        """Return whether text waits to be sent."""
        return bool(self._pending)

    @property
    def predicted_n(self) -> int:
        """Return the tokens written so far."""
        reported = self._reported.predicted_n
        return self._parts if reported is None else reported

    def add(self, chunk: Chunk, now: float) -> list[AnyEvent]:
        """Take in one part; returns the events that do not wait: the place in the queue, progress of the prompt."""
        self.lies += chunk.lies
        self.id = self.id or chunk.id
        self.finish = chunk.finish or self.finish
        self.calls.add(chunk.calls)
        found: list[AnyEvent] = []
        self._check(chunk.reported)
        self._reported.update(chunk.reported)
        if chunk.ahead is not None:
            self._waited = True
            found.append(Queued(request_id=self._request_id, ahead=chunk.ahead))
        if chunk.progress is not None and self._first_at is None:
            processed, total, cached = chunk.progress
            self._reported.cache_n, self._reported.prompt_n = cached, max(0, processed - cached)
            found.append(self._progress(processed, total, cached))
        if chunk.content or chunk.reasoning:
            self._parts += 1
            self._newest_at = now
            if self._first_at is None:
                self._first_at, self._first_ms = now, self._reported.predicted_ms
                self._first_n = max(1, self.predicted_n)
                found += self._prefill_done()
            found_text: tuple[tuple[Channel, str], ...] = (("reasoning", chunk.reasoning), ("answer", chunk.content))
            for channel, text in found_text:
                if text:
                    self._pending[channel] = self._pending.get(channel, "") + text
                    self.text_size += len(text)
        return found

    def _check(self, reported: Reported) -> None:
        """Drop counts that cannot be: fewer tokens than before, or more than any answer has."""
        before, now = self._reported.predicted_n, reported.predicted_n
        if now is not None and (now > _MOST_TOKENS or (before is not None and now < before)):
            self.lies += 1
            reported.predicted_n = reported.predicted_ms = None
        if (reported.draft_n_accepted or 0) > (reported.draft_n or 0):
            self.lies += 1
            reported.draft_n = reported.draft_n_accepted = None

    def _progress(self, processed: int, total: int, cached: int) -> PrefillProgress:
        total = max(total, 1)
        processed = min(processed, total)
        self._prefilled = processed == total
        return PrefillProgress(
            request_id=self._request_id, processed=processed, total=total, cache_n=min(cached, processed)
        )

    def _prefill_done(self) -> list[AnyEvent]:
        total, cached = self.prompt_total(), self._reported.cache_n or 0
        return [self._progress(total, total, cached)] if total and not self._prefilled else []

    def prompt_total(self) -> int:
        """Return the tokens of the prompt, reused ones too; 0: not reported."""
        reported = self._reported
        if reported.prompt_total is not None:
            return reported.prompt_total
        return (reported.cache_n or 0) + (reported.prompt_n or 0)

    def deltas(self, now: float) -> list[AnyEvent]:
        """Return the text that waits, and the speculation figures if it is time for them."""
        if not self._pending:
            return []
        self._advance()
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
        if figures is not None and figures.draft_n and now - self._updated >= _UPDATE_SECONDS:
            self._updated = now
            found.append(SpeculationUpdate(request_id=self._request_id, predicted_n=predicted_n, figures=figures))
        return found

    def _advance(self) -> None:
        """Move the time of the newest text, by the server's clock if known."""
        if self._first_at is None:
            return
        at_ms = 1e3 * (self._newest_at - self._started)
        if self._first_ms is not None and self._reported.predicted_ms is not None:
            at_ms = 1e3 * (self._first_at - self._started) + self._reported.predicted_ms - self._first_ms
        self._at_ms = max(self._at_ms, at_ms)

    def seen(self, load: ServerLoad) -> None:
        """Take in how busy the server is."""
        self._waited = self._waited or (self._first_at is None and bool(load.waiting))

    def _speculation(self) -> SpeculationFigures | None:
        reported = self._reported
        if not reported.draft_n:
            return self.server_figures
        accepted = reported.draft_n_accepted or 0
        passes = max(1, self.predicted_n - 1 - accepted)  # also those that drafted nothing
        newest = (passes, reported.draft_n, accepted)
        if not self._recent or self._recent[-1] != newest:
            self._recent.append(newest)
        while len(self._recent) > 2 and passes - self._recent[1][0] >= _RECENT_PASSES:
            self._recent.popleft()
        before = self._recent[0] if passes - self._recent[0][0] >= _RECENT_PASSES // 2 else (0, 0, 0)
        return SpeculationFigures(
            passes=passes,
            draft_n=reported.draft_n,
            draft_n_accepted=accepted,
            recent_draft_n=reported.draft_n - before[1],
            recent_draft_n_accepted=accepted - before[2],
            source="server",
        )

    def timings(self, seed: int) -> Timings:
        """Return the figures of the answer as far as it came."""
        reported, first = self._reported, self._first_at
        n, ttft_ms = self.predicted_n, 0.0 if first is None else 1e3 * (first - self._started)
        if reported.predicted_ms is not None:
            predicted_ms = reported.predicted_ms
        else:
            # The first part may hold several tokens, which took no time here: only what came after it counts.
            spans, took = n - self._first_n, 0.0 if first is None else 1e3 * (self._newest_at - first)
            predicted_ms = took * (n - 1) / spans if spans > 0 else 0.0
        network_ms, queue_ms = self._shares()
        speculation = self._speculation()
        total = self.prompt_total()
        prompt_n = reported.prompt_n if reported.prompt_n is not None else total - (reported.cache_n or 0)
        return Timings(
            cache_n=reported.cache_n or 0,
            prompt_n=max(0, prompt_n),
            prompt_ms=reported.prompt_ms or 0.0,
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
            approximate=reported.predicted_n is None and n > 0,
            reused_known=reported.cache_n is not None or first is None,
        )

    def _shares(self) -> tuple[float | None, float | None]:
        """Return what of the time to the first token went into (network, queue), in ms; None for what is not known.

        Connecting and one round trip are the network's. What neither it nor prefill nor loading the model explains is
        the queue, unless the server reports that, or it is short and no request was seen waiting. Earlier attempts are
        in neither.
        """
        reported = self._reported
        if self._first_at is None:
            return None, None
        waited_ms = 1e3 * (self._first_at - self.attempt.started)
        if reported.ttft_ms is not None:
            return max(0.0, waited_ms - reported.ttft_ms), reported.queue_ms
        if reported.prompt_ms is None or self._round_trip is None:
            return None, reported.queue_ms
        rest = max(0.0, waited_ms - reported.prompt_ms - (self._first_ms or 0.0) - (reported.load_ms or 0.0))
        network = min(rest, 1e3 * (self.attempt.connect_s + self._round_trip))
        if reported.queue_ms is not None:
            return network, reported.queue_ms
        unexplained = rest - network
        return network, unexplained if self._waited or unexplained >= _LEAST_QUEUE_MS else 0.0
