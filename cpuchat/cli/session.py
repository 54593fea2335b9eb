"""One worker for the length of one command, stopped by Ctrl+C."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from cpuchat.backend.local import LocalBackend
from cpuchat.cli.terminal import Terminal
from cpuchat.errors import CpuchatError, Interrupted, WorkerDied, from_code
from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.models.library.usage import UsageLog
from cpuchat.protocol import (
    AnyEvent,
    ContextTrimmed,
    Failed,
    Generate,
    GenerationFinished,
    LoadOptions,
    LoadProgress,
    ModelInfo,
    ModelLoaded,
    PrefillProgress,
    TextDelta,
    Unloaded,
)


class Sink(Protocol):
    """Where the text of an answer goes while it is written."""

    def answer(self, text: str) -> None: ...

    def reasoning(self, text: str) -> None: ...


@dataclass
class Answer:
    """One answer, filled while it is streamed, so that a failure in the middle leaves what was said."""

    text: str = ""
    reasoning: str = ""
    finished: GenerationFinished | None = None


class Session:
    """A worker, its model and Ctrl+C.

    The first Ctrl+C stops the load or the answer and keeps what was said; a second one ends the worker at once.
    """

    def __init__(self, terminal: Terminal) -> None:
        self._backend = LocalBackend()
        self._terminal = terminal
        self._presses = 0
        self._cancelling: set[asyncio.Task[None]] = set()

    @property
    def interrupted(self) -> bool:
        return self._presses > 0

    async def __aenter__(self) -> Self:
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._on_interrupt)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._terminal.clear_progress()
        await self._backend.close()
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)

    def _on_interrupt(self) -> None:
        self._presses += 1
        if self._presses > 1 and self._backend.pid is not None:
            self._backend.kill()
        else:
            self._cancel()

    def _cancel(self) -> None:
        task = asyncio.ensure_future(self._backend.cancel())
        self._cancelling.add(task)
        task.add_done_callback(self._cancelling.discard)

    async def load(self, path: Path, options: LoadOptions, spec: PlacementSpec) -> ModelInfo:
        """Start the worker and load a model.

        Raises:
            Interrupted: Ctrl+C.
            CpuchatError: whatever the engine has against the model.
        """
        info: ModelInfo | None = None
        async with self._watched(self._backend.load(path, options, spec)) as events:
            async for event in events:
                match event:
                    case LoadProgress():
                        self._terminal.progress(event)
                    case ModelLoaded(model=model):
                        info = model
                    case Failed():
                        raise self._error(event)
                    case Unloaded():
                        raise Interrupted("Stopped before the model was loaded.")
                    case _:
                        pass
        if info is None or self.interrupted:
            raise Interrupted("Stopped before the first word.")
        UsageLog().loaded([path, Path(options.draft_path)] if info.draft else [path])
        return info

    async def answer(self, request: Generate, answer: Answer, sink: Sink) -> None:
        """Stream one answer into `answer` and to `sink`.

        Raises:
            CpuchatError: the answer failed; `answer` holds what came before.
            OutputClosed: from the sink; the answer is cancelled.
        """
        async with self._watched(self._backend.generate(request)) as events:
            async for event in events:
                match event:
                    case PrefillProgress() | LoadProgress():
                        self._terminal.progress(event)
                    case ContextTrimmed():
                        self._terminal.warn(
                            f"cpuchat: the oldest {event.dropped_messages} messages ({event.dropped_tokens:,} tokens) "
                            f"did not fit into the context of {event.n_ctx:,} tokens and were left out."
                        )
                    case TextDelta(channel="reasoning", text=text):
                        answer.reasoning += text
                        sink.reasoning(text)
                    case TextDelta(text=text):
                        answer.text += text
                        sink.answer(text)
                    case GenerationFinished():
                        answer.finished = event
                    case Failed():
                        raise self._error(event)
                    case _:
                        pass
        if answer.finished is None:
            raise Interrupted("Stopped before the first word.")
        if self._backend.model is not None:
            UsageLog().answered(self._backend.model, answer.finished.timings)

    @contextlib.asynccontextmanager
    async def _watched(self, events: AsyncGenerator[AnyEvent, None]) -> AsyncIterator[AsyncIterator[AnyEvent]]:
        """Events of a stream that is closed on every way out.

        A Ctrl+C that came before the worker was ready for it is passed on again with the next event.
        """

        async def watched() -> AsyncGenerator[AnyEvent, None]:
            async for event in events:
                if self.interrupted and isinstance(event, LoadProgress | PrefillProgress | TextDelta):
                    self._cancel()
                yield event

        async with contextlib.aclosing(events), contextlib.aclosing(watched()) as stream:
            yield stream

    def _error(self, event: Failed) -> CpuchatError:
        if event.code == WorkerDied.code:
            if self.interrupted:  # by the second Ctrl+C, or by the first when the worker was still starting
                return Interrupted("Stopped.")
            return WorkerDied(event.message, f"Run the command again. Log: {self._backend.log_file}")
        return from_code(event.code, event.message, event.hint)
