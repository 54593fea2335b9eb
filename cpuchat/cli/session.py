"""Runs a conversation, or a long measurement, on the command line; Ctrl+C stops it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

from cpuchat.backend.switching import SwitchingBackend
from cpuchat.base.errors import ContextFull, CpuchatError, Interrupted, WorkerDied, from_code
from cpuchat.chats.store import ChatStore
from cpuchat.cli.terminal import Terminal
from cpuchat.config.servers import Source
from cpuchat.config.settings import Settings
from cpuchat.present.answers import context_trimmed, queued, reconnecting
from cpuchat.present.tools import title
from cpuchat.protocol.messages import (
    AnyEvent,
    CallsMade,
    ContextTrimmed,
    Failed,
    GenerationFinished,
    LoadCancelled,
    LoadProgress,
    ModelLoaded,
    PrefillProgress,
    Queued,
    Reconnecting,
    TextDelta,
)
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.session.conversation import Conversation

T_co = TypeVar("T_co", covariant=True)


class Sink(Protocol):
    """A sink for the text of an answer while it is written."""

    def answer(self, text: str) -> None: ...

    def reasoning(self, text: str) -> None: ...


@dataclass
class Answer:
    """One answer, filled while it is streamed, so that a failure keeps the partial text."""

    text: str = ""
    reasoning: str = ""
    finished: GenerationFinished | None = None


@contextlib.contextmanager
def each_interrupt(press: Callable[[int], object]) -> Iterator[None]:
    """Call `press` at each Ctrl+C, with how many there were. Use from the event loop."""
    loop, presses = asyncio.get_running_loop(), itertools.count(1)
    loop.add_signal_handler(signal.SIGINT, lambda: press(next(presses)))
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


class Stoppable(Protocol[T_co]):
    """Something that runs for minutes. `kill` does not wait for its worker."""

    async def run(self) -> T_co: ...

    async def stop(self, *, kill: bool = False) -> None: ...


async def run_stoppable(running: Stoppable[T_co]) -> T_co:
    """Run a measurement until it ends; the first Ctrl+C stops it, a second one kills its worker."""
    stopping: set[asyncio.Task[None]] = set()

    def stop(presses: int) -> None:
        task = asyncio.ensure_future(running.stop(kill=presses > 1))
        stopping.add(task)
        task.add_done_callback(stopping.discard)

    with each_interrupt(stop):
        return await running.run()


class Session:
    """Holds a conversation, and handles Ctrl+C.

    The first Ctrl+C stops the load or the answer and keeps the partial answer; a second one kills the worker.
    """

    def __init__(
        self,
        settings: Settings,
        terminal: Terminal,
        backend: SwitchingBackend | None = None,
        store: ChatStore | None = None,
    ) -> None:
        """`backend` is closed with the session; None: a new one. `store` keeps the chats."""
        self._backend = backend or SwitchingBackend()
        self.conversation = Conversation(settings=settings, backend=self._backend, store=store)
        self._terminal = terminal
        self._presses = 0
        self.begin_answer(terminal)
        self.on_interrupt: Callable[[], object] = lambda: None
        """Called with each Ctrl+C."""
        self._cancelling: set[asyncio.Task[None]] = set()
        self._stack = contextlib.ExitStack()

    @property
    def interrupted(self) -> bool:
        return self._presses > 0

    async def __aenter__(self) -> Self:
        self._stack.enter_context(self.interruptible())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._terminal.clear_progress()
        await self.conversation.close()
        self._stack.close()

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Pass Ctrl+C on to what runs inside, which begins without any."""
        self._presses = 0
        with each_interrupt(self._on_interrupt):
            yield

    def _on_interrupt(self, presses: int) -> None:
        self._presses = presses
        self.on_interrupt()
        if presses > 1 and self._backend.pid is not None:
            self._backend.kill()
        else:
            self._cancel()

    def _cancel(self) -> None:
        task = asyncio.ensure_future(self.conversation.stop())
        self._cancelling.add(task)
        task.add_done_callback(self._cancelling.discard)

    async def load(self, path: Source, *, strict: bool = False, calibrate: bool = True) -> ModelInfo:
        """Start the worker and load a model; see `Conversation.load_model`. Raises Interrupted: Ctrl+C; CpuchatError:
        the model, or (`strict`) its draft model, cannot be used.
        """
        info: ModelInfo | None = None
        stream = self.conversation.load_model(path, strict=strict, calibrate=calibrate)
        async with contextlib.aclosing(stream) as events:
            async for event in events:
                self.show(event)
                if isinstance(event, ModelLoaded):
                    info = event.model
                elif isinstance(event, LoadCancelled):
                    raise Interrupted("Stopped before the model was loaded.")
        if info is None or self.interrupted:
            raise Interrupted("Stopped before the first token.")
        return info

    async def stream(self, events: AsyncGenerator[AnyEvent, None], answer: Answer, sink: Sink) -> GenerationFinished:
        """Stream an answer of `conversation` into `answer` and to `sink`. Raises CpuchatError: the answer failed;
        `answer` holds what came before; OutputClosed: from the sink; the answer is cancelled.
        """
        self.begin_answer(sink, answer)
        async with contextlib.aclosing(events):
            async for event in events:
                self.show(event)
        if answer.finished is None:
            raise Interrupted(self.stopped)
        return answer.finished

    def begin_answer(self, sink: Sink, answer: Answer | None = None) -> None:
        """Print the next answer to `sink`, and keep it in `answer`."""
        self.answer, self._sink = answer or Answer(), sink
        self.stopped = "Stopped before the first token."

    def show(self, event: object) -> None:
        """Print an event of a load or of an answer; others are ignored. Raises CpuchatError if it failed."""
        if self.interrupted and isinstance(event, LoadProgress | PrefillProgress | TextDelta):
            self._cancel()  # Ctrl+C came before the worker was ready for it
        match event:
            case PrefillProgress():
                self._terminal.progress(event, self.conversation.meter.prefill_left_s)
            case LoadProgress():
                self._terminal.progress(event)
            case Reconnecting():
                self._terminal.status(reconnecting(event))
            case Queued():
                self._terminal.status(queued(event))
            case ContextTrimmed():
                self._terminal.warn(context_trimmed(event))
            case TextDelta(channel="reasoning", text=text):
                self.answer.reasoning += text
                self._sink.reasoning(text)
            case TextDelta(text=text):
                self.answer.text += text
                self._sink.answer(text)
            case GenerationFinished():
                self.answer.finished = event
            case CallsMade():
                self.answer.finished, self.stopped = None, "Stopped during a tool call."  # the answer goes on after it
                if event.said:  # what is said after them is a paragraph of its own
                    self.answer.text += "\n\n"
                    self._sink.answer("\n\n")
                for call in event.calls:
                    self._terminal.note(f"cpuchat: the model calls {title(call)}")
            case Failed():
                raise self.error(event)

    def error(self, event: Failed) -> CpuchatError:
        """Return the error that an event reports."""
        if event.code == WorkerDied.code:
            if self.interrupted:  # by the second Ctrl+C, or by the first when the worker was still starting
                return Interrupted("Stopped.")
            again = "" if event.hint and not event.hint.startswith("Log:") else "Run the command again. "
            return WorkerDied(event.message, f"{again}{event.hint}".strip())
        error = from_code(event.code, event.message, event.hint)
        if isinstance(error, ContextFull):
            error.alone = event.alone
        return error
