"""Reads what a server streams: bounded JSON objects, with their text, numbers and calls of tools checked."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from cpuchat.base.errors import ServerError
from cpuchat.protocol.messages import ToolCall

MAX_EVENT = 1 << 20
"""Bytes of one event at most: an ordinary one has a few hundred."""
_DONE = b"[DONE]"
_LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")  # a CR at the end may be half of one


async def lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Split a byte stream at LF, CR LF or CR. A last line without its end is dropped if it was cut. Raises ServerError:
    a line is longer than `MAX_EVENT`.
    """
    rest = b""
    async for chunk in chunks:
        *whole, rest = _LINE_END.split(rest + chunk)
        for line in whole:
            yield line
        _require_size(rest)
    last = rest.removeprefix(b"data:").strip()
    with contextlib.suppress(ServerError):
        if last == _DONE or decoded(last):
            yield rest


def _require_size(data: bytes) -> None:
    if len(data) > MAX_EVENT:
        raise ServerError(
            f"The server sent an event of more than {MAX_EVENT >> 20} MiB.",
            "Is this really an inference server? Check its address and its log.",
        )


async def events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the data of server-sent events, and lines that are an object alone; comments and other fields are skipped.
    Raises ServerError: as `lines`.
    """
    data: list[bytes] = []
    async for line in lines(chunks):
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        is_data = name in (b"data", b"error")  # llama-server has sent errors in a field of that name
        # Some servers leave out the empty line between events.
        if data and (not line or (is_data and value.startswith((b"{", _DONE)))):
            yield b"\n".join(data)
            data = []
        if is_data:
            data.append(value)
            _require_size(b"".join(data))
        elif line.startswith(b"{"):
            yield line
    if data:  # the empty line at the end is missing
        yield b"\n".join(data)


async def objects(chunks: AsyncIterator[bytes]) -> AsyncIterator[dict[str, Any] | None]:
    """Yield the JSON objects of a stream; None at `[DONE]`, which ends it. Raises ServerError: what came is not a JSON
    object, or too long.
    """
    async for data in events(chunks):
        if data.strip() == _DONE:
            yield None
            return
        if data.strip() and not data.startswith(b":"):  # some keep a connection open by a comment in an event
            yield decoded(data)


def decoded(data: bytes) -> dict[str, Any]:
    """Decode one JSON object; NaN and Infinity pass, which some servers write for numbers. Raises ServerError: it is
    not one.
    """
    value = None
    with contextlib.suppress(ValueError, RecursionError):
        value = json.loads(data)
    if not isinstance(value, dict):
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
    """One part of an answer. `finish` says why the answer ended, in the words of OpenAI ("stop", "length"). `id` is the
    server's name for the answer. `figures` are those of `adapter.FIGURES` that it reports. `calls` are parts of calls
    of tools as they were sent (`CallParts`).
    """

    content: str = ""
    reasoning: str = ""
    finish: str = ""
    id: str = ""
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
