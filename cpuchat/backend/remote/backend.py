"""A model on a server as a backend: the events of a worker, from what the server streams."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator

import httpx
import msgspec

from cpuchat.backend.base import ModelBackend, ended
from cpuchat.backend.remote.adapter import Adapter, ListedModel, context_sizes, identify
from cpuchat.backend.remote.connection import Retries, ServerConnection, Status, require_stream
from cpuchat.backend.remote.stream import Chunk, StreamTally, objects
from cpuchat.base.errors import ContextFull, CpuchatError, Interrupted, ServerError, ServerUnreachable, UsageError
from cpuchat.config.servers import KeyRing, ServerModel
from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.protocol.messages import (
    ANSWER_SHARE,
    AnyEvent,
    ContextTrimmed,
    Failed,
    Generate,
    GenerationFinished,
    LoadCancelled,
    LoadOptions,
    LoadProgress,
    ModelLoaded,
    Reconnecting,
    StopReason,
)
from cpuchat.protocol.model_info import ModelInfo

LISTING_SECONDS = 20.0
MAX_TEXT = 16 << 20
"""Characters of an answer at most; one that goes on never ends."""
_PER_MESSAGE = 16  # characters that a template adds, about
_MAX_CHANGES = 8  # to a request that was too long
_CLOSED = Failed(code=Interrupted.code, message="The connection was closed.")
_STOP_REASONS: dict[str, StopReason] = {"length": "max_tokens", "stop": "end"}


class _Exchange:
    """One request to model `name`: sent again while nothing has come, without the oldest messages when the prompt is
    too long, and read to its end. `reconnected`: the server was away, and may have been started anew."""

    def __init__(self, adapter: Adapter, request: Generate, name: str, seed: int) -> None:
        self._adapter, self._request, self._name, self._seed = adapter, request, name, seed
        self._max_tokens = request.max_tokens
        self._answered = self._finished = False  # something has come; the server has said that it was all
        self.reconnected = False

    async def items(self) -> AsyncGenerator[Chunk | ContextTrimmed | Reconnecting, None]:
        """Yield what comes. Leaving early closes the connection, by which the server stops. Raises Status,
        httpx.HTTPError, ServerError, ContextFull: there is no answer, or it broke off."""
        changes, retries, request_id = 0, Retries(), self._request.request_id
        while True:
            try:
                async with contextlib.aclosing(self._chunks()) as chunks:  # at once, not when it is collected
                    async for chunk in chunks:
                        yield chunk
                return
            except (Status, httpx.HTTPError) as error:
                if self._finished:
                    return  # nothing of the answer is missing
                if self._answered:
                    raise
                if isinstance(error, Status) and changes < _MAX_CHANGES:
                    changes += 1
                    if sizes := context_sizes(error):
                        if (trimmed := self._shorten(*sizes)) is not None:
                            yield trimmed
                        continue
                    if self._adapter.without_rejected(error):
                        continue
                attempt, wait = retries.next(error)
                # A server that is loading was started anew.
                self.reconnected = self.reconnected or not attempt or not isinstance(error, Status)
                attempts = retries.limit if attempt else 0
                yield Reconnecting(request_id=request_id, attempt=attempt, attempts=attempts)
                await asyncio.sleep(wait)

    def _shorten(self, needed: int, n_ctx: int, counts_output: bool) -> ContextTrimmed | None:
        """Ask for a shorter answer if only it with Max tokens was too long, else leave out the oldest turns, by their
        share of the characters: system messages and the last turn stay, and an eighth of the context for the answer.

        Turns go in steps of a quarter of the context, so that the next prompts begin alike and are reused; for a prompt
        that none continues, of a sixteenth. Raises ContextFull when there is none to leave out, or none may be."""
        request, messages = self._request, self._request.messages
        # Without Max tokens a chat is answered up to the end of the context, a raw prompt with a few tokens.
        room = 0 if request.prompt is None else n_ctx - needed
        if counts_output and request.max_tokens > room >= (request.prompt is not None):
            self._request = msgspec.structs.replace(request, max_tokens=room)
            return None
        starts = [number for number, message in enumerate(messages) if message.role == "user"]
        sizes = [len(message.content) + len(message.reasoning) + _PER_MESSAGE for message in messages]
        step = max(1, n_ctx // (4 if request.when_full == "drop" else 16))
        goal = needed - max(1, -(-(needed - n_ctx + n_ctx // ANSWER_SHARE) // step)) * step
        kept, tokens = list[int](), needed
        for start in starts[1:]:
            kept = [n for n, message in enumerate(messages) if n >= start or message.role == "system"]
            tokens = round(needed * sum(sizes[n] for n in kept) / sum(sizes))
            if tokens <= goal:
                break
        if not kept or request.when_full not in ("drop", "drop_least"):
            alone = not kept or tokens >= n_ctx
            what, needed = ("last message", tokens) if alone else ("chat", needed)
            told = f"{needed:,}" if needed > n_ctx + 1 else f"more than {n_ctx:,}"
            raise ContextFull(
                f"The {what} needs {told} tokens, but the server's context has {n_ctx:,}.",
                "Shorten it, or start the server with a larger context.",
                alone=alone,
            )
        remaining = tuple(messages[n] for n in kept)
        self._request = msgspec.structs.replace(request, messages=remaining, max_tokens=self._max_tokens)
        dropped = {"dropped_messages": len(messages) - len(kept), "dropped_tokens": needed - tokens}
        return ContextTrimmed(request_id=request.request_id, n_ctx=n_ctx, **dropped)

    async def _chunks(self) -> AsyncGenerator[Chunk, None]:
        adapter, size = self._adapter, 0
        path, content = adapter.request(self._request, self._name, self._seed)
        try:
            async with adapter.connection.request(path, content) as response:
                async for data in objects(response.aiter_raw()):
                    if data is None:
                        self._finished = True
                        continue
                    chunk = adapter.chunk(data)
                    self._answered = True
                    size += len(chunk.content) + len(chunk.reasoning)
                    if size > MAX_TEXT:
                        problem = f"The answer is longer than {MAX_TEXT >> 20} million characters."
                        raise ServerError(problem, "Set Max tokens in the settings.")
                    self._finished = self._finished or bool(chunk.finish)
                    yield chunk
                if not (self._answered or self._finished):
                    require_stream(response, adapter.place)
        except (httpx.RemoteProtocolError, httpx.ReadError):
            if not self._answered:
                raise
        if not self._finished:
            problem = f"The connection to {adapter.place} was closed before the answer was complete."
            raise ServerUnreachable(problem, "Regenerate it (Ctrl+R), or check the server's log.")


class RemoteBackend(ModelBackend):
    """See `backend.base.Backend`. Nothing of a chat stays here: `forget` has nothing to delete."""

    def __init__(self, keys: KeyRing | None = None) -> None:
        super().__init__()
        self._keys = keys or KeyRing()
        self._adapter: Adapter | None = None
        self._lost = False  # the server was not reached last time: it may have been started anew
        self._arrived = 0.0  # when the newest request did, monotonic seconds
        self._killed = False

    @property
    def model(self) -> ModelInfo | None:
        """Return the model, also while its server is away."""
        return self._model

    async def _load(
        self, source: ServerModel, options: LoadOptions, spec: PlacementSpec
    ) -> AsyncGenerator[AnyEvent, None]:
        """Describe the model of the server, again while that is not reached or loads; it decides on options itself."""
        yield LoadProgress(phase="connecting", done=0, total=1)
        await self.unload()
        try:
            connection = await self._open(source.server)
        except CpuchatError as error:
            yield Failed.of(error)
            return
        retries, waits = Retries(), False
        try:
            while not self._cancelled.is_set():
                try:
                    found = await self._until_cancelled(identify(connection))
                except (Status, httpx.HTTPError) as error:
                    attempt, wait = retries.next(error)
                    if not attempt and not waits:
                        waits = True
                        yield LoadProgress(phase="waiting", done=0, total=1)
                    elif attempt:
                        yield Reconnecting(request_id=0, attempt=attempt, attempts=retries.limit)
                    await self._until_cancelled(asyncio.sleep(wait))
                    continue
                if found is not None:
                    self._model, self._adapter, self._lost = found.describe(source.name), found, False
                    yield ModelLoaded(model=self._model)
                    return
            yield LoadCancelled()
        except Exception as error:
            yield Failed.of(connection.translate(error))
        finally:
            if self._adapter is None:
                await connection.close()

    async def _open(self, server: str) -> ServerConnection:
        """Return a connection. Raises ServerError when its key, proxy or certificates cannot be used."""
        return await asyncio.to_thread(lambda: ServerConnection(server, self._keys.key(server)))

    async def models(self, server: str) -> tuple[str, tuple[ListedModel, ...]]:
        """Return what the server calls itself, and its models, within 20 s. Raises CpuchatError."""
        connection = await self._open(server)
        try:
            async with asyncio.timeout(LISTING_SECONDS):  # each request may be answered byte by byte
                adapter = await identify(connection)
            return adapter.kind.name, adapter.models
        except Exception as error:
            raise connection.translate(error) from None
        finally:
            await connection.close()

    def generate(self, request: Generate) -> AsyncGenerator[AnyEvent, None]:
        self._arrived = time.monotonic()
        return super().generate(request)

    @property
    def _is_ready(self) -> bool:
        return self._model is not None and self._adapter is not None and not self._lost

    async def _generate(self, request: Generate) -> AsyncGenerator[AnyEvent, None]:
        async with contextlib.aclosing(self._until_ready(request)) as events:
            async for event in events:
                yield event
        adapter, model = self._adapter, self._model
        if adapter is None or model is None or self._cancelled.is_set():
            return
        if (refused := _unsupported(adapter, request)) is not None:
            yield refused
            return
        seed = secrets.randbits(31) if request.sampling.seed is None else request.sampling.seed
        tally = StreamTally(request.request_id, self._arrived, model.n_ctx)
        failed: Failed | None = None
        exchange, sent = _Exchange(adapter, request, ServerModel.of(model.path).name, seed), float("-inf")
        items = exchange.items()
        # The next item is awaited while events are taken: a loop that ends can close what waits, not what is suspended.
        arriving = asyncio.ensure_future(anext(items, None))
        stopping = asyncio.ensure_future(self._cancelled.wait())
        try:
            while True:
                # Text does not wait for the next part of the answer, which may be long in coming.
                due = max(sent + request.output.frame_seconds - time.monotonic(), 0.0) if tally.pending else None
                await asyncio.wait({arriving, stopping}, timeout=due, return_when=asyncio.FIRST_COMPLETED)
                if self._cancelled.is_set():
                    break
                now = time.monotonic()
                if arriving.done():
                    if (item := arriving.result()) is None:
                        break
                    arriving = asyncio.ensure_future(anext(items, None))
                    for event in tally.add(item, now) if isinstance(item, Chunk) else [item]:
                        yield event
                if now - sent >= request.output.frame_seconds:
                    for event in tally.deltas():
                        sent = now
                        yield event
        except Exception as error:  # whatever a stranger's server brings about becomes a message
            failed = Failed.of(adapter.connection.translate(error), request.request_id)
        finally:
            stopping.cancel()
            await ended(arriving)
            await items.aclose()
        self._lost = exchange.reconnected
        for event in tally.deltas():
            yield event
        if self._killed:
            failed = msgspec.structs.replace(_CLOSED, request_id=request.request_id)
        if failed is not None and (self._killed or not self._cancelled.is_set()):
            self._lost = self._lost or failed.code == "server_unreachable"
            yield failed
        else:
            yield self._finished(adapter, tally, request, seed)

    def _finished(self, adapter: Adapter, tally: StreamTally, request: Generate, seed: int) -> GenerationFinished:
        notes: list[str] = []
        reason: StopReason = "cancelled" if self._cancelled.is_set() else _STOP_REASONS.get(tally.finish, "end")
        if tally.finish == "content_filter":
            notes.append("stopped by the server's content filter")
        timings, calls = tally.timings(seed), tally.calls.calls()
        # Servers have limits of their own (`cpuchat serve --max-tokens`), so only the figures tell a full context.
        reached = request.max_tokens and timings.predicted_n >= request.max_tokens
        if reason == "max_tokens" and not reached and timings.n_ctx and timings.n_past + 2 >= timings.n_ctx:
            reason = "context"
        if missed := adapter.missed(request):
            notes.append(f"{', '.join(name.replace('_', '-') for name in missed)} not supported by the server")
        if request.tools and not calls and adapter.ignores_tools(request, tally.prompt_total):
            notes.append("tools ignored by the server: its prompt is shorter than their descriptions")
        if self._model is not None and self._model.ignored != adapter.ignored:  # it has rejected one
            self._model = msgspec.structs.replace(self._model, ignored=adapter.ignored)
        return GenerationFinished(
            request_id=request.request_id,
            stop_reason=reason,
            timings=timings,
            note=" · ".join(notes),
            matches_grammar=True if not request.grammar else None if reason == "end" else False,
            calls=calls,
        )

    async def unload(self) -> None:
        adapter, self._adapter = self._adapter, None
        if adapter is not None:
            await adapter.connection.close()

    def kill(self) -> None:
        self._killed = True
        self._cancelled.set()

    async def close(self) -> None:
        self._cancelled.set()
        self._model = None
        await self.unload()


def _unsupported(adapter: Adapter, request: Generate) -> Failed | None:
    """Return why the server cannot answer a request; None: it can."""
    if request.grammar and not (adapter.kind.grammar or request.json_schema):
        problem, hint = "takes no grammars", "Give a JSON schema"
    elif request.continues and adapter.kind.continuing is None:
        problem, hint = "cannot continue an answer", "Regenerate it"
    else:
        return None
    message = f"{adapter.kind.name} at {adapter.place} {problem}."
    hint = f"{hint}, or use a llama-server, a vLLM or a model on this machine."
    return Failed(request_id=request.request_id, code=UsageError.code, message=message, hint=hint)
