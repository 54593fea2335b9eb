"""Tests answers of a server that misbehaves, or is reached badly: a clear message, the partial answer kept."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import random
from collections.abc import AsyncGenerator

import pytest

from cpuchat.backend.remote import backend as remote
from cpuchat.backend.remote import connection
from cpuchat.backend.remote.backend import RemoteBackend
from cpuchat.base.errors import CpuchatError, ServerUnreachable
from cpuchat.config.servers import ServerModel
from cpuchat.protocol.messages import AnyEvent, LoadOptions, ModelLoaded, Reconnecting, TextDelta
from tests.support.chatting import Answer, chat, collect
from tests.support.remote_server import Reply, Stream, connected, remote_server


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "BACK_OFF", (0.0, 0.0, 0.0))


async def answered(answer: Stream, **options: object) -> Answer:
    async with connected(answer, **options) as (_, backend):
        return await collect(backend.generate(chat("Hello")))


async def sent(*parts: str | bytes | dict[str, object]) -> Answer:
    """Return what becomes of an answer of these parts: texts, bytes as they are, and events."""

    async def answer(reply: Reply) -> None:
        await reply.head()
        for part in parts:
            await {str: reply.text, bytes: reply.raw, dict: reply.event}[type(part)](part)

    return await answered(answer)


@pytest.mark.parametrize("path", ["/v1/models", "/api/tags"])
async def test_a_server_that_drips_its_models_is_not_waited_for(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "LISTING_SECONDS", 0.3)

    async def drip(reply: Reply) -> None:
        await reply.head(kind="application/json")
        await reply.until_left()

    async with remote_server(pages={path: drip}) as server:
        with pytest.raises(ServerUnreachable, match="timed out"):
            await RemoteBackend().models(server.url)


@pytest.mark.parametrize("seed", range(3))
async def test_a_connection_that_is_cut_anywhere_keeps_what_came(seed: int) -> None:
    whole = b"".join(b'data: {"choices":[{"delta":{"content":"word%d "}}]}\n\n' % number for number in range(20))
    cut = random.Random(seed).randrange(1, len(whole))
    got = await sent(whole[:cut])
    assert got.failed.code == "server_unreachable"
    complete = whole[:cut].count(b"}}]}\n")
    assert got.text == "".join(f"word{number} " for number in range(complete))


async def test_a_lost_connection_is_tried_again_before_the_first_word_until_it_is_given_up() -> None:
    async with connected() as (server, backend):
        server.refused = 2
        got = await collect(backend.generate(chat("Hello")))
        assert got.text == "Hello there." and len(server.chats()) == 3
        assert [(event.attempt, event.attempts) for event in got.of(Reconnecting)] == [(1, 3), (2, 3)]
        server.refused = 100
        assert (await collect(backend.generate(chat("Hello")))).failed.code == "server_unreachable"
        server.refused = 0
        again = await collect(backend.generate(chat("Hello")))
        assert again.text == "Hello there."
        assert again.of(ModelLoaded), "it may have been started anew, with another model"


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (401, "server_refused", "API key"),
        (404, "server", "no such model"),
        (429, "server_busy", "rate"),
        (500, "server", "failed (500)"),
        (503, "server_busy", "not ready"),
        (307, "server", "redirects"),
        (400, "server", "rejected"),
    ],
)
async def test_a_refusal_says_what_to_do(status: int, code: str, said: str) -> None:
    async def answer(reply: Reply) -> None:
        await reply.json({"error": {"message": "because \x1b[31mof this"}}, status)

    got = await answered(answer)
    assert got.failed.code == code
    assert said in f"{got.failed.message} {got.failed.hint}"
    assert "of this" in got.failed.message or status == 307
    assert "\x1b" not in got.failed.message


@pytest.mark.parametrize(
    ("status", "error"), [(429, "slow down"), (503, {"message": "The queue is full.", "code": "queue_full"})]
)
async def test_a_busy_server_is_waited_for_only_when_it_is_short(status: int, error: object) -> None:
    async def answer(reply: Reply) -> None:
        await reply.json({"error": error}, status, Retry_After="3600")

    async with connected(answer) as (server, backend):
        got = await collect(backend.generate(chat("Hello")))
        assert got.failed.code == "server_busy" and "3600 s" in got.failed.hint
        assert len(server.chats()) == 1


async def test_a_stream_that_never_ends_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MAX_TEXT", 10_000)

    async def answer(reply: Reply) -> None:
        await reply.head()
        while True:
            await reply.text("on and on " * 10)

    got = await answered(answer)
    assert got.failed.code == "server" and "longer than" in got.failed.message
    assert got.text.startswith("on and on ")


@pytest.mark.parametrize(
    "part",
    [
        {"error": {"message": "out of memory"}},
        {"error": "out of memory"},
        {"object": "error", "message": "out of memory", "code": 500},
        {"choices": [{"delta": {"content": ""}, "error": {"message": "out of memory"}, "finish_reason": "error"}]},
        {"type": "error", "message": "out of memory"},
        {"detail": "out of memory"},
        b"data: [1]\n\n",
        b"data: \xff\xfe\n\n",
        b"data: " + b"{" * 5000 + b"\n\n",
    ],
    ids=["object", "text", "vllm", "in a choice", "anthropic", "detail", "no object", "no text", "deep"],
)
async def test_an_error_in_the_stream_is_no_end_of_the_answer(part: dict[str, object] | bytes) -> None:
    got = await sent("before", part, b"data: [DONE]\n\n")
    said = "failed: out of memory." if isinstance(part, dict) else "invalid JSON"
    assert got.text == "before" and said in got.failed.message


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'[{"error": {"code": 400, "message": "no tools here"}}]', "no tools here"),
        (b'{"detail": [{"loc": ["body", "messages", 0], "msg": "not permitted"}]}', "body.messages.0: not permitted"),
        (b'{"message": {"detail": [{"loc": ["body", "n"], "msg": "not permitted"}]}}', "body.n: not permitted"),
        (b"no tools here", "no tools here"),
        (b"<html><title>Bad request</title>", ""),
        (b"[" * 5000, ""),
    ],
    ids=["gemini", "fastapi", "mistral", "text", "page", "deep"],
)
async def test_a_refusal_says_what_the_server_said(body: bytes, reason: str) -> None:
    async def answer(reply: Reply) -> None:
        await reply.head(400, "application/json")
        await reply.raw(body)

    got = await answered(answer)
    if reason:
        assert got.failed.message.endswith(f"(400): {reason}.")
    else:
        assert "rejected the request (400)" in got.failed.message


@pytest.mark.parametrize(
    ("deltas", "text", "reasoning"),
    [
        (
            [{"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}]}, {"content": "A"}],
            "A",
            "hm",
        ),
        ([{"content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}, 7]}], "AB", ""),
        ([{"refusal": "I cannot."}], "I cannot.", ""),
        ([{"reasoning": "hm", "content": None}, {"content": "A"}], "A", "hm"),
    ],
    ids=["magistral", "texts", "refusal", "reasoning"],
)
async def test_text_in_parts_is_text(deltas: list[object], text: str, reasoning: str) -> None:
    got = await sent(*({"choices": [{"delta": delta}]} for delta in deltas), b"data: [DONE]\n\n")
    assert (got.text, got.reasoning) == (text, reasoning)


async def test_a_whole_message_at_the_end_is_not_written_again() -> None:
    end = {"delta": {}, "message": {"content": "Hello"}, "finish_reason": "content_filter"}
    got = await sent("Hello", {"choices": [end]})
    assert got.text == "Hello" and got.finished.note == "stopped by the server's content filter"


@pytest.mark.parametrize("lie", ["-5", "NaN", "1" + "0" * 400, '"many"', "true"])
async def test_figures_that_cannot_be_are_not_shown(lie: str) -> None:
    usage = f'{{"prompt_tokens": {lie}, "completion_tokens": {lie}}}'
    got = await sent("a ", "b ", "c ", f'data: {{"choices":[],"usage":{usage}}}\n\ndata: [DONE]\n\n'.encode())
    assert got.text == "a b c "
    timings = got.timings
    assert timings.predicted_n == 3 and timings.approximate
    assert timings.prompt_n == 0


async def test_an_answer_that_is_not_streamed_is_taken_whole() -> None:
    async def answer(reply: Reply) -> None:
        message = {"role": "assistant", "content": "All of it."}
        usage = {"prompt_tokens": 9, "completion_tokens": 4}
        await reply.json({"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage})

    got = await answered(answer)
    assert got.text == "All of it."
    assert got.timings.predicted_n == 4 and not got.timings.approximate


@pytest.mark.parametrize(
    ("headers", "body", "said"),
    [
        ({"kind": "text/html"}, b"<html>\n<title>Log in</title>\n", "it sent text/html."),
        ({"Content_Encoding": "gzip"}, gzip.compress(b'data: {"choices":[]}\n\n'), "it sent text/event-stream, gzip."),
    ],
    ids=["page", "compressed"],
)
async def test_what_is_no_stream_of_a_server_is_named(headers: dict[str, str], body: bytes, said: str) -> None:
    async def answer(reply: Reply) -> None:
        await reply.head(**headers)  # type: ignore[arg-type]
        await reply.raw(body)

    got = await answered(answer)
    assert got.failed.code == "server" and got.failed.message.endswith(said) and "login page" in got.failed.hint


async def test_an_address_that_only_looks_like_one_is_named() -> None:
    address = "http://192.168.1.300:8080"
    got = await collect(RemoteBackend().load(ServerModel(address), LoadOptions()))
    assert "not a valid address" in got.failed.message
    with pytest.raises(CpuchatError, match="not a valid address"):
        await RemoteBackend().models(address)


async def test_a_connection_that_is_lost_after_the_end_loses_nothing() -> None:
    async def answer(reply: Reply) -> None:
        await reply.raw(b"HTTP/1.1 200 X\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        part = b'data: {"choices":[{"delta":{"content":"All."},"finish_reason":"stop"}]}\n\n'
        await reply.raw(b"%x\r\n%s\r\n" % (len(part), part))

    got = await answered(answer)
    assert (got.text, got.finished.stop_reason) == ("All.", "end")


@pytest.mark.parametrize(("n_ctx", "reason"), [(14, "context"), (4096, "max_tokens"), (None, "max_tokens")])
async def test_only_an_answer_that_fills_the_context_is_said_to_have(n_ctx: int | None, reason: str) -> None:
    """Otherwise it met Max tokens, or a limit of the server's own."""

    async def answer(reply: Reply) -> None:
        await reply.head()
        await reply.text("cut")
        await reply.finish("length", usage={"prompt_tokens": 9, "completion_tokens": 5})

    pages = {"/v1/models": {"data": [{"id": "m", "owned_by": "vllm", "max_model_len": n_ctx}]}}
    async with connected(answer, pages=pages) as (_, backend):
        assert (await collect(backend.generate(chat("Hello", max_tokens=5)))).finished.stop_reason == "max_tokens"
        assert (await collect(backend.generate(chat("Hello", max_tokens=6)))).finished.stop_reason == reason
        assert (await collect(backend.generate(chat("Hello")))).finished.stop_reason == reason


def test_a_loop_that_ends_in_the_middle_of_an_answer_closes_it_without_an_error() -> None:
    """It closes all generators at once: that of the answer, and those around it that close it as well."""
    errors: list[str] = []
    suspended: list[AsyncGenerator[AnyEvent, None]] = []

    async def answer(reply: Reply) -> None:
        await reply.head()
        await reply.text("Hello")
        await reply.until_left()

    async def passed_on(backend: RemoteBackend) -> AsyncGenerator[AnyEvent, None]:
        async with contextlib.aclosing(backend.generate(chat("Hello"))) as events:
            async for event in events:
                yield event

    async def leave() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(
            lambda _, context: errors.append(context["message"]) if "asyncgen" in context else None
        )
        async with connected(answer) as (_, backend):
            suspended.append(passed_on(backend))
            async for event in suspended[0]:
                if isinstance(event, TextDelta):
                    return

    asyncio.run(leave())
    assert errors == []
