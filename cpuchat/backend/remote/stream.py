"""Reads what a server streams: bounded JSON objects, with their text, numbers and calls of tools checked; and adds up
what it reports of an answer, as the events and timings that a worker would send.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from cpuchat.base.errors import ServerError
from cpuchat.protocol.messages import AnyEvent, Channel, PrefillProgress, SpeculationUpdate, TextDelta, ToolCall
from cpuchat.protocol.timings import SpeculationFigures, Timings

MAX_EVENT = 1 << 20
"""Bytes of one event at most: an ordinary one has a few hundred."""
_DONE = b"[DONE]"
_LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")  # a CR at the end may be half of one


async def lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Split a byte stream at LF, CR LF or CR. Raises ServerError: a line is longer than `MAX_EVENT`."""
    rest = b""
    async for chunk in chunks:
        *whole, rest = _LINE_END.split(rest + chunk)
        for line in whole:
            yield line
        _require_size(rest)
    if rest:
        yield rest


def _require_size(data: bytes | bytearray) -> None:
    if len(data) > MAX_EVENT:
        raise ServerError(
            f"The server sent an event of more than {MAX_EVENT >> 20} MiB.",
            "Is this really an inference server? Check its address and its log.",
        )


async def objects(chunks: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any] | None]:
    """Yield the JSON objects of server-sent events, and of lines that are one alone; None at `[DONE]`, which ends it.

    Some servers leave out the empty line between events: an object on one line is an event, and one on several lines
    ends where the next one begins. Comments and other fields are skipped, a last object that was cut is dropped. Raises
    ServerError: what came is not a JSON object, or too long."""
    data = bytearray()  # of an event on several lines, which is parsed once
    async for line in lines(chunks):
        name, _, value = line.partition(b":")
        is_data = name in (b"data", b"error")  # llama-server has sent errors in a field of that name
        value = line if line.startswith(b"{") else value.removeprefix(b" ") if is_data else b""
        value = value.rstrip()
        is_done = value.lstrip() == _DONE
        if data and (not line or is_done or value.startswith(b"{")):  # one that is indented belongs to the event
            yield decoded(bytes(data))
            data.clear()
        if is_done:
            yield None
            return
        if not value or value.startswith(b":"):  # some keep a connection open by a comment in an event
            continue
        if not data and value.endswith(b"}") and (found := _object(value)) is not None:
            yield found
        else:
            data += value + b"\n"
            _require_size(data)
    if (found := _object(bytes(data))) is not None:
        yield found


def _object(data: bytes) -> dict[str, Any] | None:
    value = None
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(data)
    return value if isinstance(value, dict) else None


def decoded(data: bytes) -> dict[str, Any]:
    """Decode one JSON object; NaN and Infinity pass, which some servers write. Raises ServerError: it is not one."""
    if (value := _object(data)) is None:
        start = data[:60].decode(errors="replace")
        raise ServerError(
            f"The server sent invalid JSON: {start!r}{'…' if len(data) > 60 else ''}.",
            "Check the server's log, or a proxy in between.",
        )
    return value


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


def value_at(data: Any, path: str) -> Any:
    """Return the value at a path of names, "meta.size"; None where there is none."""
    for name in path.split("."):
        data = data.get(name) if isinstance(data, dict) else None
    return data


_MAX = 1e15  # of any count or time: what is larger is a mistake


def number_at(data: Any, path: str) -> float | None:
    """Return a count or a time; None when it is missing or cannot be."""
    value = value_at(data, path)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value <= _MAX else None


@dataclass(slots=True)
class Chunk:
    """One part of an answer. `finish` says why the answer ended, in the words of OpenAI ("stop", "length"). `figures`
    are those of `adapter.FIGURES` that it reports. `calls` are parts of calls of tools as they were sent (`CallParts`).
    """

    content: str = ""
    reasoning: str = ""
    finish: str = ""
    figures: dict[str, float] = field(default_factory=dict)
    calls: Any = None


_MAX_CALLS = 64
_LONGEST = 1 << 20  # characters of a call's arguments


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
        return self.arguments is not None or (self.text.endswith("}") and not self.call().problem)

    def call(self) -> ToolCall:
        arguments: Any = self.arguments
        if arguments is None:
            try:
                arguments = json.loads(self.text, strict=False) if self.text.strip() else {}
                arguments = json.loads(arguments, strict=False) if isinstance(arguments, str) else arguments
            except (ValueError, RecursionError):
                return ToolCall(name=self.name, id=self.id, problem="The arguments are not valid JSON.")
        if not isinstance(arguments, dict):
            return ToolCall(name=self.name, id=self.id, problem="The arguments are not a JSON object.")
        return ToolCall(name=self.name, id=self.id, arguments=arguments)


