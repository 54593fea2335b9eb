"""Tests reading of streamed answers, however the bytes are cut."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpuchat.backend.remote import stream
from cpuchat.backend.remote.stream import decoded, lines, objects, valid_text
from cpuchat.base.errors import ServerError


async def pieces(data: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_events_are_found_however_they_arrive(end: bytes, size: int) -> None:
    parts = [b": a comment", b"event: message", b'data: {"a":1}', b"", b'data:{"b":', b"data: 2}", b"", b"id: 7"]
    data = end.join([*parts, b"", b""]) + b"\n"
    assert [one async for one in objects(pieces(data, size))] == [{"a": 1}, {"b": 2}]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        # The last one counts without the empty line unless it is cut.
        *((b'data: {"a":1}\n\ndata: : keepalive\n\ndata: ' + last, [{"a": 1}, *expected]) for last, expected in (
            (b'{"b":2}', [{"b": 2}]), (b'{"b":2}\n', [{"b": 2}]), (b'{"b":2}\n\n', [{"b": 2}]),
            (b"[DONE]", [None]), (b"[DONE]\n", [None]), (b'{"b":{"c":2}', []), (b'{"b":', []), (b'{"b":\n', []),
            (b'{"b":\ndata: 2}', [{"b": 2}]))),
        # Without the empty line between them they are parted.
        (b'data: {"a":\ndata: 1}\ndata: {"b":2}\ndata: [DONE]\n\n', [{"a": 1}, {"b": 2}, None]),
        (b'{"a":1} \t\n\n{"b":2} \n\ndata: [DONE] \n\n', [{"a": 1}, {"b": 2}, None]),
        (b'data: {"a":\ndata: 1} \n\n\ndata:  {"b":2}\ndata: [DONE]', [{"a": 1}, {"b": 2}, None]),
        (b'data: {\ndata:   "a": 1\ndata: }\n{"b":2}\ndata:[DONE]', [{"a": 1}, {"b": 2}, None]),
    ],
)  # fmt: skip
async def test_ends_of_events(data: bytes, expected: list[Any]) -> None:
    assert [one async for one in objects(pieces(data, 5))] == expected


async def test_an_event_of_many_lines_is_parsed_once_it_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []
    read, data = stream._object, b'data: {"a":[{}\n' + b"data: ,{}\n" * 1000 + b"data: ]}\n\n"

    def counted(data: bytes) -> dict[str, Any] | None:
        parsed.append(data)
        return read(data)

    monkeypatch.setattr(stream, "_object", counted)
    assert [one async for one in objects(pieces(data, 5))] == [{"a": [{}] * 1001}]
    assert len(parsed) <= 3


async def test_a_line_without_an_end_is_bounded() -> None:
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 65536

    with pytest.raises(ServerError, match="MiB"):
        async for _ in lines(endless()):
            pass


@given(st.binary(max_size=200))
def test_any_bytes_decode_or_are_refused(data: bytes) -> None:
    try:
        assert isinstance(decoded(data), dict)
    except ServerError as error:
        assert error.message.isprintable()


@given(st.text() | st.text(alphabet=st.characters(categories=["Cs", "L"])))
def test_text_is_valid_unicode(text: str) -> None:
    valid_text(text).encode()
