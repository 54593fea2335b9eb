"""Runs a conversation, or a long measurement, on the command line; Ctrl+C stops it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from cpuchat.backend.switching import SwitchingBackend
from cpuchat.base.errors import ContextFull, CpuchatError, Interrupted, WorkerDied, from_code
from cpuchat.cli.terminal import TerminalOutput
from cpuchat.config.servers import Source
from cpuchat.config.settings import Settings, update_state
from cpuchat.present.answers import context_trimmed, reconnecting
from cpuchat.present.machine import unused_module
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
    Reconnecting,
    TextDelta,
)
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.session.conversation import Calibrates, Conversation, stop_with_workers

T = TypeVar("T")


@dataclass
class StreamedAnswer:
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


@contextlib.contextmanager
def workers_stop_too(*conversations: Conversation) -> Iterator[None]:
    """Let Ctrl+Z stop the workers as well. Use from the event loop."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTSTP, stop_with_workers, conversations)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTSTP)


_BESIDE: set[asyncio.Future[None]] = set()


def begin(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` beside the rest; it is held until it ends."""
    task = asyncio.ensure_future(work)
    _BESIDE.add(task)
    task.add_done_callback(_BESIDE.discard)


async def stoppable(run: Awaitable[T], stop: Callable[..., Coroutine[Any, Any, None]]) -> T:
    """Run a measurement until it ends; the first Ctrl+C stops it, a second one kills its worker (`kill`)."""
    with each_interrupt(lambda presses: begin(stop(kill=presses > 1))):
        return await run


class Session:
    """Holds a conversation, and handles Ctrl+C.

    The first Ctrl+C stops the load or the answer and keeps the partial answer; a second one kills the worker."""

    def __init__(self, settings: Settings, terminal: TerminalOutput, backend: SwitchingBackend | None = None) -> None:
        """`backend` is closed with the session; None: a new one. No chat is kept."""
        self.conversation = Conversation(settings=settings, backend=backend or SwitchingBackend(), store=None)
        self.terminal = terminal
        self.interrupted = False
        self.on_interrupt: Callable[[], object] = lambda: None
        """Called with each Ctrl+C."""
        self._stack = contextlib.ExitStack()

    async def __aenter__(self) -> Self:
        self._stack.enter_context(each_interrupt(self._on_interrupt))
        self._stack.enter_context(workers_stop_too(self.conversation))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.terminal.clear_progress()
        await self.conversation.close()
        self._stack.close()

    def _on_interrupt(self, presses: int) -> None:
        self.interrupted = True
        self.on_interrupt()
        if presses > 1 and self.conversation.backend.pid is not None:
            self.conversation.backend.kill()
        else:
            begin(self.conversation.stop())

    async def load(self, path: Source, *, strict: bool = False, calibrate: Calibrates = "load") -> ModelInfo:
        """Start the worker and load a model, which is then the one used last unless it is on a server; see
        `Conversation.load_model`. Raises Interrupted: Ctrl+C; CpuchatError: the model, or (`strict`) its draft model,
        cannot be used."""
        info: ModelInfo | None = None
        stream = self.conversation.load_model(path, strict=strict, calibrate=calibrate)
        async with contextlib.aclosing(stream) as events:
            async for event in events:
                if isinstance(event, LoadCancelled) or (self.interrupted and isinstance(event, Failed)):
                    break
                self._watch(event)
                if isinstance(event, ModelLoaded):
                    info = event.model
        if info is None or self.interrupted:
            raise Interrupted("Stopped before the first token.")
        if isinstance(path, Path) and str(path) != self.conversation.settings.model.last:
            with contextlib.suppress(OSError):  # a full disk: everything else works
                await asyncio.to_thread(update_state, {"last": str(path)})
        return info

    async def stream(
        self, events: AsyncGenerator[AnyEvent, None], answer: StreamedAnswer, *, prints: bool
    ) -> GenerationFinished:
        """Stream an answer of `conversation` into `answer`, and to the terminal. Raises CpuchatError: an answer failed,
        and `answer` holds what came before; OutputClosed: by the terminal; the answer is cancelled."""
        when = "before the first token"
        async with contextlib.aclosing(events):
            async for event in events:
                self._watch(event)
                match event:
                    case TextDelta(channel="reasoning"):
                        answer.reasoning += event.text
                        self.terminal.reasoning(event.text if prints else "")
                    case TextDelta(text=text):
                        answer.text += text
                        self.terminal.answer(text if prints else "")
                    case GenerationFinished():
                        answer.finished = event
                    case CallsMade():  # the answer goes on after them, what is said then is a paragraph of its own
                        answer.finished, when = None, "during a tool call"
                        paragraph = "\n\n" if event.said else ""
                        answer.text += paragraph
                        self.terminal.answer(paragraph if prints else "")
        if answer.finished is None:
            raise Interrupted(f"Stopped {when}.")
        return answer.finished

    def _watch(self, event: AnyEvent) -> None:
        """Show how far a load or an answer is, and stop it after Ctrl+C. Raises CpuchatError if it failed."""
        if self.interrupted and isinstance(event, LoadProgress | PrefillProgress | TextDelta):
            begin(self.conversation.stop())  # Ctrl+C came before the worker was ready for it
        if isinstance(event, Failed):
            raise error_of(event, is_interrupted=self.interrupted)
        show_state(event, self.terminal, self.conversation.meter.prefill_left_s())


def tell_notes(conversation: Conversation, model: ModelInfo, terminal: TerminalOutput, by: str = "") -> None:
    """Print what is to be known of a model that was loaded."""
    unused = unused_module(conversation.settings, conversation.backend.engine)
    for note in filter(None, (conversation.draft_problem, unused and f"CPU module {unused}.", *model.notes)):
        terminal.note(f"{by}{note}")


def show_state(event: object, terminal: TerminalOutput, prefill_left_s: float | None = None) -> None:
    """Print how far a load or an answer is, and what it calls; other events are ignored."""
    match event:
        case LoadProgress() | PrefillProgress():
            terminal.progress(event, prefill_left_s)
        case Reconnecting():
            terminal.status(reconnecting(event))
        case ContextTrimmed():
            terminal.warn(context_trimmed(event))
        case CallsMade():
            for call in event.calls:
                terminal.note(f"cpuchat: the model calls {title(call)}")


def error_of(event: Failed, *, is_interrupted: bool) -> CpuchatError:
    """Return the error that an event reports. `is_interrupted`: Ctrl+C was pressed."""
    if event.code == WorkerDied.code:
        if is_interrupted:  # by the second Ctrl+C, or by the first when the worker was still starting
            return Interrupted("Stopped.")
        again = "" if event.hint and not event.hint.startswith("Log:") else "Run the command again. "
        return WorkerDied(event.message, f"{again}{event.hint}".strip())
    error = from_code(event.code, event.message, event.hint)
    if isinstance(error, ContextFull):
        error.alone = event.alone
    return error
