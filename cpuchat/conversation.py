"""The headless core of a chat: history, backend, store and meter together.

The terminal app, the command line and benchmarks use it alike. Each request is an async stream of events; while it is
consumed, the history grows, the store is saved at least every half second, and the meter follows.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path

import msgspec

from cpuchat.backend.base import Backend, GenerateRequest
from cpuchat.chats.store import Chat, ChatStore, StoredMessage
from cpuchat.errors import CpuchatError, UsageError
from cpuchat.models.drafts.choice import NO_DRAFT, choose_draft
from cpuchat.models.library import Library
from cpuchat.models.library.usage import UsageLog
from cpuchat.protocol import (
    AnyEvent,
    Failed,
    GenerationFinished,
    Message,
    ModelInfo,
    ModelLoaded,
    Speculation,
    TextDelta,
)
from cpuchat.settings import Settings
from cpuchat.telemetry.meter import Figures, Meter

AUTOSAVE_SECONDS = 0.4
TITLE_LENGTH = 48


def title_of(text: str) -> str:
    """A chat's first title: the first line of its first message, cut at a word."""
    line = " ".join(next((part for part in text.splitlines() if part.strip()), "").split())
    if len(line) <= TITLE_LENGTH:
        return line or "New chat"
    return line[: TITLE_LENGTH + 1].rsplit(" ", 1)[0][:TITLE_LENGTH] + "…"


