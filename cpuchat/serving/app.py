"""The HTTP interface: routes, bodies, streams."""

from __future__ import annotations

import asyncio
import contextlib
import re
import traceback
from collections.abc import Callable
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from cpuchat.base.processes import run_in_daemon_thread
from cpuchat.grammar.limits import parser_limits
from cpuchat.serving.anthropic import MessagesReply, read_messages
from cpuchat.serving.errors import ANTHROPIC_PATH, Refusal
from cpuchat.serving.infill import InfillReply, read_infill
from cpuchat.serving.openai_chat import ChatReply, CompletionReply, read_chat, read_completion
from cpuchat.serving.replies import Reply
from cpuchat.serving.requests import PARSE_SECONDS, ParsedRequest, RequestReader, quoted, too_slow
from cpuchat.serving.responses import ResponsesReply, read_response
from cpuchat.serving.server import Guard, local_user
from cpuchat.serving.service import InferenceService, RequestRecord

BODY_SECONDS = 60.0
"""A body must arrive within."""
QUEUED_SECONDS = 15.0
"""After which a stream that still waits is begun: clients and proxies give up on a silent connection."""
PING_SECONDS = 10.0
"""Of silence in a stream, after which a comment keeps the connection open."""
STALLED_SECONDS = 60.0
"""A client that reads nothing for so long is gone."""
DIALECTS: dict[str, tuple[str, Callable[[RequestReader, bytes], ParsedRequest], type[Reply]]] = {
    "chat": ("/v1/chat/completions", read_chat, ChatReply),
    "completions": ("/v1/completions", read_completion, CompletionReply),
    "infill": ("/v1/infill", read_infill, InfillReply),
    "responses": ("/v1/responses", read_response, ResponsesReply),
    "messages": (ANTHROPIC_PATH, read_messages, MessagesReply),
}
"""Paths, and who reads the requests and writes the answers."""

MAX_PARSED = 4  # requests at a time
_JSON = "application/json"
_INTERNAL = 500, "Internal error; see the server's log.", "internal_error"
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would hold the stream back
]
_ELSEWHERE = (
    "Here are /v1/chat/completions, /v1/completions, /infill, /v1/responses, /v1/messages and /v1/models. Not here are "
    "Ollama's own interface, and embeddings, which `llama-server --embeddings` computes beside this server."
)


class _Gone(Exception):
    """Raised when the client reads no more."""


