"""An inference server that behaves as a test wants: well, or in any wrong way. Speaks HTTP by hand."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cpuchat.backend.remote.backend import RemoteBackend
from cpuchat.config.servers import ServerModel
from cpuchat.protocol.messages import LoadOptions, ModelLoaded
from tests.support.chatting import collect, in_use

CERTIFICATE = Path(__file__).parent / "certificate.pem"
"""Of 127.0.0.1, with its key; signed by itself."""
Stream = Callable[["Reply"], Awaitable[None]]


@dataclass
class Asked:
    """One request that came."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class Reply:
    """Writes one response."""

    writer: asyncio.StreamWriter
    asked: Asked

    async def head(self, status: int = 200, kind: str = "text/event-stream", **headers: str) -> None:
        """Begin a response whose end is the end of the connection."""
        lines = [f"HTTP/1.1 {status} X", f"Content-Type: {kind}", "Connection: close"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        await self.raw(("\r\n".join(lines) + "\r\n\r\n").encode())

    async def raw(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def event(self, data: Any) -> None:
        await self.raw(b"data: " + json.dumps(data).encode() + b"\n\n")

    async def text(self, content: str, **more: Any) -> None:
        """Send a part of an answer."""
        await self.event({"id": "a1", "choices": [{"index": 0, "delta": {"content": content}}], **more})

    async def finish(self, reason: str = "stop", **more: Any) -> None:
        """Send the end of an answer."""
        await self.event({"id": "a1", "choices": [{"index": 0, "delta": {}, "finish_reason": reason}], **more})
        await self.raw(b"data: [DONE]\n\n")

    async def whole(self, *texts: str) -> None:
        """Send an answer of these texts."""
        await self.head()
        for text in texts:
            await self.text(text)
        await self.finish()

    async def json(self, data: Any, status: int = 200, **headers: str) -> None:
        await self.head(status, "application/json", **headers)
        await self.raw(json.dumps(data).encode())

    async def until_left(self) -> None:
        """Wait until the client has closed the connection."""
        with contextlib.suppress(ConnectionError):
            while True:
                await self.raw(b": ping\n\n")
                await asyncio.sleep(0.01)


async def _hello(reply: Reply) -> None:
    await reply.whole("Hello", " there", ".")


@dataclass
class RemoteServer:
    """`answer` writes the response to a chat; `pages` are what GET finds; `asked` is what came. `left` is set when a
    client has gone before its answer was complete."""

    answer: Stream = _hello
    pages: dict[str, Any] = field(default_factory=dict)
    owner: str = "somebody"
    asked: list[Asked] = field(default_factory=list)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""
    refused: int = 0
    """So many of the next requests for an answer are closed without a word."""

    def chats(self) -> list[Asked]:
        """Return the requests for an answer."""
        return [one for one in self.asked if one.method == "POST"]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            asked = await _read(reader)
            self.asked.append(asked)
            reply = Reply(writer, asked)
            if asked.method == "POST":
                if self.refused:
                    self.refused -= 1
                else:
                    await self.answer(reply)
            else:
                await self._page(reply)
        except ConnectionError:
            self.left.set()
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _page(self, reply: Reply) -> None:
        pages = {"/v1/models": {"object": "list", "data": [{"id": "org/some-Q4_K_M", "owned_by": self.owner}]}}
        page: Any = {**pages, **self.pages}.get(reply.asked.path)
        if callable(page):
            await page(reply)
        elif page is None:
            await reply.json({"error": {"message": "no such page"}}, 404)
        elif isinstance(page, str):
            await reply.head(200, "text/plain")
            await reply.raw(page.encode())
        else:
            await reply.json(page)


@contextlib.asynccontextmanager
async def remote_server(*, tls: bool = False, **options: Any) -> AsyncIterator[RemoteServer]:
    """Serve on a free port of this machine."""
    server, context = RemoteServer(**options), None
    if tls:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(CERTIFICATE)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=context)
    server.url = f"{'https' if tls else 'http'}://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listening.close()


@contextlib.asynccontextmanager
async def connected(answer: Stream | None = None, **options: Any) -> AsyncIterator[tuple[RemoteServer, RemoteBackend]]:
    """Serve, and connect a backend to the server."""
    serving = remote_server(**({"answer": answer} if answer else {}), **options)
    async with serving as server, in_use(RemoteBackend()) as backend:
        loaded = await collect(backend.load(ServerModel(server.url), LoadOptions()))
        assert isinstance(loaded.events[-1], ModelLoaded), loaded.events
        yield server, backend


async def _read(reader: asyncio.StreamReader) -> Asked:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.strip().split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Asked(method, path, headers, json.loads(body) if body else {})
