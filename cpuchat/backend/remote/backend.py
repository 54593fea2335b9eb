"""A model on a server as a backend: the events of a worker, from what the server streams.

An `Exchange` is one request: sent again while nothing has come, with the oldest messages left out when the server
rejects the prompt as too long, and read to its end, with the server's load beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from typing import Any, TypeVar

import httpx
import msgspec

from cpuchat.backend.base import ModelBackend
from cpuchat.backend.process import ChildProcess
from cpuchat.backend.remote import connection
from cpuchat.backend.remote.adapter import Adapter, ListedModel
from cpuchat.backend.remote.connection import Connection, Retries, Status, read_body
from cpuchat.backend.remote.keys import KeyRing
from cpuchat.backend.remote.servers import identify
from cpuchat.backend.remote.stream import Attempt, Chunk, StreamTally, decoded, objects
from cpuchat.base.errors import ContextFull, CpuchatError, Interrupted, ServerError, ServerUnreachable, UsageError
from cpuchat.base.text import clean_line
from cpuchat.config.servers import ServerModel, host
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
    Message,
    ModelLoaded,
    Reconnecting,
    ServerLoad,
    StopReason,
)
from cpuchat.protocol.model_info import ModelInfo

_T = TypeVar("_T")
_PER_MESSAGE = 16  # characters that a template adds, about


def without_oldest(
    messages: Sequence[Message], needed: int, n_ctx: int, in_steps: bool = True
) -> tuple[tuple[Message, ...], int] | None:
    """Return the messages without the oldest turns, and how many tokens that saves by their share of the characters.

    System messages and the last turn stay. None when nothing can be left out. An eighth of the context is left for the
    answer. Turns go in steps of a quarter of the context: if only the overflow went, the prompt of a full chat would
    begin differently with every turn, and nothing that the server has cached could be reused. Without `in_steps`, for a
    prompt that none continues, in steps of a sixteenth: the server may report too few tokens. `needed`: tokens of the
    prompt with all of them.
    """
    starts = [number for number, message in enumerate(messages) if message.role == "user"]
    if len(starts) < 2:
        return None
    sizes = [len(message.content) + len(message.reasoning) + _PER_MESSAGE for message in messages]
    per_character = needed / sum(sizes)
    step = max(1, n_ctx // (4 if in_steps else 16))
    excess = needed - (n_ctx - n_ctx // ANSWER_SHARE)
    goal = needed - max(1, -(-excess // step)) * step
    for start in starts[1:]:
        kept = [n for n, message in enumerate(messages) if n >= start or message.role == "system"]
        tokens = round(per_character * sum(sizes[n] for n in kept))
        if tokens <= goal or start == starts[-1]:
            return tuple(messages[n] for n in kept), needed - tokens
    return None


MOST_TEXT = 16 << 20
"""Characters of an answer at most; one that goes on never ends."""
LOAD_SECONDS = 1.0
_MOST_CHANGES = 8  # to a request that was too long
_CUT = (httpx.RemoteProtocolError, httpx.ReadError)
_STREAMS = ("text/event-stream", "application/x-ndjson", "application/json", "text/plain", "")
_MOST_WAITING = 256  # parts that may wait to be read: the server is slowed down then
_REST_SECONDS = 0.1  # to read what a server sends after the end of an answer

Item = Attempt | Chunk | ContextTrimmed | Failed | Reconnecting | ServerLoad | None
"""None: the answer is complete."""


class Exchange:
    """Fills `items`, until None or `Failed`. Leaving it closes the connection, by which the server stops. `name`: of
    the model at the server.
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
            await self.items.put(Failed.of(found, self._request.request_id))

    async def _send(self) -> None:
        """Send the request, again while nothing has come and another attempt is of use. Raises Status, httpx.HTTPError,
        ServerError, ContextFull: there is no answer, or it broke off.
        """
        changes, retries = 0, Retries()
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
                attempt, wait = retries.next(error)
                # A server that is loading was started anew.
                self.reconnected = self.reconnected or not attempt or not isinstance(error, Status)
                attempts = len(connection.BACK_OFF) if attempt else 0
                await self.items.put(
                    Reconnecting(request_id=self._request.request_id, attempt=attempt, attempts=attempts)
                )
                await asyncio.sleep(wait)

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
        found = without_oldest(messages, needed, n_ctx, in_steps=self._request.when_full == "drop")
        if found is None or self._request.when_full not in ("drop", "drop_least"):
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
                too_long = ServerError("The server's answer is too long.", "Set Max tokens in the settings.")
                await self._take(decoded(await read_body(response.aiter_raw(), MOST_TEXT, too_long)))
                self._finished = True
            else:
                await self._read(response, by_line=adapter.by_line or "ndjson" in kind)
        if not self._finished:
            raise self._broken_off()

    async def _read(self, response: httpx.Response, *, by_line: bool) -> None:
        rest = response.aiter_raw()
        async for data in objects(rest, by_line=by_line):
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
                await asyncio.sleep(LOAD_SECONDS)


