"""Saves an answer to the store while it is written, without blocking the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cpuchat.base.errors import ChatsChanged, ChatsError
from cpuchat.chats.records import Chat, StoredMessage

if TYPE_CHECKING:
    from cpuchat.chats.store import ChatStore

AUTOSAVE_SECONDS = 0.3
"""Seconds from one save to the next, at least. Later text is saved as it arrives: then one wake-up serves both."""
_RETRY_SECONDS = 1.0
UNSAVED = -1
"""Id of a message that the store does not have yet."""

Saved = tuple[list[StoredMessage], int]
"""The rows that an answer added, its own last, and the version that the chat has with them."""


def _growing(answer: StoredMessage) -> dict[str, Any]:
    names = ("content", "reasoning", "model", "stop_reason", "timings", "steps")
    return {name: getattr(answer, name) for name in names}


class AnswerSaver:
    """Saves one answer at a time. A save that fails (full disk, locked file) is retried until it succeeds.

    `answer` is set while the store does not have all of it; `problem` is why it is not saved, None when it is or soon
    will be. `conflict` is set when another instance of the app changed the chat, so that there is no place for the
    answer any more; `overtaken` when it was changed but has the answer. `lost` is set when the last answer was
    discarded before all of it was stored. `store`: None saves nothing. `on_problem`: called when `problem` changes."""

    def __init__(self, store: ChatStore | None, on_problem: Callable[[], object]) -> None:
        self.problem: ChatsError | None = None
        self.conflict: ChatsChanged | None = None
        self.overtaken = False
        self.lost = False
        self._store = store
        self._on_problem = on_problem
        self.answer: StoredMessage | None = None
        self._insert: Callable[[ChatStore, StoredMessage], Saved] | None = None
        self._saved: Saved | None = None
        self._on_saved: Callable[[list[StoredMessage], int], None] = lambda *_: None
        self._writing = threading.Lock()  # a cancelled save continues in its thread
        self._taking_turns = asyncio.Lock()
        self._timer: asyncio.TimerHandle | None = None
        self._not_before = 0.0  # time of the event loop
        self._task: asyncio.Task[bool] | None = None

    def begin_answer(
        self,
        chat: Chat,
        answer: StoredMessage,
        after: StoredMessage,
        on_saved: Callable[[list[StoredMessage], int], None],
    ) -> None:
        """Begin to save an answer, or what is added to one that the store has, with the question `after` if its id is
        `UNSAVED`. The previous one must have been saved or discarded. Where the store has another version of `chat`,
        that is a `conflict`. `on_saved` is called after each save with the rows that the first one added, the answer's
        last, and the version of the chat."""
        self.discard()
        self.conflict, self.overtaken = None, False

        def insert(store: ChatStore, answer: StoredMessage) -> Saved:
            with store.transaction():
                store.require_unchanged(chat)
                asked = after
                if after.id == UNSAVED:
                    asked = store.add_message(
                        chat.id, "user", after.content, after=after.parent, attachments=after.attachments
                    )
                written: dict[str, Any] = {"settings": answer.settings} | _growing(answer)
                row = store.add_message(chat.id, "assistant", after=asked.id, **written)
                return [row] if asked is after else [asked, row], store.chat(chat.id).version

        self._insert, self._on_saved = insert, on_saved
        self._saved = None if answer.id == UNSAVED else ([answer], chat.version)

    def put(self, answer: StoredMessage) -> None:
        """Schedule this state of the answer for saving; the first state is saved at once."""
        if self._store is not None and self.conflict is None:
            self.answer = answer
            self._schedule(self._wait() if self._saved else 0.0)

    async def save(self) -> bool:
        """Save now. Returns whether the store has everything; if not, saving continues in the background."""
        async with self._taking_turns:
            self._unschedule()
            answer = self.answer
            if answer is None:
                return True
            self._not_before = asyncio.get_running_loop().time() + AUTOSAVE_SECONDS
            try:
                saved = await asyncio.to_thread(self._write, answer)
            except ChatsChanged as error:
                self.conflict = error
                self.discard()
                return False
            except ChatsError as error:
                self._schedule(_RETRY_SECONDS)
                self._tell(error)
                return False
            self._on_saved(*saved)
            self._tell(None)
            if self.answer is not answer:  # it has grown meanwhile
                self._schedule(self._wait())
                return False
            self.answer = None
            return True

    def discard(self) -> None:
        """Discard what is not saved yet."""
        self._unschedule()
        self.lost = self.answer is not None
        self.answer = None
        self._tell(None)

    async def close(self) -> None:
        """Save for the last time."""
        await self.save()
        self._unschedule()

    def save_here(self) -> None:
        """Save once, on this thread. Raises ChatsError."""
        if self.answer is not None:
            self._write(self.answer)

    def _write(self, answer: StoredMessage) -> Saved:
        store = self._store
        assert store is not None
        with self._writing:
            if self._saved is None:
                assert self._insert is not None
                self._saved = self._insert(store, answer)
                return self._saved
            rows, known = self._saved
            version = store.update_message(rows[-1].id, **_growing(answer))
            if version is None:
                raise ChatsChanged("This answer was deleted in another window.", "The chat has been reloaded.")
            self.overtaken = self.overtaken or version != known + 1
            self._saved = rows, version
            return self._saved

    def _tell(self, problem: ChatsError | None) -> None:
        if str(problem) != str(self.problem):
            self.problem = problem
            self._on_problem()

    def _wait(self) -> float:
        return max(0.0, self._not_before - asyncio.get_running_loop().time())

    def _schedule(self, seconds: float) -> None:
        def start() -> None:
            self._timer = None
            self._task = asyncio.ensure_future(self.save())

        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(seconds, start)

    def _unschedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