class Conversation:
    """One open chat and the model that answers it. Use from one event loop.

    `library` is where draft models are looked for (None: the folders of the settings). `drafting` False answers
    without drafters whatever the settings say. `draft_problem` is why the draft model that the settings name was not
    loaded with the model, "" when it was.
    """

    def __init__(
        self,
        *,
        settings: Settings,
        backend: Backend,
        store: ChatStore,
        meter: Meter | None = None,
        library: Library | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.backend = backend
        self.store = store
        self.meter = meter or Meter()
        self.chat: Chat | None = None
        self.messages: list[StoredMessage] = []
        self.library = library
        self.drafting = True
        self.draft_problem = ""
        self._clock = clock
        self._usage = UsageLog()
        self._running = False
        self._path: Path | None = None
        self._name = ""
        self._autosave: asyncio.TimerHandle | None = None

    @property
    def busy(self) -> bool:
        """A load or an answer is running."""
        return self._running

    @property
    def model(self) -> ModelInfo | None:
        return self.backend.model

    @property
    def speculation(self) -> Speculation:
        """How the next answer is drafted."""
        return self.settings.speculation.speculation() if self.drafting else Speculation()

    @property
    def model_name(self) -> str:
        """Of the model that answers, also while its worker is gone and the next message starts it again; else ""."""
        if self.model is not None:
            self._name = self.model.name
        return self._name

    @property
    def n_past(self) -> int:
        """Tokens in the context after the last answer of the open chat."""
        return next((m.timings.n_past for m in reversed(self.messages) if m.timings is not None), 0)

    def figures(self) -> Figures:
        """What the meter knows now."""
        if not self._running:
            self.meter.expect(self.speculation)
        return self.meter.figures(self._clock())

    def new_chat(self) -> None:
        """Start over; the chat is stored with its first message."""
        self._refuse_while_busy()
        self.chat = None
        self.messages = []
        self.meter.chat_changed(0)

    def open_chat(self, chat_id: str) -> None:
        """Go on with a stored chat."""
        self._refuse_while_busy()
        self.chat = self.store.chat(chat_id)
        self.messages = list(self.store.messages(chat_id))
        self.meter.chat_changed(self.n_past)

    async def delete_chat(self, chat_id: str) -> None:
        """Delete a chat with all that was kept of it; the open one is followed by a new one."""
        if self.chat is not None and self.chat.id == chat_id:
            self.new_chat()
        self.store.delete(chat_id)
        await self.backend.forget(chat_id)

    async def load_model(self, path: Path) -> AsyncGenerator[AnyEvent, None]:
        """Load with the options of the settings, a draft model beside it if there is one; see `Backend.load`.

        A draft model that cannot be used does not keep the model from being loaded: what was wrong with it is told
        in `draft_problem` if the settings name it, else in the notes of the model.
        """
        async with self._exclusive(self._load(path)) as events:
            self._path = path
            async for event in events:
                yield event

    async def reload(self) -> AsyncGenerator[AnyEvent, None]:
        """Load the same model again, with the settings as they are now. The open chat goes on: what the worker
        remembers of it is saved before and read again with the next answer.

        Raises:
            UsageError: no model was loaded before.
        """
        if self._path is None:
            raise UsageError("No model is loaded.", "Choose one first.")
        async with contextlib.aclosing(self.load_model(self._path)) as events:
            async for event in events:
                yield event

    async def aside(self, request: GenerateRequest) -> AsyncGenerator[AnyEvent, None]:
        """A request beside the chat, for measuring: neither stored nor seen by the meter. Ends as `send` does."""
        async with self._exclusive(self.backend.generate(request), metered=False) as events:
            async for event in events:
                yield event

    async def _load(self, path: Path) -> AsyncGenerator[AnyEvent, None]:
        draft, note = await self._choose_draft(path)
        options = self.settings.load_options(draft_path=str(draft or ""))
        failed: Failed | None = None
        async with contextlib.aclosing(self.backend.load(path, options)) as events:
            async for event in events:
                if isinstance(event, Failed) and draft is not None:
                    failed = event
                else:
                    yield await self._noted(event, note, path, draft)
        if failed is None:
            return
        # Which of the two was at fault the failure does not tell; if it was the model, it fails again.
        note = f"Loaded without the draft model {draft.stem if draft else ''}: {failed.message}"
        options = msgspec.structs.replace(options, draft_path="")
        async with contextlib.aclosing(self.backend.load(path, options)) as events:
            async for event in events:
                yield await self._noted(event, note, path, None)

    async def _noted(self, event: AnyEvent, note: str, path: Path, draft: Path | None) -> AnyEvent:
        """`event`; one that tells that the models are loaded is remembered, and gets one more note.

        A draft model that the engine left out has the engine's note, which says why; `note` on it would contradict.
        """
        if not isinstance(event, ModelLoaded):
            return event
        left_out = draft is not None and not event.model.draft
        models = [path] if draft is None or left_out else [path, draft]
        await asyncio.to_thread(self._usage.loaded, models)
        if not note or left_out:
            return event
        return ModelLoaded(model=msgspec.structs.replace(event.model, notes=(*event.model.notes, note)))

    async def _choose_draft(self, target: Path) -> tuple[Path | None, str]:
        """The draft model and a note about it; sets `draft_problem`."""
        wanted = self.settings.speculation.wanted_draft
        library = self.library or Library(self.settings.model.folders)
        self.draft_problem = ""
        try:
            draft, note = await asyncio.to_thread(choose_draft, target, wanted, library, strict=False)
        except (CpuchatError, OSError) as error:
            draft, note = None, f"No draft model is loaded. {error}"
        if draft is None and wanted not in ("", "auto", NO_DRAFT):
            self.draft_problem, note = note, ""
        return draft, note

    async def send(self, text: str) -> AsyncGenerator[AnyEvent, None]:
        """Add my message and stream the answer."""
        self._refuse_while_busy()
        if self.chat is None:
            self.chat = self.store.create_chat(self.model_name, self.settings.chat.system_prompt, title_of(text))
        self.messages.append(self.store.add_message(self.chat.id, "user", text))
        async with contextlib.aclosing(self._answer()) as events:
            async for event in events:
                yield event

    async def regenerate(self) -> AsyncGenerator[AnyEvent, None]:
        """Drop the last answer and write another one."""
        self._refuse_while_busy()
        self._cut(self._last_user())
        async with contextlib.aclosing(self._answer()) as events:
            async for event in events:
                yield event

    async def edit_last(self, text: str) -> AsyncGenerator[AnyEvent, None]:
        """Replace my last message and what follows it, then answer."""
        self._refuse_while_busy()
        index = self._last_user()
        self._cut(index)
        self.store.update_message(self.messages[index].id, content=text)
        self.messages[index] = msgspec.structs.replace(self.messages[index], content=text)
        async with contextlib.aclosing(self._answer()) as events:
            async for event in events:
                yield event

    async def stop(self) -> None:
        """Stop the running load or answer; its stream still ends with its final event."""
        if self._running:
            await self.backend.cancel()

    def save(self) -> None:
        """Write the open chat's last answer as far as it has come; it is written by itself twice a second anyway."""
        self._save()

    async def close(self) -> None:
        """End the worker, keep everything said so far."""
        self._save()
        await self.backend.close()
        self.store.close()

    def _refuse_while_busy(self) -> None:
        if self._running:
            raise UsageError("An answer is still being written.", "Stop it with Esc first.")

    def _last_user(self) -> int:
        for index in range(len(self.messages) - 1, -1, -1):
            if self.messages[index].role == "user":
                return index
        raise UsageError("There is no message of yours to answer yet.", "Write one first.")

    def _cut(self, index: int) -> None:
        """Forget everything after the message at `index`."""
        if self.chat is not None and len(self.messages) > index + 1:
            self.store.delete_messages_from(self.chat.id, self.messages[index + 1].position)
        del self.messages[index + 1 :]

    def _request(self) -> GenerateRequest:
        assert self.chat is not None
        system = self.chat.system_prompt
        history = [Message(role="system", content=system)] if system else []
        for message in self.messages:
            turn = Message(role=message.role, content=message.content, reasoning=message.reasoning)
            if history and turn.role == history[-1].role == "user":
                # The answer between them was stopped before its first word; templates want turns to alternate.
                turn = Message(role="user", content=f"{history.pop().content}\n\n{turn.content}")
            history.append(turn)
        return GenerateRequest(
            messages=tuple(history),
            sampling=self.settings.sampling.sampling(),
            max_tokens=self.settings.chat.max_tokens,
            chat_id=self.chat.id,
            speculation=self.speculation,
        )

    async def _answer(self) -> AsyncGenerator[AnyEvent, None]:
        assert self.chat is not None
        request = self._request()
        answer = self.store.add_message(self.chat.id, "assistant", "", model=self.model_name)
        self.messages.append(answer)
        index = len(self.messages) - 1
        finished = False
        try:
            async with self._exclusive(self.backend.generate(request)) as events:
                async for event in events:
                    answer = self.messages[index]
                    match event:
                        case TextDelta(channel="reasoning"):
                            self.messages[index] = msgspec.structs.replace(
                                answer, reasoning=answer.reasoning + event.text
                            )
                            self._save_soon()
                        case TextDelta():
                            self.messages[index] = msgspec.structs.replace(answer, content=answer.content + event.text)
                            self._save_soon()
                        case GenerationFinished():
                            self.messages[index] = msgspec.structs.replace(
                                answer, stop_reason=event.stop_reason, timings=event.timings, model=self.model_name
                            )
                            finished = True
                        case Failed():
                            self.messages[index] = msgspec.structs.replace(answer, stop_reason=event.code)
                            finished = True
                        case _:
                            pass
                    if finished:
                        self._save()
                    if isinstance(event, GenerationFinished) and self.model is not None:
                        await asyncio.to_thread(self._usage.answered, self.model, event.timings)
                    yield event
        finally:
            if not finished:
                self.messages[index] = msgspec.structs.replace(self.messages[index], stop_reason="cancelled")
            self._save()
            self._drop_if_empty(index)

    def _drop_if_empty(self, index: int) -> None:
        """An answer that ended before its first word is no part of the history."""
        answer = self.messages[index]
        if not (answer.content or answer.reasoning) and self.chat is not None:
            self.store.delete_messages_from(self.chat.id, answer.position)
            del self.messages[index:]

    def _save_soon(self) -> None:
        if self._autosave is None:
            self._autosave = asyncio.get_running_loop().call_later(AUTOSAVE_SECONDS, self._save)

    def _save(self) -> None:
        """Write the last message as it stands."""
        if self._autosave is not None:
            self._autosave.cancel()
            self._autosave = None
        if self.messages and self.messages[-1].role == "assistant":
            last = self.messages[-1]
            self.store.update_message(
                last.id,
                content=last.content,
                reasoning=last.reasoning,
                stop_reason=last.stop_reason,
                timings=last.timings,
                model=last.model,
            )

    @contextlib.asynccontextmanager
    async def _exclusive(
        self, events: AsyncGenerator[AnyEvent, None], metered: bool = True
    ) -> AsyncIterator[AsyncIterator[AnyEvent]]:
        """Run one stream at a time and let the meter see its events, unless it is not `metered`."""
        self._refuse_while_busy()
        self._running = True
        if metered:
            self.meter.expect(self.speculation)
            self.meter.request_started(self._clock())

        async def seen() -> AsyncGenerator[AnyEvent, None]:
            async for event in events:
                if metered:
                    self.meter.observe(event, self._clock())
                yield event

        try:
            async with contextlib.aclosing(events), contextlib.aclosing(seen()) as stream:
                yield stream
        finally:
            self._running = False