STOP_SECONDS = 1.0
"""Seconds in which a server has to stop after its connection was closed, before a note says that it has not."""
_POLL_SECONDS, _LATE_SECONDS = 0.02, 0.2
_LAST_LOAD_SECONDS = 1.0
LISTING_SECONDS = 20.0
_CLOSED = Failed(code=Interrupted.code, message="The connection was closed.")
_STOP_REASONS: dict[str, StopReason] = {"length": "max_tokens", "stop": "end"}


class RemoteBackend(ModelBackend[ChildProcess]):
    """See `backend.base.Backend`. Nothing of a chat stays here: `forget` has nothing to delete."""

    def __init__(self, keys: KeyRing | None = None) -> None:
        super().__init__()
        self._keys = keys or KeyRing()
        self._adapter: Adapter | None = None
        self._lost = False  # the server was not reached last time: it may have been started anew
        self._arrived = 0.0  # when the newest request did, monotonic seconds
        self._answer_id = ""
        self._killed = False

    @property
    def model(self) -> ModelInfo | None:
        """Return the model, also while its server is away."""
        return self._model

    async def _load(
        self, source: ServerModel, options: LoadOptions, spec: PlacementSpec
    ) -> AsyncGenerator[AnyEvent, None]:
        """Connect to the server and describe its model; the server decides on options and placement."""
        loading = asyncio.Event()
        connecting = asyncio.ensure_future(self._connect(source, loading))
        try:
            async with contextlib.aclosing(self._until_cancelled(connecting, loading)) as events:
                async for event in events:
                    yield event
            if not connecting.done() or connecting.cancelled():
                yield LoadCancelled()
                return
            try:
                self._model = connecting.result()
            except CpuchatError as error:
                yield Failed.of(error)
                return
            self._lost = False
            yield ModelLoaded(model=self._model)
        finally:
            connecting.cancel()

    async def _until_cancelled(
        self, work: asyncio.Future[ModelInfo], loading: asyncio.Event
    ) -> AsyncGenerator[AnyEvent, None]:
        """Report that the server is being contacted, or is `loading` its model, until `work` is done or the user
        cancels it."""
        yield LoadProgress(phase="connecting", done=0, total=1)
        stop, busy = (asyncio.ensure_future(event.wait()) for event in (self._cancelled, loading))
        try:
            await asyncio.wait({work, stop, busy}, return_when=asyncio.FIRST_COMPLETED)
            if busy.done() and not work.done() and not stop.done():
                yield LoadProgress(phase="waiting", done=0, total=1)
                await asyncio.wait({work, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                work.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await work
        finally:
            stop.cancel()
            busy.cancel()

    async def _connect(self, source: ServerModel, loading: asyncio.Event) -> ModelInfo:
        """Return what the server reports of the model, again and again while it is not reached or loads; sets `loading`
        then. Raises CpuchatError: it is not reached, refuses, or has no such model.
        """
        await self._disconnect()
        connection = await self._open(source.server)
        retries = Retries()
        try:
            while True:
                try:
                    adapter = await identify(connection)
                    info = await adapter.describe(source.name)
                    self._adapter = adapter
                    return info
                except (Status, httpx.HTTPError) as error:
                    attempt, wait = retries.next(error)
                    if not attempt:
                        loading.set()
                    await asyncio.sleep(wait)
        except BaseException as error:
            await connection.close()
            if isinstance(error, Exception):
                raise connection.translate(error) from None
            raise

    async def _open(self, server: str) -> Connection:
        """Return a connection. Raises ServerError when its key, proxy or certificates cannot be used."""
        return await asyncio.to_thread(lambda: Connection(server, self._keys.key(server)))

    async def models(self, server: str) -> tuple[str, tuple[ListedModel, ...]]:
        """Return what the server calls itself, and its models, within 20 s. Raises CpuchatError."""
        connection = await self._open(server)
        try:
            async with asyncio.timeout(LISTING_SECONDS):  # each request may be answered byte by byte
                adapter = await identify(connection)
            return adapter.kind, adapter.models
        except Exception as error:
            raise connection.translate(error) from None
        finally:
            await connection.close()

    def generate(self, request: Generate) -> AsyncGenerator[AnyEvent, None]:
        self._arrived = time.monotonic()
        return super().generate(request)

    def _is_ready(self, request: Generate) -> bool:
        return self._model is not None and self._adapter is not None and not self._lost

    async def _answer(self, request: Generate) -> AsyncGenerator[AnyEvent, None]:
        request_id = request.request_id
        adapter, model = self._adapter, self._model
        if adapter is None or model is None:
            return
        problem = hint = ""
        if request.grammar and not (adapter.takes_grammars or request.json_schema):
            problem, hint = f"{adapter.kind} at {adapter.place} takes no grammars.", "Give a JSON schema"
        elif request.continues and not adapter.continues:
            problem, hint = f"{adapter.kind} at {adapter.place} cannot continue an answer.", "Regenerate it"
        if problem:
            hint = f"{hint}, or use a llama-server, a vLLM or a model on this machine."
            yield Failed(request_id=request_id, code=UsageError.code, message=problem, hint=hint)
            return
        seed = secrets.randbits(31) if request.sampling.seed is None else request.sampling.seed
        tally = StreamTally(request_id, self._arrived, model.n_ctx, adapter.connection.round_trip)
        failed: Failed | None = None
        async with (
            Exchange(adapter, request, ServerModel.of(model.path).name, seed) as exchange,
            contextlib.aclosing(self._events(exchange, tally, adapter, request)) as events,
        ):
            async for event in events:
                if isinstance(event, Failed):
                    failed = event
                else:
                    yield event
            self._lost = exchange.reconnected
        self._answer_id = ""
        for event in tally.deltas(time.monotonic()):
            yield event
        if self._killed:
            failed = msgspec.structs.replace(_CLOSED, request_id=request_id)
        if failed is not None and not (self._cancelled.is_set() and not self._killed):
            self._lost = self._lost or failed.code == "server_unreachable"
            yield failed
            return
        needs_load = adapter.counts_beside and not self._cancelled.is_set()
        if needs_load and (load := await _in_time(adapter.load(request_id), _LAST_LOAD_SECONDS)) is not None:
            tally.server_figures = adapter.speculation(tally.predicted_n)
            yield load
        yield await self._finished(adapter, tally, request, seed)

    async def _events(
        self, exchange: Exchange, tally: StreamTally, adapter: Adapter, request: Generate
    ) -> AsyncGenerator[AnyEvent, None]:
        """Yield the events of an answer as they come, text no more often than the request wants; ends with the answer,
        or when it is cancelled."""
        stop = asyncio.ensure_future(self._cancelled.wait())
        arriving: asyncio.Future[Item] | None = None
        sent = float("-inf")
        try:
            while not self._cancelled.is_set():
                arriving = arriving or asyncio.ensure_future(exchange.items.get())
                wait = max(0.0, sent + request.output.frame_seconds - time.monotonic()) if tally.has_text else None
                await asyncio.wait({arriving, stop}, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
                now = time.monotonic()
                arrived: list[Item] = []
                if arriving.done():
                    arrived, arriving = [arriving.result()], None
                    while not exchange.items.empty():
                        arrived.append(exchange.items.get_nowait())
                for item in arrived:
                    for event in self._taken(item, tally, adapter, now):
                        yield event
                    if item is None or isinstance(item, Failed):
                        return
                if tally.has_text and now - sent >= request.output.frame_seconds:
                    sent = now
                    for event in tally.deltas(now):
                        yield event
        finally:
            stop.cancel()
            if arriving is not None:
                arriving.cancel()

    def _taken(self, item: Item, tally: StreamTally, adapter: Adapter, now: float) -> list[AnyEvent]:
        match item:
            case Chunk():
                found = tally.add(item, now)
                self._answer_id = tally.id
                return found
            case Attempt():
                tally.attempt = item
                return []
            case ServerLoad():
                tally.seen(item)
                tally.server_figures = adapter.speculation(tally.predicted_n)
                return [item]
            case None:
                return []
        return [item]

    async def _finished(self, adapter: Adapter, tally: StreamTally, request: Generate, seed: int) -> GenerationFinished:
        notes: list[str] = []
        if self._cancelled.is_set():
            reason: StopReason = "cancelled"
            if await _in_time(_stopped(adapter, seed), STOP_SECONDS + _LATE_SECONDS) is False:
                notes.append("server still generating")
        else:
            reason = _STOP_REASONS.get(tally.finish, "end")
        if tally.finish == "content_filter":
            notes.append("stopped by the server's content filter")
        timings = tally.timings(seed)
        # Servers have limits of their own (`cpuchat serve --max-tokens`), so only the figures tell a full context.
        reached = request.max_tokens and timings.predicted_n >= request.max_tokens
        if reason == "max_tokens" and not reached and timings.n_ctx and timings.n_past + 2 >= timings.n_ctx:
            reason = "context"
        if missed := adapter.missed(request):
            notes.append(f"{', '.join(name.replace('_', '-') for name in missed)} not supported by the server")
        if request.tools and not tally.calls.calls() and adapter.ignores_tools(request, tally.prompt_total()):
            notes.append("tools ignored by the server: its prompt is shorter than their descriptions")
        if self._model is not None and self._model.ignored != adapter.ignored:  # it has rejected one
            self._model = msgspec.structs.replace(self._model, ignored=adapter.ignored)
        if tally.lies:
            notes.append("implausible figures from the server ignored")
        return GenerationFinished(
            request_id=request.request_id,
            stop_reason=reason,
            timings=timings,
            note=" · ".join(notes),
            matches_grammar=True if not request.grammar else None if reason == "end" else False,
            calls=tally.calls.calls(),
        )

    async def end_reasoning(self) -> bool:
        """Let the model end its reasoning and answer now; False when the server cannot, or nothing is written."""
        if self._adapter is None or not self._answer_id:
            return False
        return await _in_time(self._adapter.end_reasoning(self._answer_id), None) or False

    async def unload(self) -> None:
        await self._disconnect()

    def kill(self) -> None:
        self._killed = True
        self._cancelled.set()

    async def close(self) -> None:
        self._cancelled.set()
        self._model = None
        await self._disconnect()

    async def _disconnect(self) -> None:
        adapter, self._adapter = self._adapter, None
        if adapter is not None:
            await adapter.connection.close()


async def _in_time(work: Coroutine[Any, Any, _T], seconds: float | None) -> _T | None:
    """Return the result of what does not matter much; None when it fails, or takes longer."""
    with contextlib.suppress(Exception):
        async with asyncio.timeout(seconds):
            return await work
    return None


async def _stopped(adapter: Adapter, seed: int) -> bool | None:
    """Return whether the server has stopped computing an answer, soon; None when it does not report that."""
    until = time.monotonic() + STOP_SECONDS
    while (stopped := await adapter.is_idle(seed)) is False and time.monotonic() < until:
        await asyncio.sleep(_POLL_SECONDS)
    return stopped