class CallParts:
    """The calls of one answer, from the parts in which a server sends them."""

    def __init__(self) -> None:
        self._parts: list[_Part] = []
        self._open: dict[int, _Part] = {}
        self._newest = 0

    def add(self, sent: Any) -> None:
        """Take in `tool_calls` of a part of an answer; what is none is left out."""
        for number, one in enumerate(sent[:_MAX_CALLS] if isinstance(sent, list) else ()):
            function = one.get("function") if isinstance(one, dict) else None
            if not isinstance(function, dict):
                continue
            name, call_id, index = valid_text(function.get("name")), valid_text(one.get("id")), one.get("index")
            if not isinstance(index, int):  # a part of the newest call, or whole calls
                index = number if len(sent) > 1 else self._newest
            part = self._open.get(index)
            # Some servers give all calls one index, or repeat the name in each part.
            if part is None or (name and part.name and part.differs(call_id)):
                if len(self._parts) >= _MAX_CALLS:
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
        return tuple(part.call() for part in self._parts if part.name)


_MAX_TOKENS = 1 << 31


class StreamTally:
    """The figures of one answer: the server's where it reports them, so that the way here is not booked as slow
    decoding. Tokens that it does not count are counted by its parts, which may hold several: then `approximate`.
    `started`: when the request arrived at the backend, monotonic seconds; `n_ctx`: of the model, 0 = not known."""

    def __init__(self, request_id: int, started: float, n_ctx: int) -> None:
        self.finish, self.calls = "", CallParts()
        self._request_id, self._started, self._n_ctx = request_id, started, n_ctx
        self._figures: dict[str, float] = {}
        self._parts = self._counted = 0  # parts with text; tokens in the deltas so far
        self._first_at: float | None = None
        self._newest_at = self._at_ms = 0.0
        self._first_ms: float | None = None  # predicted_ms of the first text
        self._first_n = 1
        self.pending: dict[Channel, str] = {}  # text that waits for `deltas`
        self._prefilled = False

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
        self.finish = chunk.finish or self.finish
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
            if chunk.reasoning:
                self.pending["reasoning"] = self.pending.get("reasoning", "") + chunk.reasoning
            if chunk.content:
                self.pending["answer"] = self.pending.get("answer", "") + chunk.content
        return found

    def _progress(self, processed: int, total: int, cached: int) -> PrefillProgress:
        processed = min(processed, total)
        self._prefilled = processed == total
        return PrefillProgress(
            request_id=self._request_id, processed=processed, total=total, cache_n=min(cached, processed)
        )

    def deltas(self) -> list[AnyEvent]:
        """Return the text that waits, and the speculation figures."""
        if not self.pending or self._first_at is None:
            return []
        at_ms = 1e3 * (self._newest_at - self._started)
        if self._first_ms is not None:  # by the server's clock
            at_ms = 1e3 * (self._first_at - self._started) + self._figures["predicted_ms"] - self._first_ms
        self._at_ms = max(self._at_ms, at_ms)
        found: list[AnyEvent] = []
        predicted_n, last = self.predicted_n, len(self.pending) - 1
        for number, (channel, text) in enumerate(self.pending.items()):
            n_tokens = predicted_n - self._counted if number == last else 0  # only the sum of a batch is known
            found.append(
                TextDelta(
                    request_id=self._request_id, text=text, channel=channel, n_tokens=max(0, n_tokens),
                    predicted_n=predicted_n, at_ms=self._at_ms,
                )
            )  # fmt: skip
        self._counted = max(predicted_n, self._counted)
        self.pending = {}
        if (figures := self._speculation()) is not None:
            found.append(SpeculationUpdate(request_id=self._request_id, predicted_n=predicted_n, figures=figures))
        return found

    def _speculation(self) -> SpeculationFigures | None:
        drafted, accepted = self._count("draft_n"), self._count("draft_n_accepted")
        if not drafted or accepted > drafted:
            return None
        return SpeculationFigures(
            passes=max(1, self.predicted_n - 1 - accepted),  # also those that drafted nothing
            source="server",
            draft_n=drafted,
            draft_n_accepted=accepted,
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
            prompt_ms=figures.get("prompt_ms", 0.0), predicted_n=n, predicted_ms=predicted_ms,
            ttft_ms=0.0 if first is None else 1e3 * (first - self._started), queue_ms=figures.get("queue_ms", 0.0),
            draft_n=speculation.draft_n if speculation is not None else 0,
            draft_n_accepted=speculation.draft_n_accepted if speculation is not None else 0,
            n_past=total + max(0, n - 1) if total else 0, n_ctx=self._n_ctx, seed=seed, speculation=speculation,
            approximate="predicted_n" not in figures and n > 0, reused_known="cache_n" in figures or first is None,
        )  # fmt: skip
