"""One loaded model that answers requests of programs, one at a time while the others wait in a queue."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cpuchat.protocol.messages import AnyEvent, CallDelta, Failed, Generate, GenerationFinished, ModelLoaded
from cpuchat.protocol.model_info import EngineInfo, ModelInfo
from cpuchat.protocol.timings import Timings
from cpuchat.serving.errors import Refusal
from cpuchat.serving.metrics import Result, ServingMetrics
from cpuchat.serving.replies import ReplyProgress
from cpuchat.serving.requests import ParsedRequest, RequestReader
from cpuchat.session.conversation import Conversation

_MAX_NOTES = 100  # clients choose some of the words in them
_RETRY_SECONDS = 5


@dataclass(eq=False)
class RequestRecord:
    """A request, from before its body is read until its answer is sent. `queued_s` in the queue. `message` is fit for
    the log, `hint` says what whoever runs the server can do.
    """

    endpoint: str
    client: str
    result: Result = "cancelled"
    message: str = ""
    hint: str = ""
    queued_s: float = 0.0
    progress: ReplyProgress | None = None
    is_over: bool = False

    @property
    def timings(self) -> Timings | None:
        """Return the figures of its answer; None if the engine did nothing for it."""
        return self.progress.timings if self.progress is not None and self.progress.prompt is not None else None

    @property
    def stop_reason(self) -> str:
        finished = self.progress.finished if self.progress is not None else None
        return finished.stop_reason if finished is not None else ""

    def refuse(self, refusal: Refusal) -> None:
        self.message, self.hint = refusal.logged, refusal.hint
        is_refused = refusal.status < 500 or refusal.code in ("loading", "shutting_down", "unsupported")
        self.result = "queue_full" if refusal.code == "queue_full" else "refused" if is_refused else "failed"


class InferenceService:
    """Use from one event loop. Requests are refused until `loaded`. Nothing of the `conversation` is stored.

    `aliases`: names that the model answers to beside its own, the first is the one it goes by. `limit`: requests that
    may wait. `on_done`: called with every request that has ended; `on_note`, with what the log should say once.
    """

    def __init__(
        self,
        conversation: Conversation,
        *,
        aliases: tuple[str, ...] = (),
        limit: int = 16,
        on_done: Callable[[RequestRecord], None] = lambda done: None,
        on_note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.metrics = ServingMetrics(lambda: self.busy, lambda: self.waiting, lambda: conversation.figures())
        self.closing, self.started = False, int(time.time())
        self._conversation, self._aliases, self._limit = conversation, aliases, limit
        self._on_done, self._on_note = on_done, on_note
        self._notes = set[str]()
        self._untold: list[str] = []
        self._engine = asyncio.Lock()  # first come, first served
        self._waiting: set[RequestRecord] = set()
        self._info: ModelInfo | None = None
        self._reader: RequestReader | None = None
        self._is_lost = False  # the worker died, and its model could not be reloaded

    @property
    def model(self) -> ModelInfo:
        """Return the model, also while a dead worker is not yet replaced. Raises Refusal before it is loaded."""
        if self._info is None:
            raise Refusal(503, "The model is still loading. Retry in a moment.", "loading", retry_after=_RETRY_SECONDS)
        return self._info

    @property
    def engine(self) -> EngineInfo | None:
        return self._conversation.backend.engine

    @property
    def names(self) -> tuple[str, ...]:
        """Return all names that the model answers to, first the one it goes by. Raises Refusal before it is loaded."""
        file = Path(self.model.path)
        return tuple(dict.fromkeys(filter(None, (*self._aliases, file.stem, file.name, self.model.name))))

    @property
    def reader(self) -> RequestReader:
        """Return what reads requests for this model. Raises Refusal before it is loaded."""
        if self._reader is None:
            conversation = self._conversation
            self._reader = RequestReader(
                self.names, self.model, conversation.in_effect, conversation.speculation, note=self._note
            )
        return self._reader

    def _note(self, text: str) -> None:
        """Keep what the log should say with the next answer; called from any thread."""
        text = text.encode("utf-8", "replace").decode()
        if len(self._notes) < _MAX_NOTES and text not in self._notes:
            self._notes.add(text)
            self._untold.append(text)

    @property
    def busy(self) -> bool:
        return self._engine.locked()

    @property
    def waiting(self) -> int:
        """Return the number of requests in the queue, those whose body is still being read among them."""
        return len(self._waiting)

    def check_health(self) -> None:
        """Check that the model is there, or can be reloaded with the next request. Raises Refusal."""
        _ = self.model
        if self._is_lost:
            message = "The worker died, and the model could not be reloaded. See the server's log."
            raise Refusal(503, message, "not_loaded")

    def loaded(self, model: ModelInfo) -> None:
        """Begin to answer with this model."""
        self._info, self._reader, self._is_lost = model, None, False
        self.metrics.count_load()

    @contextlib.contextmanager
    def place(self, endpoint: str, client: str) -> Iterator[RequestRecord]:
        """Give a request a place in the queue inside the block, and count it at its end. Raises Refusal while loading
        or closing, or when the queue is full.
        """
        record = RequestRecord(endpoint, client)
        try:
            self._refuse_when_closing()
            _ = self.model
            if self.waiting >= self._limit + (not self.busy):
                message = f"The queue is full ({self.waiting} requests). Retry later."
                raise Refusal(503, message, "queue_full", retry_after=_RETRY_SECONDS)
            self._waiting.add(record)
            yield record
        except Refusal as refusal:
            record.refuse(refusal)
            raise
        finally:
            self._waiting.discard(record)
            self._end(record)

    def _end(self, record: RequestRecord) -> None:
        """Count a request and tell of it, once: before the end of its answer is sent."""
        if not record.is_over:
            record.is_over = True
            self.metrics.requests.labels(record.endpoint, record.result).inc()
            self._on_done(record)

    @contextlib.asynccontextmanager
    async def _turn(self, record: RequestRecord) -> AsyncIterator[None]:
        """Wait for the turn of a request, which lasts as long as the block. Raises Refusal: the server is closing."""
        arrived = time.monotonic()
        async with self._engine:
            self._waiting.discard(record)
            self._refuse_when_closing()
            record.queued_s = time.monotonic() - arrived
            yield

    async def answer(
        self, parsed: ParsedRequest, record: RequestRecord, progress: ReplyProgress
    ) -> AsyncGenerator[AnyEvent, None]:
        """Stream the events of one answer, which `progress` has followed; ends with `GenerationFinished`. Closing it
        early cancels the answer: once closed, the engine is idle or answers the next request.

        Raises:
            Refusal: the engine refused the request, or it failed; the server is closing.
        """
        while self._untold:
            self._on_note(self._untold.pop(0))
        record.progress = progress
        arrived = time.monotonic()
        try:
            async with self._turn(record):
                self.metrics.queued.observe(record.queued_s)
                try:
                    async with contextlib.aclosing(self._events(parsed.request, progress)) as events:
                        async for event in events:
                            if isinstance(event, Failed):
                                raise Refusal.of(event, self.model.n_ctx)
                            if isinstance(event, GenerationFinished) and event.stop_reason == "cancelled":
                                self._refuse_when_closing(is_closing=True)
                            yield event
                finally:
                    if progress.prompt is not None:
                        self.metrics.count_answer(progress.timings)
                        if progress.first_at is not None:
                            self.metrics.ttft.observe(progress.first_at - arrived)
            record.result = "ok"
        except Refusal as refusal:  # one in the middle of a stream is told in it
            record.refuse(refusal)
            raise
        except Exception:
            record.result = "failed"
            raise
        finally:
            self._end(record)

    async def count(self, parsed: ParsedRequest, record: RequestRecord) -> int:
        """Return how many tokens the prompt of a request has. Raises Refusal."""
        async with self._turn(record):
            n_tokens = await self._conversation.backend.count_prompt(parsed.request)
        if n_tokens is None:
            message = "The prompt cannot be counted: the chat template refuses it, or the model is not loaded."
            raise Refusal(400, message, "chat_template_failed")
        record.result = "ok"
        return n_tokens

    def _refuse_when_closing(self, is_closing: bool = False) -> None:
        if self.closing or is_closing:
            raise Refusal(503, "The server is shutting down.", "shutting_down")

    async def close(self) -> None:
        """End the running answer and those that wait; each gets an error."""
        self.closing = True
        await self._conversation.stop()

    async def _events(self, request: Generate, progress: ReplyProgress) -> AsyncGenerator[AnyEvent, None]:
        conversation, meter = self._conversation, self._conversation.meter
        meter.expect(request.speculation)
        meter.request_started(time.monotonic())
        is_reloading = conversation.model is None
        async with contextlib.aclosing(conversation.generate_detached(request)) as events:
            async for event in events:
                now = time.monotonic()
                meter.observe(event, now)
                if isinstance(event, GenerationFinished):  # not every engine tells calls as they are written
                    timings, n_told = event.timings, len(progress.calls)
                    for index, call in enumerate(event.calls[n_told:], n_told):
                        told = CallDelta(
                            request_id=event.request_id, index=index, name=call.name, id=call.id,
                            arguments=msgspec.json.encode(call.arguments).decode(),
                            predicted_n=timings.predicted_n, at_ms=timings.ttft_ms + timings.predicted_ms,
                        )  # fmt: skip
                        progress.follow(told, now)
                        yield told
                    await conversation.remember_speed(timings)
                progress.follow(event, now)
                if isinstance(event, ModelLoaded):
                    self.loaded(event.model)
                    is_reloading = False
                if isinstance(event, Failed) and is_reloading:
                    self._is_lost = True
                yield event
