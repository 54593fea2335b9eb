"""Commands of the plain chat about chats: list, open, branch, fork, export, delete."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from cpuchat.base.errors import CpuchatError, UsageError
from cpuchat.base.text import clean_line
from cpuchat.present.tools import title

if TYPE_CHECKING:
    from cpuchat.chats.records import Chat, StoredMessage
    from cpuchat.cli.terminal import Terminal
    from cpuchat.conversation import Conversation

Commands = dict[str, tuple[str, Callable[[str], Coroutine[Any, Any, None]]]]
"""By name: what `/help` says, and what runs it with the rest of the line."""

_MOST_CHATS = 20


class PlainChats:
    def __init__(self, conversation: Conversation, terminal: Terminal) -> None:
        self._conversation, self._terminal = conversation, terminal
        self._listed: list[Chat] = []
        self.commands: Commands = {
            "/new": ("start a new chat", self._new),
            "/chats": ("WORDS: list the last chats, or those that have these words", self._chats),
            "/open": ("N: open chat N of that list", self._open),
            "/history": ("print the open chat", self._history),
            "/branch": ("N: show answer N where the last one has several", self._branch),
            "/fork": ("copy the open branch into a new chat, and open that", self._fork),
            "/export": ("FILE: write the open chat to a file, as Markdown (.md) or JSON", self._export),
            "/delete": ("delete the open chat", self._delete),
            "/undo": ("put back what was deleted last", self._undo),
        }

    def _require_chat(self) -> Chat:
        """Return the open chat. Raises UsageError if it has no messages yet."""
        if (chat := self._conversation.chat) is None:
            raise UsageError("This chat has no messages yet.")
        return chat

    async def _new(self, _: str) -> None:
        self._conversation.new_chat()
        self._terminal.note("New chat.")

    async def _chats(self, words: str) -> None:
        from cpuchat.present.chats import when

        found = await self._conversation.history.list_chats(words)
        self._listed = [one for one in found if not one.sides][:_MOST_CHATS]
        for number, chat in enumerate(self._listed, 1):
            self._terminal.line(f"{number}. {clean_line(chat.title) or 'New chat'}, {when(chat.updated)}")
        if not self._listed:
            self._terminal.note("No chats match." if words else "No chats yet.")

    async def _open(self, number: str) -> None:
        if not number.isdecimal() or not 0 < int(number) <= len(self._listed):
            raise UsageError(f"No chat {clean_line(number) or 'given'}.", "/chats lists them by number.")
        await self._conversation.open_chat(self._listed[int(number) - 1].id)
        self._print_last()

    async def _history(self, _: str) -> None:
        for message in self._conversation.messages:
            self._print(message)

    async def _branch(self, number: str) -> None:
        siblings = self._conversation.history.tree.siblings
        found = [one for message in self._conversation.messages if len(one := siblings(message.id)) > 1]
        if not found:
            self._terminal.note("No other answer here. /regenerate or /edit makes one.")
            return
        if not number.isdecimal() or not 0 < int(number) <= len(found[-1]):
            raise UsageError(f"No answer {clean_line(number) or 'given'}.", f"There are {len(found[-1])}: /branch 1.")
        await self._conversation.open_chat(self._require_chat().id, found[-1][int(number) - 1])
        self._print_last()

    async def _fork(self, _: str) -> None:
        self._require_chat()
        await self._conversation.fork_chat(self._conversation.messages[-1].id)
        self._terminal.note("Forked. The copy is open now.")

    async def _export(self, name: str) -> None:
        from cpuchat.base.files import write_atomically
        from cpuchat.base.paths import expanded, shown
        from cpuchat.chats.transfer.importing import export_chat
        from cpuchat.present.chats import document

        history, file = self._conversation.history, expanded(name)
        if not name:
            raise UsageError("No file given.", "/export chat.md writes Markdown, /export chat.json everything.")

        def write() -> None:
            write_atomically(file, document([export_chat(history.store, history.store.chat(chat_id))], file))

        chat_id = self._require_chat().id
        try:
            await asyncio.to_thread(write)
        except OSError as error:
            raise CpuchatError(f"Cannot write {file}: {error.strerror}.", "Choose another file.") from None
        self._terminal.note(f"Exported to {shown(file)}.")

    async def _delete(self, _: str) -> None:
        await self._conversation.delete_chat(self._require_chat().id)
        self._terminal.note("Deleted. /undo puts it back, until you quit.")

    async def _undo(self, _: str) -> None:
        if (deleted := await self._conversation.history.undo_delete()) is None:
            self._terminal.note("Nothing to undo.")
        else:
            await self._conversation.open_chat(deleted.chat_id, deleted.message_id)
            self._terminal.note("Put back and opened.")

    def _print_last(self) -> None:
        for message in self._conversation.messages[-2:]:
            self._print(message)

    def _print(self, message: StoredMessage) -> None:
        answered = "Summary" if message.is_summary else clean_line(message.model) or "Answer"
        speaker = "You" if message.role == "user" else answered
        for step in message.steps:
            if said := step.said.strip():
                self._terminal.line(f"{speaker}: {said}")
            for call in step.calls:
                self._terminal.note(f"The model called {title(call)}.")
        self._terminal.line(f"{speaker}: {message.content}")
        for attachment in message.attachments:
            self._terminal.note(f"Attached: {clean_line(attachment.title)}.")
