"""One loaded model that answers requests of programs: as many at once as the engine can, others wait in a queue."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from cpuchat import __version__
from cpuchat.base.errors import CpuchatError
from cpuchat.models.gguf.header import known_as
from cpuchat.models.ollama import is_content
from cpuchat.protocol.messages import AnyEvent, CallDelta, Failed, Generate, GenerationFinished, ModelLoaded
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.protocol.timings import Timings
from cpuchat.serving.errors import Refusal
from cpuchat.serving.fair_queue import FairQueue, QueueTurn
from cpuchat.serving.metrics import Result, ServingMetrics
from cpuchat.serving.replies import ReplyProgress
from cpuchat.serving.requests import ParsedRequest, RequestReader
from cpuchat.session.conversation import Conversation
from cpuchat.telemetry.meter import ChatFigures, Meter

_MAX_NOTES = 100  # clients choose some of the words in them
_RETRY_SECONDS = 5


@dataclass(eq=False)
class RequestRecord:
    """A request, from before its body is read until its answer is sent. `client` is its address; `party` is who takes
    turns with others in the queue, where it was for `queued_s`. At most `n_at_once` ran together, this one included.
    `message` is fit for the log, `hint` says what whoever runs the server can do."""

    endpoint: str
    client: str
    result: Result = "cancelled"
    message: str = ""
    hint: str = ""
    party: str = ""
    queued_s: float = 0.0
    n_at_once: int = 1
    progress: ReplyProgress | None = None
    stops: tuple[str, ...] = ()
    is_over: bool = False

    @property
    def timings(self) -> Timings | None:
        """Return the figures of its answer; None if the engine did nothing for it."""
        return self.progress.timings if self.progress is not None and self.progress.prompt is not None else None

    @property
    def stop_reason(self) -> str:
        finished = self.progress.finished if self.progress is not None else None
        if finished is None:
            return ""
        by_itself = finished.stop_reason == "stop_string" and finished.stop_string not in self.stops  # as at a line
        return "end" if by_itself else finished.stop_reason

    def refuse(self, refusal: Refusal) -> None:
        self.message, self.hint = refusal.logged, refusal.hint
        is_refused = refusal.status < 500 or refusal.code in ("loading", "shutting_down", "unsupported")
        self.result = "queue_full" if refusal.code == "queue_full" else "refused" if is_refused else "failed"


class InferenceService:
    """Use from one event loop. Requests are refused until `loaded`. Nothing of the `conversation` is stored.

    `aliases`: names of the model beside its own, first the one it goes by. `limit`: requests that may wait. `parallel`
    as of `LoadOptions`. `idle_minutes` without a request unload the model, which the next one loads again (0: never).
    `on_done` is called with every request that has ended, `on_note` with what the log should say."""

    def __init__(
        self,
        conversation: Conversation,
        *,
        aliases: tuple[str, ...] = (),
        limit: int = 16,
        parallel: int = 1,
        idle_minutes: float = 0.0,
        on_done: Callable[[RequestRecord], None] = lambda done: None,
        on_note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.metrics = ServingMetrics(
            {
                "requests_running": ("Requests that are answered now.", lambda: self._queue.n_running),
                "requests_waiting": ("Requests that are queued now.", lambda: self.waiting),
                "slots": ("Requests that can be answered at once.", lambda: self._queue.n_slots),
                "model_loaded": ("1 while the model is in memory.", lambda: float(self.is_loaded)),
            },
            self.figures,
        )
        conversation.parallel = parallel
        self.closing, self.started = False, int(time.time())
        self._conversation, self._aliases, self._limit = conversation, aliases, limit
        self._on_done, self._on_note = on_done, on_note
        self._notes = set[str]()
        self._untold: list[str] = []
        self._queue = FairQueue(max(parallel, 1))  # until the load tells how many it has
        self._waiting: set[RequestRecord] = set()
        self._answers: dict[int, tuple[RequestRecord, Meter]] = {}  # that are written, by their slots
        self._last: tuple[int, Meter] | None = None  # of the answer that ended last, unless in the first slot
        self._endings = set[asyncio.Timeout]()  # of these, when the server closes
        self._idle_minutes, self._n_open = idle_minutes, 0
        self._idle_timer: asyncio.TimerHandle | None = None
        self._changing: asyncio.Task[Failed | None] | None = None  # a load or an unload after the first load
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
    def build(self) -> str:
        """Return the version of the program, and of its engine."""
        engine = self._conversation.backend.engine
        return f"cpuchat-{__version__}" + (f"-llama.cpp-{engine.llama_commit or engine.version}" if engine else "")

    @property
    def names(self) -> tuple[str, ...]:
        """Return all names that the model answers to, first the one it goes by. Raises Refusal before it is loaded."""
        file = Path(self.model.path)
        name = known_as(file)
        of_file = () if is_content(file) else (file.stem, file.name)  # nobody types a hash
        own = name, name.removesuffix(":latest"), *of_file, self.model.name
        return tuple(dict.fromkeys(filter(None, (*self._aliases, *own))))

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
    def waiting(self) -> int:
        """Return the number of requests in the queue, those whose body is still being read among them."""
        return len(self._waiting)

    @property
    def capacity(self) -> int:
        """Return how many requests can run and wait together."""
        return self._limit + self._queue.n_slots

    @property
    def is_loaded(self) -> bool:
        """Return whether the model is in memory; an idle one may not be."""
        return self._conversation.model is not None

    def figures(self) -> dict[int, ChatFigures]:
        """Return those of the answers that are written, by their slots; else of the one that ended last."""
        now = time.monotonic()
        found = {slot: meter.figures(now) for slot, (_, meter) in self._answers.items()}
        if not found and self._last is not None:
            return {self._last[0]: self._last[1].figures(now)}
        return found or {0: self._conversation.figures()}

    def check_health(self) -> None:
        """Check that the model is there, or can be reloaded with the next request. Raises Refusal."""
        _ = self.model
        if self._is_lost:
            message = "The worker died, and the model could not be reloaded. See the server's log."
            raise Refusal(503, message, "not_loaded", retry_after=_RETRY_SECONDS)

    def loaded(self, model: ModelInfo) -> None:
        """Begin to answer with this model."""
        self._info, self._reader, self._is_lost, self._last = model, None, False, None
        self._queue.resize(max(model.parallel, 1))
        self.metrics.counters["model_loads"].inc()
        self._watch_idleness()

    @contextlib.contextmanager
    def place(self, endpoint: str, client: str) -> Iterator[RequestRecord]:
        """Give a request a place in the queue inside the block; count it. Raises Refusal: loading, closing, or full."""
        record = RequestRecord(endpoint, client, party=client)
        self._n_open += 1
        self._watch_idleness()
        try:
            self._refuse_when_closing()
            _ = self.model
            if self.waiting >= self._limit + max(self._queue.n_slots - self._queue.n_running, 0):
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
            self._n_open -= 1
            self._watch_idleness()

    def _end(self, record: RequestRecord) -> None:
        """Count a request and tell of it, once: before the end of its answer is sent."""
        if not record.is_over:
            record.is_over = True
            self.metrics.requests.labels(record.endpoint, record.result).inc()
            self._on_done(record)

    @contextlib.asynccontextmanager
    async def _turn(self, record: RequestRecord, turn: QueueTurn) -> AsyncIterator[None]:
        """Wait for the turn of a request and for the model; it lasts as long as the block, or until the server closes.
        Raises Refusal: it is closing, or the model cannot be loaded again."""
        arrived = time.monotonic()
        async with self._queue.slot(turn):
            self._waiting.discard(record)
            self._refuse_when_closing()
            record.queued_s = time.monotonic() - arrived
            ending = asyncio.timeout(None)
            self._endings.add(ending)
            try:
                async with ending:
                    await self._ensure_loaded()
                    yield
            except TimeoutError:
                self._refuse_when_closing(ending.expired())
                raise
            finally:
                self._endings.discard(ending)

    async def answer(
        self, parsed: ParsedRequest, record: RequestRecord, progress: ReplyProgress
    ) -> AsyncGenerator[AnyEvent, None]:
        """Stream the events of one answer, which `progress` has followed; ends with `GenerationFinished`. Closing it
        early cancels the answer. Raises Refusal: the engine refused the request, or failed; the server is closing."""
        while self._untold:
            self._on_note(self._untold.pop(0))
        turn, arrived = QueueTurn(record.party), time.monotonic()
        record.stops = parsed.request.stop
        record.progress = progress
        try:
            async with self._turn(record, turn):
                progress.queued_s = record.queued_s
                self.metrics.queued.observe(record.queued_s)
                try:
                    async with contextlib.aclosing(self._events(parsed.request, record, turn, progress)) as events:
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
        async with self._turn(record, QueueTurn(record.party)):
            n_tokens = await self._conversation.backend.count_tokens(parsed.request)
        if n_tokens is None:
            message = "The prompt cannot be counted: the chat template refuses it, or the model is not loaded."
            raise Refusal(400, message, "chat_template_failed")
        record.result = "ok"
        return n_tokens

    def _refuse_when_closing(self, is_closing: bool = False) -> None:
        if self.closing or is_closing:
            raise Refusal(503, "The server is shutting down.", "shutting_down", retry_after=_RETRY_SECONDS)

    async def close(self) -> None:
        """End the running answers and those that wait; each gets an error."""
        self.closing = True
        self._watch_idleness()
        for ending in self._endings:
            ending.reschedule(asyncio.get_running_loop().time())
        await self._conversation.stop()  # a load
        if (work := self._under_way) is not None:
            await asyncio.wait({work})

    async def _events(
        self, request: Generate, record: RequestRecord, turn: QueueTurn, progress: ReplyProgress
    ) -> AsyncGenerator[AnyEvent, None]:
        conversation = self._conversation
        meter = conversation.meter if turn.slot == 0 else Meter()
        if meter is not conversation.meter:
            meter.observe(ModelLoaded(model=self.model), time.monotonic())
        meter.asked = request.speculation
        meter.request_started(time.monotonic())
        self._answers[turn.slot] = record, meter
        for one, _ in self._answers.values():
            one.n_at_once = max(one.n_at_once, len(self._answers))
        try:
            async with contextlib.aclosing(conversation.backend.generate(request)) as events:
                async for event in events:
                    now = time.monotonic()
                    meter.observe(event, now)
                    if isinstance(event, ModelLoaded):  # its worker had died unnoticed
                        self.loaded(event.model)
                    if isinstance(event, GenerationFinished):
                        for told in _untold_calls(event, progress):
                            progress.follow(told, now)
                            yield told
                        if record.n_at_once == 1:  # else others slowed it down
                            await conversation.remember_speed(event.timings)
                    progress.follow(event, now)
                    yield event
        finally:
            del self._answers[turn.slot]
            self._last = (turn.slot, meter) if turn.slot else None

    async def _ensure_loaded(self) -> None:
        """Load a model again that was unloaded, or whose worker died, once for all requests that wait for it: one that
        leaves does not end it. Raises Refusal."""
        failed = await asyncio.shield(work) if (work := self._under_way) is not None else None
        if failed is None and not self.is_loaded:  # an unload has ended, or nothing was going on
            failed = await asyncio.shield(self._under_way or self._change(self._reload()))
        if failed is not None:
            raise Refusal.of(failed, self.model.n_ctx)

    @property
    def _under_way(self) -> asyncio.Task[Failed | None] | None:
        return self._changing if self._changing is not None and not self._changing.done() else None

    def _change(self, work: Coroutine[Any, Any, Failed | None]) -> asyncio.Task[Failed | None]:
        self._changing = asyncio.create_task(work)
        return self._changing

    async def _reload(self) -> Failed | None:
        """Load the model again; returns why that failed."""
        failed = Failed(code="interrupted", message="The load was stopped.")
        try:
            async with contextlib.aclosing(self._conversation.reload()) as events:
                async for event in events:
                    if isinstance(event, ModelLoaded):
                        self.loaded(event.model)
                        self._on_note(f"loaded {self.names[0]} again")
                        return None
                    failed = event if isinstance(event, Failed) else failed
        except CpuchatError as error:
            failed = Failed.of(error)
        self._is_lost = True
        return failed

    async def _unload(self) -> None:
        await self._conversation.backend.unload()
        after = f"after {self._idle_minutes:g} idle minutes"
        self._on_note(f"unloaded {self.names[0]} {after}; the next request loads it again")

    def _watch_idleness(self) -> None:
        """Unload the model in time, unless a request comes before: asking for the health or for metrics is none."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        if self._idle_minutes and not self._n_open and not self.closing and self.is_loaded:
            loop = asyncio.get_running_loop()
            self._idle_timer = loop.call_later(60 * self._idle_minutes, lambda: self._change(self._unload()))


def _untold_calls(event: GenerationFinished, progress: ReplyProgress) -> Iterator[CallDelta]:
    """Yield the calls of an answer that were not told as they were written: not every engine does."""
    timings, n_told = event.timings, len(progress.calls)
    for index, call in enumerate(event.calls[n_told:], n_told):
        yield CallDelta(
            request_id=event.request_id, index=index, name=call.name, id=call.id,
            arguments=msgspec.json.encode(call.arguments).decode(),
            predicted_n=timings.predicted_n, at_ms=timings.ttft_ms + timings.predicted_ms,
        )  # fmt: skip
