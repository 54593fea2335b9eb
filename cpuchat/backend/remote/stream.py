"""Reads streamed answers: server-sent events, or one JSON object per line. Bounded, whatever a server sends."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from cpuchat.errors import ServerError

MOST_EVENT = 1 << 20
"""Bytes of one event at most: an ordinary one has a few hundred."""
_DONE = b"[DONE]"


async def lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Split a byte stream at LF, CR LF or CR. A last line without its end is dropped: it was cut.

    Raises:
        ServerError: a line is longer than `MOST_EVENT`.
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


def _require_size(line: bytes | bytearray) -> None:
    if len(line) > MOST_EVENT:
        raise ServerError(
            f"The server sent an event of more than {MOST_EVENT >> 20} MiB.",
            "Is this really an inference server? Check its address and its log.",
        )


async def events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the data of server-sent events; comments (which keep the connection open) and other fields are skipped.

    Raises:
        ServerError: as `lines`.
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
            data.append(value.removeprefix(b" "))
            _require_size(b"".join(data) if len(data) > 1 else data[0])


async def objects(chunks: AsyncIterator[bytes], *, by_line: bool) -> AsyncIterator[dict[str, Any] | None]:
    """Yield the JSON objects of a stream, of events or (`by_line`) of lines; None at `[DONE]`, which ends it.

    Raises:
        ServerError: what came is not a JSON object, or too long.
    """
    parts = lines(chunks) if by_line else events(chunks)
    async for data in parts:
        if data.strip() == _DONE:
            yield None
            return
        if data.strip():
            yield decoded(data)


def decoded(data: bytes) -> dict[str, Any]:
    """Decode one JSON object; NaN and Infinity pass, which some servers write for numbers.

    Raises:
        ServerError: it is not one.
    """
    try:
        value = msgspec.json.decode(data)
    except (ValueError, RecursionError):  # msgspec's errors are ValueErrors
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


def valid_text(value: Any) -> str:
    """Return a text from JSON, "" for anything else; lone surrogates are replaced."""
    if not isinstance(value, str):
        return ""
    if value.isascii():
        return value
    return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
