"""The headless core of a chat: history, backend, store and meter together.

The terminal app, the command line and benchmarks use it alike. Each request is an async stream of events; while it is
consumed, the history grows, the store is saved at least every half second, and the meter follows. The store is only
used in threads: a slow disk or another instance's lock never holds up the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from cpuchat.backend.base import Backend
from cpuchat.chats.records import Chat, SearchHit, StoredMessage, storable
from cpuchat.chats.saving import AnswerSaver
from cpuchat.chats.store import ChatStore
from cpuchat.errors import ChatsChanged, ChatsError, CpuchatError, UsageError
from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.models.drafts.choice import NO_DRAFT, choose_draft
from cpuchat.models.library.library import Library
from cpuchat.models.library.usage import UsageLog
from cpuchat.protocol import (
    AnyEvent,
    Failed,
    Generate,
    GenerationFinished,
    Message,
    ModelInfo,
    ModelLoaded,
    Speculation,
    TextDelta,
    Unloaded,
)
from cpuchat.settings import Settings
from cpuchat.telemetry.meter import Figures, Meter

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
    loaded with the model, "" when it was. `on_save_problem` is called when `save_problem` changes.
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
        self._running = False  # a load, an answer or a measurement
        self._writing = False  # an answer to the open chat
        self._stopping = False
        self._path: Path | None = None
        self._name = ""
        self.on_save_problem: Callable[[], None] = lambda: None
        self._saver = AnswerSaver(store, lambda: self.on_save_problem())

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

    @property
    def save_problem(self) -> ChatsError | None:
        """Why the last answer is not saved; it is tried again until it is. None when all is well."""
        return self._saver.problem

    @property
    def unsaved(self) -> StoredMessage | None:
        """The answer, as long as the store does not have all of it."""
        return self._saver.unsaved

    def new_chat(self) -> None:
        """Start over; the chat is stored with its first message. A load that is running goes on."""
        self._refuse_while_writing()
        self._refuse_while_unsaved()
        self.chat = None
        self.messages = []
        self.meter.chat_changed(0)

    async def open_chat(self, chat_id: str) -> None:
        """Go on with a stored chat. A load that is running goes on."""
        self._refuse_while_writing()
        await self._saver.save()
        chat, messages = await asyncio.to_thread(self._read, chat_id)
        self._refuse_while_writing()
        self._refuse_while_unsaved()
        self.chat, self.messages = chat, messages
        self.meter.chat_changed(self.n_past)

    async def delete_chat(self, chat_id: str) -> None:
        """Delete a chat with all that was kept of it; the open one is followed by a new one."""
        if self.chat is not None and self.chat.id == chat_id:
            self._refuse_while_writing()
            self._saver.discard()
            self.new_chat()
        await asyncio.to_thread(self.store.delete, chat_id)
        await self.backend.forget(chat_id)

    async def rename_chat(self, chat_id: str, title: str) -> None:
        """Raises ChatsError."""
        await asyncio.to_thread(self.store.rename, chat_id, title)
        if self.chat is not None and self.chat.id == chat_id:
            self.chat = msgspec.structs.replace(self.chat, title=title)

    async def stored_chat(self, chat_id: str) -> Chat:
        """Raises ChatsError."""
        return await asyncio.to_thread(self.store.chat, chat_id)

    async def list_chats(self, text: str = "") -> Sequence[Chat | SearchHit]:
        """All chats, last changed first, or those that hold `text`. Raises ChatsError."""
        return await asyncio.to_thread(lambda: self.store.search(text) if text else self.store.chats())

    async def load_model(self, path: Path) -> AsyncGenerator[AnyEvent, None]:
        """Load with the options of the settings, a draft model beside it if there is one; see `Backend.load`.

        A draft model that cannot be used does not keep the model from being loaded: what was wrong with it is told
        in `draft_problem` if the settings name it, else in the notes of the model.
        """
        with self._occupied():
            async with self._metered(self._load(path)) as events:
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

    async def aside(self, request: Generate) -> AsyncGenerator[AnyEvent, None]:
        """A request beside the chat, for measuring: neither stored nor seen by the meter. Ends as `send` does."""
        with self._occupied():
            async with contextlib.aclosing(self.backend.generate(request)) as events:
                async for event in events:
                    yield event

    async def _load(self, path: Path) -> AsyncGenerator[AnyEvent, None]:
        draft, note = await self._choose_draft(path)
        options = self.settings.load_options(draft_path=str(draft or ""))
        if self._stopping:  # while a draft model was looked for
            yield Unloaded()
            return
        failed: Failed | None = None
        async with contextlib.aclosing(self.backend.load(path, options, PlacementSpec.of(self.settings))) as events:
            async for event in events:
                if isinstance(event, Failed) and draft is not None:
                    failed = event
                else:
                    yield await self._noted(event, note, path, draft)
        if failed is None:
            return
        if self._stopping:
            yield Unloaded()
            return
        # Which of the two was at fault the failure does not tell; if it was the model, it fails again.
        note = f"Loaded without the draft model {draft.stem if draft else ''}: {failed.message}"
        options = msgspec.structs.replace(options, draft_path="")
        async with contextlib.aclosing(self.backend.load(path, options, PlacementSpec.of(self.settings))) as events:
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
        await asyncio.to_thread(self._remember, models)
        if not note or left_out:
            return event
        return ModelLoaded(model=msgspec.structs.replace(event.model, notes=(*event.model.notes, note)))

    def _remember(self, models: list[Path]) -> None:
        self._usage.loaded(models)
        library = self.library or Library(self.settings.model.folders)
        for path in models:
            library.opened(path)

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
        """Add my message and stream the answer.

        Raises:
            ChatsError: the message could not be saved, and was not sent.
            ChatsChanged: so that the chat had to be loaded again; or during the answer.
        """
        with self._occupied(writing=True):
            await self._require_saved()
            async with self._reloading():
                self.chat, message = await asyncio.to_thread(self._add_mine, text)
            self.messages = [*self.messages, message]
            async with contextlib.aclosing(self._answer(self.messages)) as events:
                async for event in events:
                    yield event

    async def regenerate(self) -> AsyncGenerator[AnyEvent, None]:
        """Replace the last answer by another one, which takes its place with its first token.

        Raises:
            ChatsError, ChatsChanged: as `send`.
        """
        with self._occupied(writing=True):
            index = self._last_user()
            await self._require_saved()
            await self._require_unchanged()
            async with contextlib.aclosing(self._answer(self.messages[: index + 1])) as events:
                async for event in events:
                    yield event

    async def edit_last(self, text: str) -> AsyncGenerator[AnyEvent, None]:
        """Answer `text` instead of my last message. It takes the place of that and all that follows with the first
        token of the answer.

        Raises:
            ChatsError, ChatsChanged: as `send`.
        """
        with self._occupied(writing=True):
            index = self._last_user()
            await self._require_saved()
            await self._require_unchanged()
            edited = msgspec.structs.replace(self.messages[index], content=storable(text))
            async with contextlib.aclosing(self._answer([*self.messages[:index], edited])) as events:
                async for event in events:
                    yield event

    async def stop(self) -> None:
        """Stop the running load or answer; its stream still ends with its final event."""
        if self._running:
            self._stopping = True
            await self.backend.cancel()

    def save(self) -> None:
        """Save the answer as far as it has come, now and on this thread: for an app whose event loop is in trouble."""
        self._saver.save_here()

    async def close(self) -> None:
        """End the worker, keep everything said so far. What could not be saved is in `unsaved`."""
        await self._saver.close()
        await self.backend.close()
        await asyncio.to_thread(self.store.close)

    def _refuse_while_busy(self) -> None:
        self._refuse_while_writing()
        if self._running:
            raise UsageError("A model is still being loaded or measured.", "Stop it with Esc first.")

    def _refuse_while_writing(self) -> None:
        if self._writing:
            raise UsageError("An answer is still being written.", "Stop it with Esc first.")

    def _refuse_while_unsaved(self) -> None:
        if (problem := self._saver.problem) is not None:
            raise ChatsError(f"The last answer is not saved yet. {problem.message}", problem.hint)

    async def _require_saved(self) -> None:
        await self._saver.save()
        self._refuse_while_unsaved()

    async def _require_unchanged(self) -> None:
        if self.chat is not None:
            async with self._reloading():
                await asyncio.to_thread(self.store.require_unchanged, self.chat)

    @contextlib.asynccontextmanager
    async def _reloading(self) -> AsyncIterator[None]:
        """When another instance has changed the chat, show what it is now."""
        try:
            yield
        except ChatsChanged:
            await self._reload()
            raise

    async def _reload(self) -> None:
        if self.chat is not None:
            with contextlib.suppress(ChatsError):  # deleted: what is on the screen stays there
                self.chat, self.messages = await asyncio.to_thread(self._read, self.chat.id)

    def _read(self, chat_id: str) -> tuple[Chat, list[StoredMessage]]:
        chat = self.store.chat(chat_id)  # before its messages: should they change in between, that is noticed later
        return chat, self.store.messages(chat_id)

    def _add_mine(self, text: str) -> tuple[Chat, StoredMessage]:
        with self.store.transaction(unchanged=self.chat):
            chat = self.chat or self.store.create_chat(
                self.model_name, self.settings.chat.system_prompt, title_of(text)
            )
            message = self.store.add_message(chat.id, "user", text)
            return self.store.chat(chat.id), message

    def _last_user(self) -> int:
        for index in range(len(self.messages) - 1, -1, -1):
            if self.messages[index].role == "user":
                return index
        raise UsageError("There is no message of yours to answer yet.", "Write one first.")

    def _request(self, messages: Sequence[StoredMessage]) -> Generate:
        assert self.chat is not None
        system = self.chat.system_prompt
        history = [Message(role="system", content=system)] if system else []
        for message in messages:
            turn = Message(role=message.role, content=message.content, reasoning=message.reasoning)
            if history and turn.role == history[-1].role == "user":
                # The answer between them was stopped before its first word; templates want turns to alternate.
                turn = Message(role="user", content=f"{history.pop().content}\n\n{turn.content}")
            history.append(turn)
        return Generate(
            messages=tuple(history),
            sampling=self.settings.sampling.sampling(),
            max_tokens=self.settings.chat.max_tokens,
            chat_id=self.chat.id,
            speculation=self.speculation,
        )

    async def _answer(self, history: list[StoredMessage]) -> AsyncGenerator[AnyEvent, None]:
        """Answer `history`. With the first token it and the answer become the messages, here and in the store."""
        messages = [*history, self._begin_answer(history)]
        try:
            async with self._metered(self.backend.generate(self._request(history))) as events:
                if self._stopping:  # while the message was stored
                    await self.backend.cancel()
                async for event in events:
                    answer = messages[-1]
                    match event:
                        case TextDelta(channel="reasoning"):
                            answer = msgspec.structs.replace(answer, reasoning=answer.reasoning + event.text)
                        case TextDelta():
                            answer = msgspec.structs.replace(answer, content=answer.content + event.text)
                        case GenerationFinished():
                            answer = msgspec.structs.replace(
                                answer, stop_reason=event.stop_reason, timings=event.timings, model=self.model_name
                            )
                        case Failed():
                            answer = msgspec.structs.replace(answer, stop_reason=event.code)
                        case _:
                            pass
                    self._show(messages, answer)
                    if answer.stop_reason is not None:
                        await self._saver.save()
                    if self._saver.conflict is not None:
                        break
                    if isinstance(event, GenerationFinished) and self.model is not None:
                        await asyncio.to_thread(self._usage.answered, self.model, event.timings)
                    yield event
        finally:
            if messages[-1].stop_reason is None:
                self._show(messages, msgspec.structs.replace(messages[-1], stop_reason="cancelled"))
            await self._saver.save()
        if self._saver.conflict is not None or self._saver.overtaken:
            await self._reload()
            raise self._saver.conflict or ChatsChanged(
                "This chat was changed in another window during the answer.", "It has been loaded again."
            )

    def _begin_answer(self, history: list[StoredMessage]) -> StoredMessage:
        """The answer before its first token; prepares that it replaces all that is not in `history`."""
        assert self.chat is not None
        chat_id = self.chat.id
        stored = {message.id: message for message in self.messages}
        edited = [message for message in history if stored[message.id].content != message.content]
        dropped = sorted(stored.keys() - {message.id for message in history})

        def saved(row: StoredMessage, version: int) -> None:
            if self.chat is not None and self.chat.id == chat_id:
                self.chat = msgspec.structs.replace(self.chat, version=version)
                if self.messages and self.messages[-1].id in (answer.id, row.id):
                    self.messages[-1] = msgspec.structs.replace(
                        self.messages[-1], id=row.id, position=row.position, created=row.created
                    )

        answer = self._saver.begin(self.chat, self.model_name, dropped, edited, saved)
        return answer

    def _show(self, messages: list[StoredMessage], answer: StoredMessage) -> None:
        """Make `answer` the last of `messages`, and these those of the chat as soon as it has a word."""
        if answer != messages[-1]:
            messages[-1] = answer
            if answer.content or answer.reasoning:
                self.messages = messages
                self._saver.put(answer)

    @contextlib.contextmanager
    def _occupied(self, writing: bool = False) -> Iterator[None]:
        """One load or answer at a time; `writing` also keeps the open chat from being left."""
        self._refuse_while_busy()
        self._running, self._writing, self._stopping = True, writing, False
        try:
            yield
        finally:
            self._running = self._writing = False

    @contextlib.asynccontextmanager
    async def _metered(self, events: AsyncGenerator[AnyEvent, None]) -> AsyncIterator[AsyncIterator[AnyEvent]]:
        """Let the meter see the events."""
        self.meter.expect(self.speculation)
        self.meter.request_started(self._clock())

        async def seen() -> AsyncGenerator[AnyEvent, None]:
            async for event in events:
                self.meter.observe(event, self._clock())
                yield event

        async with contextlib.aclosing(events), contextlib.aclosing(seen()) as stream:
            yield stream
