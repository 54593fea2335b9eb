"""Runs a conversation on the command line; Ctrl+C stops it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, Self

from cpuchat.backend.switching import SwitchingBackend
from cpuchat.base.errors import ContextFull, CpuchatError, Interrupted, WorkerDied, from_code
from cpuchat.chats.store import ChatStore
from cpuchat.cli.terminal import Terminal
from cpuchat.config.servers import Source
from cpuchat.config.settings import Settings
from cpuchat.conversation import Conversation
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
        loop = asyncio.get_running_loop()
        self._presses = 0
        loop.add_signal_handler(signal.SIGINT, self._on_interrupt)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGINT)

    def _on_interrupt(self) -> None:
        self._presses += 1
        self.on_interrupt()
        if self._presses > 1 and self._backend.pid is not None:
            self._backend.kill()
        else:
            self._cancel()

    def _cancel(self) -> None:
        task = asyncio.ensure_future(self.conversation.stop())
        self._cancelling.add(task)
        task.add_done_callback(self._cancelling.discard)

    async def load(self, path: Source, *, strict: bool = False, calibrate: bool = True) -> ModelInfo:
        """Start the worker and load a model; see `Conversation.load_model`.

        Raises:
            Interrupted: Ctrl+C.
            CpuchatError: the model, or (`strict`) its draft model, cannot be used.
        """
        info: ModelInfo | None = None
        stream = self.conversation.load_model(path, strict=strict, calibrate=calibrate)
        async with contextlib.aclosing(stream) as events:
            async for event in events:
                self._pass_on_interrupt(event)
                match event:
                    case LoadProgress():
                        self._terminal.progress(event)
                    case ModelLoaded(model=model):
                        info = model
                    case Failed():
                        raise self._error(event)
                    case LoadCancelled():
                        raise Interrupted("Stopped before the model was loaded.")
                    case _:
                        pass
        if info is None or self.interrupted:
            raise Interrupted("Stopped before the first token.")
        return info

    async def stream(self, events: AsyncGenerator[AnyEvent, None], answer: Answer, sink: Sink) -> GenerationFinished:
        """Stream an answer of `conversation` into `answer` and to `sink`.

        Raises:
            CpuchatError: the answer failed; `answer` holds what came before.
            OutputClosed: from the sink; the answer is cancelled.
        """
        stopped = "Stopped before the first token."
        async with contextlib.aclosing(events):
            async for event in events:
                self._pass_on_interrupt(event)
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
                        answer.reasoning += text
                        sink.reasoning(text)
                    case TextDelta(text=text):
                        answer.text += text
                        sink.answer(text)
                    case GenerationFinished():
                        answer.finished = event
                    case CallsMade():
                        answer.finished, stopped = None, "Stopped during a tool call."  # the answer goes on after it
                        if event.said:  # what is said after them is a paragraph of its own
                            answer.text += "\n\n"
                            sink.answer("\n\n")
                        for call in event.calls:
                            self._terminal.note(f"cpuchat: the model calls {title(call)}")
                    case Failed():
                        raise self._error(event)
                    case _:
                        pass
        if answer.finished is None:
            raise Interrupted(stopped)
        return answer.finished

    def _pass_on_interrupt(self, event: AnyEvent) -> None:
        """Repeat a Ctrl+C that arrived before the worker was ready for it."""
        if self.interrupted and isinstance(event, LoadProgress | PrefillProgress | TextDelta):
            self._cancel()

    def _error(self, event: Failed) -> CpuchatError:
        if event.code == WorkerDied.code:
            if self.interrupted:  # by the second Ctrl+C, or by the first when the worker was still starting
                return Interrupted("Stopped.")
            again = "" if event.hint and not event.hint.startswith("Log:") else "Run the command again. "
            return WorkerDied(event.message, f"{again}{event.hint}".strip())
        error = from_code(event.code, event.message, event.hint)
        if isinstance(error, ContextFull):
            error.alone = event.alone
        return error