class AnswerEndpoint:
    """Answers one kind of request. `make_reply` None: only the tokens of the prompt are counted."""

    def __init__(
        self,
        service: InferenceService,
        name: str,
        parse: Callable[[bytes], ParsedRequest],
        make_reply: Callable[[ParsedRequest], Reply] | None,
    ) -> None:
        self._service, self._name, self._parse, self._make_reply = service, name, parse, make_reply
        self._parsing = asyncio.Semaphore(MAX_PARSED)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; when its client leaves, whatever is done for it ends."""
        request = Request(scope, receive)
        client = request.client.host if request.client is not None else ""
        with self._service.place(self._name, client) as record:  # before the body is read
            body = await _body(request, self._service.reader.max_body)
            answering = asyncio.create_task(self._answer(body, record, scope, receive, send))
            leaving = asyncio.create_task(_disconnected(receive))
            try:
                await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (answering, leaving):
                    task.cancel()
                await asyncio.gather(answering, leaving, return_exceptions=True)
            if not answering.cancelled():
                answering.result()

    async def _answer(self, body: bytes, record: RequestRecord, scope: Scope, receive: Receive, send: Send) -> None:
        parsed = await self._read(body)
        parsed = parsed.of_client(f"{record.client} {await asyncio.to_thread(local_user, scope)}")
        program = Headers(scope=scope).get("user-agent", "")
        record.party = f"{parsed.request.state.owner} {program}"
        if self._make_reply is None:
            n_tokens = await self._service.count(parsed, record)
            return await _json({"input_tokens": n_tokens})(scope, receive, send)
        # Two tasks: a client that reads slowly does not hold up the engine, and one that hangs up cancels the answer.
        first, *more = parsed.choices()
        if len(more) >= (most := self._service.capacity):
            message = (
                f"`n` is {len(more) + 1}, but {most} answers can run and wait here. Raise --queue, or ask for fewer."
            )
            raise Refusal(400, message, "unsupported", param="n")
        reply, parts = self._make_reply(first), asyncio.Queue[bytes | Refusal | None]()
        others = [reply.another(one) for one in more]
        computing = asyncio.create_task(self._compute(reply, others, record, parts))
        try:
            with contextlib.suppress(_Gone):
                await _send_parts(send, reply, parts, is_stream=parsed.stream)
        finally:
            computing.cancel()
            await asyncio.gather(computing, return_exceptions=True)

    async def _read(self, body: bytes) -> ParsedRequest:
        """Read a request in a thread, so many at a time; one goes on when its client leaves. Raises Refusal."""
        await self._parsing.acquire()
        reading = asyncio.ensure_future(run_in_daemon_thread(lambda: self._parse(body)))
        reading.add_done_callback(lambda done: (self._parsing.release(), done.cancelled() or done.exception()))
        done, _ = await asyncio.wait((reading,), timeout=PARSE_SECONDS + 1)  # mostly it refuses by itself before
        if not done:
            raise too_slow()
        return reading.result()

    async def _compute(
        self, reply: Reply, others: list[Reply], record: RequestRecord, parts: asyncio.Queue[bytes | Refusal | None]
    ) -> None:
        """Put the answers, each a request in the queue, into the parts, then None; or the failure that ended them."""

        async def stream(one: Reply, record: RequestRecord) -> None:
            async with contextlib.aclosing(self._service.answer(one.parsed, record, one.progress)) as events:
                async for event in events:
                    if one.parsed.stream and (data := one.rendered(event)) is not None:
                        parts.put_nowait(data)

        async def stream_another(one: Reply) -> None:
            with self._service.place(self._name, record.client) as another:
                another.party = record.party
                await stream(one, another)

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(stream(reply, record))
                for one in others:
                    group.create_task(stream_another(one))
            parts.put_nowait(reply.end() if reply.parsed.stream else reply.whole())
            parts.put_nowait(None)
        except* Refusal as refusals:
            parts.put_nowait(next(one for one in refusals.exceptions if isinstance(one, Refusal)))
        except* Exception:
            traceback.print_exc()
            parts.put_nowait(Refusal(*_INTERNAL))


async def _send_parts(
    send: Send, reply: Reply, parts: asyncio.Queue[bytes | Refusal | None], *, is_stream: bool
) -> None:
    """Send the parts, and after a silence what keeps a stream open. Raises Refusal before anything was sent, so until
    the engine has accepted the prompt or a stream has waited for long; and _Gone."""
    started, more = False, True
    while more:
        try:
            async with asyncio.timeout(PING_SECONDS if started else QUEUED_SECONDS if is_stream else None):
                part = await parts.get()  # `wait_for` can lose a cancellation
        except TimeoutError:
            part = reply.ping
        more = not isinstance(part, Refusal | None)
        if isinstance(part, Refusal):
            if not started:
                raise part
            part = reply.failed(part)
        if not started:
            started = True
            length = (b"content-length", str(len(part or b"")).encode())
            headers = _STREAM_HEADERS if is_stream else [(b"content-type", _JSON.encode()), length]
            await _send_message(send, {"type": "http.response.start", "status": 200, "headers": headers})
        await _send_message(send, {"type": "http.response.body", "body": part or b"", "more_body": more})


async def _send_message(send: Send, message: dict[str, Any]) -> None:
    try:
        async with asyncio.timeout(STALLED_SECONDS):
            await send(message)
    except (TimeoutError, OSError):
        raise _Gone from None


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request, max_bytes: int) -> bytes:
    """Return the body, at most `max_bytes` bytes. Raises Refusal when it is too large or too slow, ClientDisconnect."""
    what = f"The body is larger than {max_bytes:,} bytes, more than the context holds."
    too_large = Refusal(413, what, "body_too_large")
    if (coding := request.headers.get("content-encoding", "identity")) != "identity":
        raise Refusal(415, f"The body is compressed ({quoted(coding)}). Send it as plain JSON.", "unsupported")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > max_bytes:
                    raise too_large
    except TimeoutError:
        raise Refusal(408, f"The body did not arrive within {BODY_SECONDS:.0f} seconds.", "body_timeout") from None
    return bytes(body)


def with_addresses(app: ASGIApp) -> ASGIApp:
    """Return an app that also takes paths without `/v1` or with two, with doubled slashes, or with one at the end."""

    async def corrected(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = re.sub("//+", "/", scope["path"]).rstrip("/")
            scope = {**scope, "path": re.sub("^(/v1(?![^/]))*", "/v1", path)}
        await app(scope, receive, send)

    return corrected


class Pages:
    """Answers requests about the server."""

    def __init__(self, service: InferenceService) -> None:
        self._service = service

    async def health(self, request: Request) -> Response:
        self._service.check_health()
        return _json({"status": "ok", "model": "loaded" if self._service.is_loaded else "unloaded"})

    async def models(self, request: Request) -> Response:
        return _json({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._service.names:
            raise Refusal(404, f"The model `{quoted(name)}` is not served here.", "model_not_found", param="model")
        return _json(self._model())

    def _model(self) -> dict[str, Any]:
        service, model = self._service, self._service.model
        numbers = {
            name: getattr(model, name) for name in ("n_vocab", "n_ctx", "n_ctx_train", "n_params", "size", "parallel")
        }
        return {
            "id": service.names[0],
            "aliases": list(service.names[1:]),
            "object": "model",
            "created": service.started,
            "owned_by": "cpuchat",
            "meta": {**numbers, "ftype": model.quantization, "draft": model.draft},
        }

    async def metrics(self, request: Request) -> Response:
        return Response(self._service.metrics.page(), media_type=CONTENT_TYPE_PLAIN_0_0_4)


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type=_JSON)


async def _on_error(request: Request, error: Exception) -> Response:
    """Turn a refusal, an unknown path or method, or an internal error into an error object."""
    refusal, headers = Refusal(*_INTERNAL), None
    match error:
        case ClientDisconnect():
            return Response(status_code=400)
        case Refusal():
            refusal = error
        case HTTPException():
            said = f"{request.method} {quoted(request.scope['raw_path'].decode('latin-1'))}: {error.detail}."
            refusal, headers = Refusal(error.status_code, said, "http"), error.headers
            if error.status_code == 404:
                refusal = Refusal(404, f"{said} {_ELSEWHERE}", "not_found")
    return refusal.response(headers, request.url.path)


def make_app(
    service: InferenceService, *, token: str = "", local: bool = True, origins: tuple[str, ...] = ()
) -> Starlette:
    """Return the ASGI app; see `Guard` for the arguments."""
    pages = Pages(service)
    parser_limits()  # imports llguidance: not while a request is read

    def endpoint(name: str, read: Callable[[RequestReader, bytes], ParsedRequest], kind: type[Reply] | None) -> Any:
        make = None if kind is None else lambda parsed: kind(service.names[0], service.build, parsed)
        return AnswerEndpoint(service, name, lambda data: read(service.reader, data), make)

    routes = [
        Route("/v1/health", pages.health),
        Route("/v1/models", pages.models),
        Route("/v1/models/{name:path}", pages.model),
        *(Route(path, endpoint(name, read, kind), methods=["POST"]) for name, (path, read, kind) in DIALECTS.items()),
        Route(f"{ANTHROPIC_PATH}/count_tokens", endpoint("count", read_messages, None), methods=["POST"]),
        Route("/v1/metrics", pages.metrics),
    ]
    middleware = [Middleware(with_addresses), Middleware(Guard, token=token, local=local, origins=origins)]
    if origins:
        cors = Middleware(CORSMiddleware, allow_origins=origins, allow_methods=["GET", "POST"], allow_headers=["*"])
        middleware.insert(0, cors)
    handlers: dict[Any, Any] = dict.fromkeys((Refusal, HTTPException, ClientDisconnect, Exception), _on_error)
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
