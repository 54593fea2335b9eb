"""One request to a server: sent again while nothing has come, read to its end, with the server's load beside it."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import httpx
import msgspec

from cpuchat.backend.remote import connection
from cpuchat.backend.remote.adapter import Adapter
from cpuchat.backend.remote.chunk import Attempt, Chunk
from cpuchat.backend.remote.connection import Status, back_off, is_loading, may_retry, next_look
from cpuchat.backend.remote.stream import decoded, objects
from cpuchat.backend.remote.trim import without_oldest
from cpuchat.errors import ContextFull, CpuchatError, ServerError, ServerUnreachable
from cpuchat.protocol import ContextTrimmed, Failed, Generate, Reconnecting, ServerLoad
from cpuchat.servers import host
from cpuchat.text import clean_line

MOST_TEXT = 16 << 20
"""Characters of an answer at most; one that goes on never ends."""
_LOAD_SECONDS = 1.0
_MOST_CHANGES = 8  # to a request that was too long
_CUT = (httpx.RemoteProtocolError, httpx.ReadError)
_STREAMS = ("text/event-stream", "application/x-ndjson", "application/json", "text/plain", "")
_MOST_WAITING = 256  # parts that may wait to be read: the server is slowed down then
_REST_SECONDS = 0.1  # to read what a server sends after the end of an answer

Item = Attempt | Chunk | ContextTrimmed | Failed | Reconnecting | ServerLoad | None
"""None: the answer is complete."""


class Exchange:
    """Fills `items`, until None or `Failed`. Leaving it closes the connection, by which the server stops.

    Args:
        name: of the model at the server.
    """

    def __init__(self, adapter: Adapter, request: Generate, name: str, seed: int) -> None:
        self.items: asyncio.Queue[Item] = asyncio.Queue(_MOST_WAITING)
        self._adapter, self._request, self._name, self._seed = adapter, request, name, seed
        self.reconnected = False
        """Whether the server was away: it may have been started anew, with another model."""
        self._answered = False  # something has come
        self._finished = False  # the server has said so
        self._max_tokens = request.max_tokens
        self._size = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Exchange:
        self._adapter.begin(self._request)
        self._tasks = [asyncio.create_task(self._run())]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        # A loop that ends has cancelled them, and closes nested generators all at once: then this one must not wait.
        if pending := [task for task in self._tasks if not task.done()]:
            await asyncio.wait(pending)
        for task in self._tasks:
            if not task.cancelled():
                task.exception()  # seen: what `_watch` raises harms no answer

    async def _run(self) -> None:
        try:
            await self._send()
            await self.items.put(None)
        except Exception as error:  # whatever a stranger's server brings about becomes a message
            found = self._adapter.connection.translate(error)
            alone = isinstance(found, ContextFull) and found.alone
            await self.items.put(
                Failed(
                    code=found.code, message=found.message, hint=found.hint, request_id=self._request.request_id,
                    alone=alone,
                )
            )  # fmt: skip

    async def _send(self) -> None:
        """Send the request, again while nothing has come and another attempt is of use.

        Raises:
            Status, httpx.HTTPError, ServerError, ContextFull: there is no answer, or it broke off.
        """
        attempt = changes = looks = 0
        while True:
            try:
                await self._send_once()
                return
            except (Status, httpx.HTTPError) as error:
                if self._finished:
                    return  # nothing of the answer is missing
                if self._answered:
                    raise self._broken_off() if isinstance(error, _CUT) else error from None
                if isinstance(error, Status):
                    sizes = self._adapter.context_sizes(error)
                    if sizes is not None and changes < _MOST_CHANGES:
                        changes += 1
                        if not self._shortened(error, *sizes):
                            await self._trim(*sizes)
                        continue
                    if sizes is None and self._adapter.without_rejected(error):
                        continue
                if is_loading(looks, error):  # it was started anew
                    looks += 1
                    self.reconnected = True
                    await self.items.put(Reconnecting(request_id=self._request.request_id))
                    await next_look()
                    continue
                if not may_retry(attempt, error):
                    raise
                attempt += 1
                self.reconnected = self.reconnected or not isinstance(error, Status)
                attempts = len(connection.BACK_OFF)
                await self.items.put(
                    Reconnecting(request_id=self._request.request_id, attempt=attempt, attempts=attempts)
                )
                await back_off(attempt, error)

    def _shortened(self, status: Status, needed: int, n_ctx: int) -> bool:
        """Let the answer end with the context if only it with Max tokens was too long for that; False if not."""
        request = self._request
        if not request.max_tokens or not self._adapter.counts_output(status):
            return False
        # Without Max tokens a chat is answered up to the end of the context, a raw prompt with a few tokens.
        room = 0 if request.prompt is None else n_ctx - needed
        if request.prompt is not None and not 0 < room < request.max_tokens:
            return False
        self._request = msgspec.structs.replace(request, max_tokens=room)
        return True

    async def _trim(self, needed: int, n_ctx: int) -> None:
        """Leave out the oldest messages. Raises ContextFull when there is none to leave out, or none may be."""
        messages = self._request.messages
        found = without_oldest(messages, needed, n_ctx, in_steps=not self._request.reserve)
        if found is None or not self._request.trim:
            least = needed - (found[1] if found is not None else 0)
            alone = found is None or least >= n_ctx
            what, tokens = ("last message", least) if alone else ("chat", needed)
            told = f"{tokens:,}" if tokens > n_ctx + 1 else f"more than {n_ctx:,}"
            raise ContextFull(
                f"The {what} needs {told} tokens, but the server's context has {n_ctx:,}.",
                "Shorten it, or start the server with a larger context.",
                alone=alone,
            )
        kept, saved = found
        self._request = msgspec.structs.replace(self._request, messages=kept, max_tokens=self._max_tokens)
        await self.items.put(
            ContextTrimmed(
                request_id=self._request.request_id, dropped_messages=len(messages) - len(kept),
                dropped_tokens=saved, n_ctx=n_ctx,
            )
        )  # fmt: skip

    def _broken_off(self) -> ServerUnreachable:
        return ServerUnreachable(
            f"The connection to {host(self._adapter.connection.server)} was closed before the answer was complete.",
            "Regenerate it (Ctrl+R), or check the server's log.",
        )

    async def _send_once(self) -> None:
        adapter = self._adapter
        path, content = adapter.request(self._request, self._name, self._seed)
        if len(self._tasks) == 1 or self._tasks[1].done():  # a server may answer only after the queue
            self._tasks[1:] = [asyncio.create_task(self._watch())]
        async with adapter.connection.stream(path, content) as (response, attempt):
            kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
            if kind not in _STREAMS:
                raise ServerError(
                    f"{adapter.place} answered with {clean_line(kind)[:60]} instead of a stream of events.",
                    "Is this the address of an inference server, or of a login page or proxy before it?",
                )
            await self.items.put(attempt)
            if kind == "application/json" and not adapter.by_line:
                await self._take(decoded(await _whole(response)))
                self._finished = True
            else:
                await self._read(response)
        if not self._finished:
            raise self._broken_off()

    async def _read(self, response: httpx.Response) -> None:
        rest = response.aiter_raw()
        async for data in objects(rest, by_line=self._adapter.by_line):
            if data is None:
                self._finished = True
            else:
                await self._take(data)
        if self._finished and self._adapter.connection.is_kept:
            with contextlib.suppress(TimeoutError, httpx.HTTPError):
                async with asyncio.timeout(_REST_SECONDS):  # a response that is read to its end keeps its connection
                    async for _ in rest:
                        pass

    async def _take(self, data: dict[str, Any]) -> None:
        chunk = self._adapter.chunk(data)
        self._answered = self._answered or chunk.ahead is None
        self._size += len(chunk.content) + len(chunk.reasoning)
        if self._size > MOST_TEXT:
            raise ServerError(
                f"The answer is longer than {MOST_TEXT >> 20} million characters.", "Set Max tokens in the settings."
            )
        self._finished = self._finished or bool(chunk.finish)
        await self.items.put(chunk)

    async def _watch(self) -> None:
        """Read the load of the server every second while it answers."""
        with contextlib.suppress(Status, httpx.HTTPError, CpuchatError):
            while (load := await self._adapter.load(self._request.request_id)) is not None:
                await self.items.put(load)
                await asyncio.sleep(_LOAD_SECONDS)


async def _whole(response: httpx.Response) -> bytes:
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > MOST_TEXT:
            raise ServerError("The server's answer is too long.", "Set Max tokens in the settings.")
    return bytes(body)
