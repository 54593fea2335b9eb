"""One loaded model that answers requests of programs, one at a time while the others wait in a queue."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cpuchat.protocol.messages import (
    AnyEvent,
    CallDelta,
    Failed,
    Generate,
    GenerationFinished,
    ModelLoaded,
)
from cpuchat.protocol.model_info import EngineInfo, ModelInfo
from cpuchat.protocol.timings import Timings
from cpuchat.serving.errors import Refusal
from cpuchat.serving.metrics import Result, ServingMetrics
from cpuchat.serving.replies import ReplyProgress
from cpuchat.serving.requests import ParsedRequest, RequestReader
from cpuchat.session.conversation import Conversation
from cpuchat.telemetry.meter import ChatFigures

_MAX_NOTES = 100
"""Clients choose some of the words in them."""
_LONGEST_RETRY = 300
_RETRY_LOADING = 5
_USUAL_WEIGHT = 0.2  # of the newest answer in the moving average


_MAX_PASSED = 4
"""Short requests of its client that a long one lets pass."""


@dataclass(eq=False)
class QueueSlot:
    """A request's place in the queue, from before its body is read until the engine takes it; `turn` is set when it
    does, None while the body is read.
    """

    endpoint: str
    client: str
    owner: str = ""
    is_short: bool = False
    n_passed: int = 0
    turn: asyncio.Event | None = None


class TurnQueue:
    """First come, first served; but a short request changes places with a longer one of the same owner that waits
    before it. Whoever is between them waits less by that, and whoever is behind them as long as before.
    """

    def __init__(self) -> None:
        self.places: list[QueueSlot] = []
        self.current: QueueSlot | None = None

    @contextlib.asynccontextmanager
    async def turn(self, place: QueueSlot, owner: str, *, is_short: bool) -> AsyncIterator[None]:
        """Wait for the turn of a request, which lasts as long as the block."""
        turn = place.turn = asyncio.Event()
        place.owner, place.is_short = owner, is_short
        at = self.places.index(place)
        for before, other in enumerate(self.places[:at] if is_short else ()):
            is_longer = other.turn is not None and not other.is_short
            if is_longer and other.owner == owner and other.n_passed < _MAX_PASSED:
                self.places[before], self.places[at] = place, other
                other.n_passed += 1
                break
        self._call_next()
        try:
            await turn.wait()
            yield
        finally:
            self.leave(place)

    def leave(self, place: QueueSlot) -> None:
        """Let the next one come, if this one had its turn."""
        if place in self.places:
            self.places.remove(place)
        if place is self.current:
            self.current = None
            self._call_next()

    def _call_next(self) -> None:
        waiting = next((one for one in self.places if one.turn is not None), None)
        if self.current is None and waiting is not None and waiting.turn is not None:
            self.places.remove(waiting)
            self.current = waiting
            waiting.turn.set()


@dataclass(frozen=True)
class RequestRecord:
    """A request that has ended. `queued_s` in the queue; `timings` None: the engine did nothing for it. `message` is
    fit for the log, `hint` says what whoever runs the server can do.
    """

    endpoint: str
    client: str
    result: Result
    timings: Timings | None = None
    stop_reason: str = ""
    message: str = ""
    queued_s: float = 0.0
    hint: str = ""


class InferenceService:
    """Use from one event loop. Requests are refused until `loaded`.

    Args:
        conversation: holds the backend; nothing is stored.
        aliases: names that the model answers to, the first is the one it goes by. Its own names count too.
        limit: requests that may wait.
        strict: requests that name another model are refused.
        on_done: called with every request that has ended.
        on_note: called with what the log should say once.
    """

    def __init__(
        self,
        conversation: Conversation,
        *,
        aliases: tuple[str, ...] = (),
        limit: int = 16,
        strict: bool = False,
        on_done: Callable[[RequestRecord], None] = lambda done: None,
        on_note: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.metrics = ServingMetrics()
        self.limit = limit
        self.closing = False
        self.started = int(time.time())
        self.running: ReplyProgress | None = None
        """The answer that the engine works on."""
        self._conversation = conversation
        self._aliases = aliases
        self._strict = strict
        self._on_done = on_done
        self._on_note = on_note
        self._notes: dict[str, bool] = {}  # whether it was told
        self._clock = clock
        self._queue = TurnQueue()
        self._usual_s = 0.0
        self._info: ModelInfo | None = None
        self._reader: RequestReader | None = None
        self._is_lost = False  # the worker died, and its model could not be reloaded

    @property
    def model(self) -> ModelInfo:
        """Return the model, also while a dead worker is not yet replaced. Raises Refusal before it is loaded."""
        if self._info is None:
            raise Refusal(503, "The model is still loading. Retry in a moment.", "loading", retry_after=_RETRY_LOADING)
        return self._info

    @property
    def engine(self) -> EngineInfo | None:
        return self._conversation.backend.engine

    @property
    def name(self) -> str:
        """Return the name that the model goes by. Raises Refusal before it is loaded."""
        return self.names[0]

    @property
    def names(self) -> tuple[str, ...]:
        """Return all names that the model answers to. Raises Refusal before it is loaded."""
        file = Path(self.model.path)
        return tuple(dict.fromkeys(filter(None, (*self._aliases, file.stem, file.name, self.model.name))))

    @property
    def reader(self) -> RequestReader:
        """Return what reads requests for this model. Raises Refusal before it is loaded."""
        if self._reader is None:
            conversation = self._conversation
            self._reader = RequestReader(
                self.names, self.model, conversation.in_effect, conversation.speculation, strict=self._strict,
                note=self._note,
            )  # fmt: skip
        return self._reader

    def _note(self, text: str) -> None:
        if len(self._notes) < _MAX_NOTES:
            self._notes.setdefault(text.encode("utf-8", "replace").decode(), False)

    def _tell_notes(self) -> None:
        for text in [one for one, is_told in self._notes.items() if not is_told]:
            self._notes[text] = True
            self._on_note(text)

    @property
    def busy(self) -> bool:
        return self._queue.current is not None

    @property
    def waiting(self) -> int:
        """Return the number of requests in the queue, those whose body is still being read among them."""
        return len(self._queue.places)

    def ahead(self, place: QueueSlot) -> int | None:
        """Return how many requests come before one in the queue, the running one among them; None once it has left."""
        places = self._queue.places
        return places.index(place) + self.busy if place in places else None

    @property
    def figures(self) -> ChatFigures:
        """Return the figures of the running answer, else of the last one."""
        return self._conversation.meter.figures(self._clock())

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
    def place(self, endpoint: str, client: str) -> Iterator[QueueSlot]:
        """Give a request a place in the queue inside the block, and count it if it is refused there before its turn.
        Raises Refusal while loading or closing, or when the queue is full.
        """
        place = QueueSlot(endpoint, client)
        try:
            self._check_room()
            self._queue.places.append(place)
            yield place
        except Refusal as refusal:
            if place.turn is None:
                result = _result(refusal)
                self.metrics.count_request(endpoint, result)
                self._on_done(RequestRecord(endpoint, client, result, message=refusal.logged, hint=refusal.hint))
            raise
        finally:
            self._queue.leave(place)

    def _check_room(self) -> None:
        if self.closing:
            raise _closing()
        _ = self.model
        if self.waiting >= self.limit + (not self.busy):
            message = f"The queue is full ({self.waiting} requests). Retry later."
            raise Refusal(503, message, "queue_full", retry_after=self._retry_after())

    async def answer(
        self, parsed: ParsedRequest, place: QueueSlot, progress: ReplyProgress
    ) -> AsyncGenerator[AnyEvent, None]:
        """Stream the events of one answer, which `progress` has followed; ends with `GenerationFinished`. Closing it
        early cancels the answer: once closed, the engine is idle or answers the next request.

        Raises:
            Refusal: the engine refused the request, or it failed; the server is closing.
        """
        self._tell_notes()
        arrived = self._clock()
        result: Result = "cancelled"
        message, hint, queued = "", "", 0.0
        try:
            async with self._queue.turn(place, parsed.request.state.owner, is_short=parsed.is_short):
                if self.closing:
                    raise _closing()
                queued = self._clock() - arrived
                self.metrics.count_queued(queued)
                progress.queued_ms = 1e3 * queued
                self.running, progress.seed = progress, parsed.request.sampling.seed
                try:
                    for index in range(parsed.asked.n):
                        if index:
                            progress.begin_next()
                        async with contextlib.aclosing(self._events(parsed.choice(index), progress)) as events:
                            async for event in events:
                                if isinstance(event, Failed):
                                    raise Refusal.of(event, self.model.n_ctx)
                                if isinstance(event, GenerationFinished) and event.stop_reason == "cancelled":
                                    raise _closing()
                                yield event
                finally:
                    self.running = None
                    self._count_answer(progress, arrived)
            result = "ok"
        except Refusal as refusal:
            result = _result(refusal)
            message, hint = refusal.logged, refusal.hint
            raise
        except Exception:
            result = "failed"
            raise
        finally:
            self.metrics.count_request(place.endpoint, result)
            timings = progress.timings if progress.prompt is not None else None
            reason = progress.finished.stop_reason if progress.finished is not None else ""
            record = RequestRecord(place.endpoint, place.client, result, timings, reason, message, queued, hint)
            self._on_done(record)

    async def count(self, parsed: ParsedRequest, place: QueueSlot) -> int:
        """Return how many tokens the prompt of a request has. Raises Refusal."""
        async with self._queue.turn(place, parsed.request.state.owner, is_short=True):
            n_tokens = None if self.closing else await self._conversation.backend.count_prompt(parsed.request)
        if n_tokens is None:
            message = "The prompt cannot be counted: the chat template refuses it, or the model is not loaded."
            raise Refusal(400, message, "chat_template_failed")
        return n_tokens

    async def end_reasoning(self, id: str) -> bool:
        """Let the running answer of that id end its reasoning and answer now; False when it is not reasoning."""
        if self.running is None or self.running.id != id:
            return False
        return await self._conversation.backend.end_reasoning()

    async def close(self) -> None:
        """End the running answer and those that wait; each gets an error."""
        self.closing = True
        await self._conversation.stop()

    def _retry_after(self) -> int:
        """Return in how many seconds a place should be free, by the answers so far."""
        return max(1, min(_LONGEST_RETRY, math.ceil(self._usual_s)))

    async def _events(self, request: Generate, progress: ReplyProgress) -> AsyncGenerator[AnyEvent, None]:
        conversation, meter = self._conversation, self._conversation.meter
        meter.expect(request.speculation)
        meter.request_started(self._clock())
        started, is_reloading = self._clock(), conversation.model is None
        async with contextlib.aclosing(conversation.generate_detached(request)) as events:
            async for event in events:
                now = self._clock()
                meter.observe(event, now)
                for call in _untold(event, progress):
                    progress.follow(call, now)
                    yield call
                progress.follow(event, now)
                if isinstance(event, ModelLoaded):
                    self.loaded(event.model)
                    is_reloading = False
                if isinstance(event, Failed) and is_reloading:
                    self._is_lost = True
                yield event
        taken = self._clock() - started
        self._usual_s += (taken - self._usual_s) * (_USUAL_WEIGHT if self._usual_s else 1.0)

    def _count_answer(self, progress: ReplyProgress, arrived: float) -> None:
        if progress.prompt is None:
            return
        ttft_s = progress.first_at - arrived if progress.first_at is not None else None
        self.metrics.count_answer(progress.timings, ttft_s, progress.figured_n)

    def metrics_page(self, endpoints: tuple[str, ...]) -> bytes:
        """Return the page for Prometheus."""
        state = {"running": int(self.busy), "waiting": self.waiting, "limit": self.limit}
        return self.metrics.page(endpoints, state, self._info, self.figures)


def _untold(event: AnyEvent, progress: ReplyProgress) -> Iterator[CallDelta]:
    """Yield the calls of an answer that no event told before: not every engine tells them as they are written."""
    if isinstance(event, GenerationFinished):
        for index, call in enumerate(event.calls[len(progress.choice.calls) :], len(progress.choice.calls)):
            arguments = msgspec.json.encode(call.arguments).decode()
            yield CallDelta(
                request_id=event.request_id, index=index, name=call.name, arguments=arguments, id=call.id,
                predicted_n=event.timings.predicted_n, at_ms=event.timings.ttft_ms + event.timings.predicted_ms,
            )  # fmt: skip


def _closing() -> Refusal:
    return Refusal(503, "The server is shutting down.", "shutting_down")


def _result(refusal: Refusal) -> Result:
    if refusal.code == "queue_full":
        return "queue_full"
    return "refused" if refusal.status < 500 or refusal.code in ("loading", "shutting_down") else "failed"
