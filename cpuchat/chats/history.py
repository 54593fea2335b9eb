"""The messages of the open chat, in sync with the store, and what the model reads of them, summaries included."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import msgspec

from cpuchat.base.errors import ChatsChanged, ChatsError, UsageError
from cpuchat.chats.drafts import DraftSaver
from cpuchat.chats.records import (
    AnswerSettings,
    Attachment,
    Chat,
    Deleted,
    SearchHit,
    StoredMessage,
    Tree,
    storable,
    title_of,
)
from cpuchat.chats.saving import UNSAVED, AnswerSaver
from cpuchat.protocol.messages import Message, Role
from cpuchat.protocol.timings import Timings

if TYPE_CHECKING:
    from cpuchat.chats.store import ChatStore


Attach = Callable[[], tuple[Attachment, ...]]
"""Reads what is sent with a message; called on a thread."""
SUMMARY_TITLE = "Summary of the conversation so far:"
_CHARACTERS_PER_TOKEN = 3.5  # English and code; for a figure that is shown as an estimate
_BACKTICKS = re.compile("`{3,}")


def request_messages(system: str, messages: Sequence[StoredMessage]) -> tuple[Message, ...]:
    """Return the request to answer `messages` after the system prompt, if there is one. The last summary stands for all
    before it, or before the question that it follows. A question that was too long is not sent with the next one."""
    at = next((at for at in range(len(messages) - 1, -1, -1) if messages[at].is_summary), -1)
    if at >= 0:
        asked = [messages[at - 1]] if at and messages[at - 1].role == "user" else []
        system = "\n\n".join(filter(None, (system, f"{SUMMARY_TITLE}\n\n{messages[at].content}")))
        messages = [*asked, *messages[at + 1 :]]
    turns = [Message(role="system", content=system)] if system else []
    for message, following in zip_longest(messages, messages[1:]):
        if message.role == "user" and message.stop_reason and following is not None and following.role == "user":
            continue
        content = sent_text(message.content, message.attachments)
        turn = Message(role=message.role, content=content, reasoning=message.reasoning)
        if turns and turn.role == turns[-1].role == "user":
            # The answer between them was stopped before its first word; templates want turns to alternate.
            turn = Message(role="user", content=f"{turns.pop().content}\n\n{turn.content}")
        for step in message.steps:
            calls = step.calls[: len(step.results)]  # the others were not made
            if calls:
                turns.append(Message(role="assistant", content=step.said, reasoning=step.reasoning, calls=calls))
            for call, result in zip(calls, step.results, strict=False):
                turns.append(Message(role="tool", content=result.text, call_id=call.id, tool=call.name))
        turns.append(turn)
    return tuple(turns)


def sent_text(content: str, attachments: Iterable[Attachment]) -> str:
    """Return the attachments, each with its title and fenced, then the message itself."""
    sections = [f"{one.title}:\n{fenced(one.text)}" for one in attachments]
    return "\n\n".join([*sections, *filter(None, [content])])


def estimated_tokens(text: str) -> int:
    """Return about how many tokens a text has."""
    n_digits = sum(map(text.count, "0123456789"))  # each is a token for most models
    return round(n_digits + (len(text) - n_digits) / _CHARACTERS_PER_TOKEN)


def fenced(text: str) -> str:
    """Return `text` as a code block of Markdown, whatever is in it."""
    fence = "`" * (max((len(run) for run in _BACKTICKS.findall(text)), default=2) + 1)
    return f"{fence}\n{text.rstrip(chr(10))}\n{fence}"


class ChatHistory:
    """Holds the messages of one chat at a time: `messages` of the open branch, in `tree` the ids of all. Use it from
    one event loop. `store`: None keeps nothing: the chat lives in memory alone. `on_save_problem`: called when the
    problem of `saver`, which saves the last answer, changes."""

    def __init__(self, store: ChatStore | None, on_save_problem: Callable[[], object]) -> None:
        self.chat: Chat | None = None
        self.messages: list[StoredMessage] = []
        self.tree = Tree()
        self._deleted: list[Deleted] = []  # in this run: what is deleted is in no file
        self._store = store
        self.saver = AnswerSaver(store, on_save_problem)
        self.drafts = DraftSaver(store)
        self._shown: list[StoredMessage] = []  # the messages as they are once the answer has a word

    @property
    def store(self) -> ChatStore:
        """Return the chat database. Raises UsageError if there is none."""
        if self._store is None:
            raise UsageError("This conversation has no chat database.")
        return self._store

    @property
    def n_past(self) -> int:
        """Return the tokens in the context after the last answer, or those of a summary that follows it; with an
        estimate of what an answer adds that has no figures, as after a crash."""
        uncounted, n_past = 0, 0
        for message in reversed(self.messages):
            if message.timings is not None:
                n_past = message.timings.predicted_n if message.is_summary else message.timings.n_past
                break
            if uncounted or message.role == "assistant":
                text = sent_text(message.content, message.attachments)
                uncounted += estimated_tokens(message.reasoning + text)
        return n_past + uncounted

    async def stored_chat(self, chat_id: str) -> Chat:
        """Return a stored chat. Raises ChatsError."""
        return await asyncio.to_thread(self.store.chat, chat_id)

    async def list_chats(self, text: str = "") -> Sequence[Chat | SearchHit]:
        """Return all chats, last changed first, or those that hold `text`. Raises ChatsError."""
        store = self.store
        return await asyncio.to_thread(lambda: store.search(text) if text else store.chats())

    def clear(self) -> None:
        """Start a new chat, which is stored with its first message. Raises ChatsError while an answer is unsaved."""
        self._refuse_while_unsaved()
        self.chat, self.messages, self.tree = None, [], Tree()

    async def open(self, chat_id: str, still_free: Callable[[], None], message_id: int = 0) -> None:
        """Open a stored chat, on the branch of `message_id`; 0: the one that was open last. `still_free` raises if an
        answer began while it was read. Raises ChatsError: it cannot be read, or the last answer is not saved."""
        await self.saver.save()
        opened = await asyncio.to_thread(self.read, chat_id, message_id)
        still_free()
        self._refuse_while_unsaved()
        self.chat, self.tree, self.messages = opened

    def restore(self, messages: list[StoredMessage], system_prompt: str) -> None:
        """Continue a chat that is kept elsewhere, in memory alone."""
        now = time.time()
        self.chat = Chat(created=now, updated=now, system_prompt=system_prompt)
        self.messages = list(messages)

    async def rename(self, chat_id: str, title: str) -> None:
        """Rename a chat. Raises ChatsError."""
        await asyncio.to_thread(self.store.rename, chat_id, title)
        self._follow(chat_id, title=title)

    def _follow(self, chat_id: str, **changes: Any) -> None:
        """Take a change of a stored chat over if it is the open one."""
        if self.chat is not None and self.chat.id == chat_id:
            self.chat = msgspec.structs.replace(self.chat, **changes)

    async def fork(self, message_id: int = 0) -> Chat:
        """Copy the open chat up to a message (0: the last one) into a new one. Raises ChatsError."""
        assert self.chat is not None
        await self._require_saved()
        return await asyncio.to_thread(self.store.fork, self.chat.id, message_id or self.messages[-1].id)

    async def delete(self, chat_id: str) -> None:
        """Delete a chat; `undo_delete` puts it back. Raises ChatsError."""
        self._deleted.append(await asyncio.to_thread(self.store.delete, chat_id))

    async def delete_branch(self, message_id: int) -> bool:
        """Delete a message of the open chat and all that follow from it; `undo_delete` puts them back. False: the chat
        would be empty and is deleted. Raises ChatsError: nothing was deleted; ChatsChanged: another instance changed
        the chat, which has been loaded again."""
        assert self.chat is not None
        await self._require_saved()
        async with self._loading_again():
            deleted = await asyncio.to_thread(self.store.delete_branch, self.chat, message_id)
        self._deleted.append(deleted)
        return bool(deleted.message_id)

    async def undo_delete(self) -> Deleted | None:
        """Put back and return what this run deleted last or None. Raises ChatsError, also for an unsaved answer."""
        await self._require_saved()
        if not self._deleted:
            return None
        deleted = self._deleted.pop()
        try:
            await asyncio.to_thread(self.store.undelete, deleted)
        except ChatsError as error:
            if not isinstance(error, ChatsChanged):
                self._deleted.append(deleted)  # once there is room on the disk
            raise
        return deleted

    async def add_question(
        self, text: str, model: str, attach: Attach | None = None, **options: Any
    ) -> list[StoredMessage]:
        """Add a user message, in a new chat with these `options` if none is open, and return the messages to answer.
        Raises CpuchatError as `attach`; ChatsError: it was not saved, nor added; ChatsChanged: another instance changed
        the chat, which has been loaded again."""
        attachments = await _read_by(attach)
        new = options | {"model": model, "title": title_of(text, attachments)}
        await self._add_after(self.messages, "user", text, new, attachments=attachments)
        return self.messages

    async def add_summary(
        self, text: str, model: str, stop_reason: str | None = None, timings: Timings | None = None
    ) -> StoredMessage:
        """Add a model's summary of the open branch to its end, for `request_messages`. Raises as `add_question`."""
        figures: dict[str, Any] = {"stop_reason": stop_reason, "timings": timings}
        return await self._add_after(self.messages, "system", text, model=model, **figures)

    async def _add_after(
        self, messages: list[StoredMessage], role: Role, text: str, new: dict[str, Any] | None = None, **fields: Any
    ) -> StoredMessage:
        """Add a message that follows these, and open its branch. Without an open chat, `new` are the fields of one.
        Raises as `add_question`."""
        await self._require_saved()
        last = messages[-1].id if messages else 0

        def add() -> tuple[Chat, StoredMessage]:
            if self._store is None:
                now = time.time()
                chat = self.chat or Chat(created=now, updated=now, **(new or {}))
                at = len(messages)
                return chat, StoredMessage(id=at, parent=last, role=role, content=text, created=now, **fields)
            with self._store.transaction():
                if self.chat is not None:
                    self._store.require_unchanged(self.chat)
                chat = self.chat or self._store.create_chat(**(new or {}))
                added = self._store.add_message(chat.id, role, text, after=last, **fields)
                return self._store.chat(chat.id), added

        async with self._loading_again():
            self.chat, added = await asyncio.to_thread(add)
        self.messages = [*messages, added]
        if self._store is not None:
            self.tree.add(added.id, added.parent)
        return added

    async def set_options(self, **options: Any) -> None:
        """Set `when_full`, `system_prompt` or `own` of the open chat. Raises ChatsError."""
        assert self.chat is not None
        if self._store is not None:
            await asyncio.to_thread(self._store.set_options, self.chat.id, options)
        self._follow(self.chat.id, **options)

    async def up_to_question(
        self, text: str | None = None, message_id: int = 0, attach: Attach | None = None
    ) -> list[StoredMessage]:
        """Return the messages up to a question, in its place one with this `text` and what `attach` reads, if given.
        `message_id`: the question, or an answer to it; 0: the last one. Raises UsageError: none; as `add_question`."""
        index = len(self.messages) - 1
        if message_id:
            index = next((i for i, message in enumerate(self.messages) if message.id == message_id), -1)
        while index >= 0 and self.messages[index].role != "user":
            index -= 1
        if index < 0:
            raise UsageError("There is no message to answer.", "Write one first.")
        attachments = await _read_by(attach)
        await self._require_current()
        asked = self.messages[index]
        if text is not None and (storable(text), attachments) != (asked.content, asked.attachments):
            asked = msgspec.structs.replace(asked, id=UNSAVED, content=storable(text), attachments=attachments)
        after = self.messages[index + 1 : index + 2]
        summary = [one for one in after if one.is_summary and asked is self.messages[index]]
        return [*self.messages[:index], asked, *summary]

    @property
    def is_unfinished(self) -> bool:
        """Return whether the last answer can be continued: it was stopped or cut off."""
        answers = [one for one in self.messages[-1:] if one.role == "assistant" and (one.content or one.reasoning)]
        return any(one.stop_reason not in ("end", "stop_string") for one in answers)

    async def up_to_answer(self) -> list[StoredMessage]:
        """Return the messages up to the last answer, to continue it. Raises UsageError: complete; as `add_question`."""
        if not self.is_unfinished:
            raise UsageError("The last answer is complete.", "Only a stopped one can be continued; regenerate it.")
        await self._require_current()
        return list(self.messages)

    def begin_answer(self, history: list[StoredMessage], model: str, settings: AnswerSettings) -> None:
        """Begin an answer to `history`, or to continue the one at its end; with the first word, they become the open
        branch, also in the store."""
        assert self.chat is not None
        chat_id = self.chat.id

        def saved(rows: list[StoredMessage], version: int) -> None:
            row = rows[-1]
            if self.chat is None or self.chat.id != chat_id:
                return
            self.chat = msgspec.structs.replace(self.chat, version=version, leaf=None)
            if self.messages and self.messages[-1].id in (answer.id, row.id):
                for added in rows:
                    self.tree.add(added.id, added.parent)
                self.messages[-1] = msgspec.structs.replace(
                    self.messages[-1], id=row.id, parent=row.parent, created=row.created
                )
                self.messages[-len(rows) : -1] = rows[:-1]

        last = history[-1]
        if last.role == "assistant":
            history, answer = history[:-1], msgspec.structs.replace(last, stop_reason=None)
        else:
            answer = StoredMessage(
                id=UNSAVED, chat_id=chat_id, parent=last.id, role="assistant", model=model, settings=settings
            )
        self.saver.begin_answer(self.chat, answer, last, saved)
        self._shown = [*history, answer]

    async def put_answer(self, **changes: object) -> bool:
        """Change fields of the answer; a `stop_reason` saves it at once. Returns False if the chat has no place."""
        answer = msgspec.structs.replace(self._shown[-1], **changes)
        if answer != self._shown[-1]:
            self._shown[-1] = answer
            if answer.content or answer.reasoning or answer.steps:
                self.messages = self._shown
                self.saver.put(answer)
        if answer.stop_reason is not None:
            await self.saver.save()
        return self.saver.conflict is None

    @property
    def answer(self) -> StoredMessage:
        """Return the current state of the answer begun last."""
        return self._shown[-1]

    @property
    def question(self) -> StoredMessage | None:
        """Return the question of the answer begun last, which a summary may follow."""
        return next((one for one in reversed(self._shown) if one.role == "user"), None)

    async def end_answer(self) -> None:
        """Save the answer; one without a `stop_reason` was cancelled."""
        if self.answer.stop_reason is None:
            await self.put_answer(stop_reason="cancelled")
        else:
            await self.saver.save()

    async def require_own_answer(self) -> None:
        """Raise ChatsChanged if another instance changed the chat during the answer, and reload the chat then."""
        if self.saver.conflict is not None or self.saver.overtaken:
            await self._load_again()
            raise self.saver.conflict or ChatsChanged(
                "This chat was changed in another window during the answer.", "It has been reloaded."
            )

    def save(self) -> None:
        """Save drafts and the partial answer on this thread: the event loop has failed. Raises ChatsError."""
        self.drafts.save()
        self.saver.save_here()

    async def close_store(self) -> None:
        """Close the store, once `saver` is closed; no method may be called afterwards."""
        if self._store is not None:
            await asyncio.to_thread(self.drafts.save)
            await asyncio.to_thread(self._store.close)

    def read(self, chat_id: str, message_id: int = 0) -> tuple[Chat, Tree, list[StoredMessage]]:
        """Return a stored chat with the branch of `message_id`, as `open` does, which stays closed. On any thread."""
        store = self.store
        chat = store.chat(chat_id)  # before its messages: should they change in between, that is noticed later
        tree = store.tree(chat_id)
        if message_id in tree and message_id not in tree.path(tree.leaf):
            tree.leaf = tree.subtree(message_id)[-1]
            with contextlib.suppress(ChatsError):  # a full disk: it can be read all the same
                store.set_options(chat_id, {"leaf": tree.leaf})
        return chat, tree, store.messages(chat_id, tree)

    def _refuse_while_unsaved(self) -> None:
        if (problem := self.saver.problem) is not None:
            raise ChatsError(f"The last answer is not saved yet. {problem.message}", problem.hint)

    async def _require_saved(self) -> None:
        await self.saver.save()
        self._refuse_while_unsaved()

    async def _require_current(self) -> None:
        """Raise ChatsError if the last answer is not saved, ChatsChanged if another instance changed the chat."""
        await self._require_saved()
        if self.chat is not None and self._store is not None:
            async with self._loading_again():
                await asyncio.to_thread(self._store.require_unchanged, self.chat)

    @contextlib.asynccontextmanager
    async def _loading_again(self) -> AsyncIterator[None]:
        try:
            yield
        except ChatsChanged:
            await self._load_again()
            raise

    async def _load_again(self) -> None:
        if self.chat is not None:
            with contextlib.suppress(ChatsError):  # deleted: what is on the screen stays there
                self.chat, self.tree, self.messages = await asyncio.to_thread(self.read, self.chat.id)


async def _read_by(attach: Attach | None) -> tuple[Attachment, ...]:
    return () if attach is None else await asyncio.to_thread(attach)
