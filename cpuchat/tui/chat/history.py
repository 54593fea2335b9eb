"""Stored chats on the chat screen: list, search, open, rename, delete, and their branches."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from textual import on, work
from textual.content import Content
from textual.screen import Screen

from cpuchat.base.errors import CpuchatError
from cpuchat.base.files import write_atomically
from cpuchat.base.paths import expanded, shown
from cpuchat.base.text import clean_line
from cpuchat.chats.records import Chat
from cpuchat.chats.store import Matcher
from cpuchat.conversation import Conversation
from cpuchat.telemetry.units import plural
from cpuchat.tui.chat.chat_list import ChatList
from cpuchat.tui.chat.messages import last_turn
from cpuchat.tui.chat.slash import running_command
from cpuchat.tui.chat.stream import ChatStream
from cpuchat.tui.chat.transcript import ChatTranscript
from cpuchat.tui.markdown.transcript import Transcript
from cpuchat.tui.services import Services
from cpuchat.tui.widgets.dialogs import AskTextScreen, ConfirmScreen
from cpuchat.tui.widgets.prompt import Prompt

_UNDO = "You can undo this until you quit (U in the chat list)."
_NOTICE_SECONDS = 60.0  # of what the user has to know about a damaged file


class HistoryScreen(Screen[None]):
    """Base of the chat screen, which defines what only raises here: the metaclass of Textual leaves no room for ABC."""

    conversation: Conversation
    services: Services
    _stream: ChatStream

    def tell(self, text: str, severity: str = "information") -> None:
        """Show a toast, as plain text."""
        timeout = 5 if severity == "information" else 10
        self.notify(text, severity=severity, timeout=timeout, markup=False)  # type: ignore[arg-type]

    def refuse(self, text: str, severity: str = "warning") -> None:
        """Say why something cannot be done. The command that was typed for it goes back into an empty prompt."""
        self.tell(text, severity)
        prompt = self.query_one(Prompt)
        if not prompt.text and (command := running_command.get()):
            prompt.put(command)

    def refuse_while_writing(self, action: str) -> bool:
        """Say that `action` has to wait, and return True, while an answer is being written."""
        if self._stream.writing:
            self.refuse(f"You can {action} when the answer is done (Esc stops it).")
        return self._stream.writing

    def refuse_while_busy(self, action: str) -> bool:
        """Say that `action` has to wait, and return True, while an answer or a load is running."""
        if self._stream.busy and not self.refuse_while_writing(action):
            self.refuse(f"You can {action} when the model is loaded (Esc stops the load).")
        return self._stream.busy

    def open_comparison(self, chat: Chat, message_id: int = 0) -> object:
        """Show a stored comparison, from the turn with this message unless 0."""
        raise NotImplementedError

    def show_chat(self, message_id: int = 0, matcher: Matcher | None = None) -> None:
        """Show the conversation's chat from its end, or from a message, with what `matcher` finds marked."""
        raise NotImplementedError

    def show_branch(self, message_id: int) -> None:
        """Show another branch of the same chat from this message."""
        raise NotImplementedError

    def show_chat_title(self) -> None:
        chat = self.conversation.chat
        for transcript in self.query(Transcript):  # none while the app ends
            transcript.border_title = Content(clean_line(chat.title)) if chat else "New chat"

    def show_save_problem(self) -> None:
        """Show that the answer could not be saved, or that it is saved now."""
        problem = self.conversation.history.save_problem
        self.query_one(Transcript).border_subtitle = Content(f"Not saved: {problem.message}") if problem else ""
        if problem is not None:
            self.tell(f"The answer is not saved. {problem} Saving is being retried.", "error")
        elif not self.conversation.history.answer_lost:
            history = self.conversation.history
            for message in last_turn(history.messages, history.tree):  # it has an id now
                self.query_one(ChatTranscript).identify(message)
            self.tell("Answer saved.")

    @on(ChatList.Searched)
    @work(exclusive=True, group="list-chats")
    async def list_chats(self) -> None:
        """Show the chats, or those that match the search."""
        if not self.app.is_running:  # its widgets may be gone
            return
        with self._telling():
            found = await self.conversation.history.list_chats(self.query_one(ChatList).searching)
            if self.app.is_running:
                self.query_one(ChatList).show(found, self.chat_id)
        for notice in self.conversation.history.store.take_notices():
            self.notify(notice, severity="warning", timeout=_NOTICE_SECONDS, markup=False)

    @work(exclusive=True, group="open-chat")
    async def open_chat(self, chat_id: str, message_id: int = 0, matcher: Matcher | None = None) -> None:
        """Show a stored chat, from `message_id` unless 0, with what `matcher` finds marked."""
        if self.refuse_while_writing("open another chat"):
            return
        with self._telling(), self.services.keys_held():
            if (chat := await self.conversation.history.stored_chat(chat_id)).sides:
                self.open_comparison(chat, message_id)
                return
            is_other = chat_id != self.chat_id
            await self.conversation.open_chat(chat_id, message_id)
            self._chat_changed(message_id, matcher)
            if is_other:
                self._chat_left()
        self.list_chats()

    def action_new_chat(self) -> None:
        if self.refuse_while_writing("start a new chat"):
            return
        with self._telling():
            self.conversation.new_chat()
            self._chat_changed()
            self._chat_left()
        self.list_chats()

    def _chat_left(self) -> None:
        """Undo what was chosen for the chat that was shown, if it is not stored."""

    def _chat_changed(self, message_id: int = 0, matcher: Matcher | None = None) -> None:
        self.query_one(ChatList).clear_search()
        self.show_chat(message_id, matcher)
        if message_id and matcher is not None:
            self.query_one(ChatTranscript).focus()  # n goes to the next match

    def action_rename_chat(self, title: str = "") -> None:
        self._with_open_chat(lambda chat_id: self._rename(chat_id, title))

    def action_pin_chat(self) -> None:
        self._with_open_chat(self._pin)

    def action_export_chat(self) -> None:
        self._with_open_chat(self._export)

    @work
    async def _export(self, chat_id: str) -> None:
        """Ask for a file and write the chat to it."""
        from cpuchat.chats.transfer.importing import export_chat
        from cpuchat.present.chats import document

        history = self.conversation.history
        with self._telling():
            with self.services.keys_held():
                chat = await history.stored_chat(chat_id)
            name = re.sub(r"[^\w.-]+", "-", chat.title).strip("-.") or "chat"
            title = "Export to Markdown (.md) or JSON (.json)"
            folder = f"Folder: {shown(Path.cwd())} (a path chooses another)"
            wanted = await self.app.push_screen_wait(AskTextScreen(title, f"{name}.md", 4096, folder))
            if not wanted:
                return
            file = expanded(wanted)
            try:
                exported = await asyncio.to_thread(export_chat, history.store, await history.stored_chat(chat_id))
                await asyncio.to_thread(write_atomically, file, document([exported], file))
            except OSError as error:
                self.tell(f"Cannot write {file}: {error.strerror}. Choose another file.", "error")
            else:
                self.tell(f"Exported to {shown(file.absolute())}.")

    def action_delete_chat(self) -> None:
        self._with_open_chat(self._delete)

    def _with_open_chat(self, act: Callable[[str], object]) -> None:
        if self.chat_id is None:
            self.tell("This chat has no messages yet.")
        else:
            act(self.chat_id)

    @on(ChatList.Opened)
    def _opened(self, event: ChatList.Opened) -> None:
        searching = self.query_one(ChatList).searching
        self.open_chat(event.chat_id, event.message_id, Matcher(searching) if searching else None)

    @on(ChatList.RenameAsked)
    def _rename_asked(self, event: ChatList.RenameAsked) -> None:
        self._rename(event.chat_id)

    @on(ChatList.PinAsked)
    def _pin_asked(self, event: ChatList.PinAsked) -> None:
        self._pin(event.chat_id)

    @on(ChatList.DeleteAsked)
    def _delete_asked(self, event: ChatList.DeleteAsked) -> None:
        self._delete(event.chat_id)

    def action_reasoning(self) -> None:
        self.query_one(ChatTranscript).toggle_reasoning()

    @on(Prompt.Scrolled)
    def _scrolled(self, event: Prompt.Scrolled) -> None:
        self.query_one(ChatTranscript).scroll_pages(event.pages)

    # Branches

    def question_index(self, message_id: int = 0) -> int:
        """Return the index of a question, or of the one that a message answers; 0: the last. -1 without any."""
        messages = self.conversation.messages
        ids = [message.id for message in messages]
        index = ids.index(message_id) if message_id in ids else len(ids) - 1
        return next((at for at in range(index, -1, -1) if messages[at].role == "user"), -1)

    @property
    def selected_message(self) -> int:
        """Return the id of the message under the marker while the transcript is in use, else 0."""
        return self.query_one(ChatTranscript).selected_id

    @on(ChatTranscript.BranchAsked)
    def _branch_asked(self, event: ChatTranscript.BranchAsked) -> None:
        self._switch_branch(event.message_id, event.step)

    def action_branch(self, step: int) -> None:
        """Open the branch beside the selected message, or beside the last one that has any."""
        siblings = self.conversation.history.tree.siblings
        with_branches = [m.id for m in self.conversation.messages if len(siblings(m.id)) > 1]
        message_id = self.selected_message or (with_branches[-1] if with_branches else 0)
        if message_id not in with_branches:
            self.tell("No other answer here. Regenerate or edit makes one.")
        else:
            self._switch_branch(message_id, step)

    @work(exclusive=True, group="open-chat")
    async def _switch_branch(self, message_id: int, step: int) -> None:
        siblings = self.conversation.history.tree.siblings(message_id)
        at = siblings.index(message_id) + step
        if self.refuse_while_writing("show another answer") or self.chat_id is None:
            return
        if not 0 <= at < len(siblings):
            which = "last" if step > 0 else "first"
            self.tell(
                f"This is the {which} of {len(siblings)}. Select another ‹ › (Shift+Tab, then k or j) to switch it."
            )
            return
        with self._telling(), self.services.keys_held():
            await self.conversation.open_chat(self.chat_id, siblings[at])
            self.show_branch(siblings[at])

    def tell_if_greedy(self, answer: int) -> None:
        """Say that regenerating the answer with this index gives the same text, if it was and will be greedy."""
        messages = self.conversation.messages[answer : answer + 1]
        used = [one.sampling for one in messages if one.stop_reason == "end"]
        next_used = self.conversation.in_effect.sampling.sampling()
        if used and all(one is not None and not one.temperature for one in (*used, next_used)):
            how = " F2, Temperature changes that." if self.check_action("settings", ()) else ""
            self.tell(f"Greedy sampling: expect the same answer again.{how}")

    @work
    async def action_fork(self) -> None:
        """Copy the chat up to the selected message, or all of it, into a new chat."""
        if not self.conversation.messages:
            self.tell("This chat has no messages yet.")
        elif not self.refuse_while_writing("fork this chat"):
            with self._telling():
                await self.conversation.fork_chat(self.selected_message or self.conversation.messages[-1].id)
                self._chat_changed()
                self.tell("Forked. You are in the new chat.")
            self.list_chats()

    @work
    async def action_delete_message(self) -> None:
        """Delete the selected message and what follows from it, on all branches."""
        if not (message_id := self.selected_message):
            self.tell("Select a message first (k or j).")
        elif not self.refuse_while_writing("delete messages"):
            following = len(self.conversation.history.tree.subtree(message_id)) - 1
            rest = f" and {plural(following, 'message')} after it, on all branches" if following else ""
            is_summary = any(one.id == message_id and one.is_summary for one in self.conversation.messages)
            what = "this summary? What follows it stays." if is_summary else f"this message{rest}?"
            question = f"Delete {what} {_UNDO}"
            if await self.app.push_screen_wait(ConfirmScreen("Delete message", question, "Delete", "Cancel")):
                if self.refuse_while_writing("delete messages"):
                    return
                with self._telling():
                    try:
                        await self.conversation.delete_message(message_id)
                    finally:  # it may have been changed in another window
                        self.show_chat()
                    transcript = self.query_one(ChatTranscript)
                    transcript.focus()  # U is a key there, and a letter in the prompt
                    self.tell(f"Deleted. U {'' if transcript.has_messages else 'in the chat list '}undoes it.")
                self.list_chats()

    @work
    async def action_undo_delete(self) -> None:
        if not self.refuse_while_writing("undo"):
            with self._telling():
                if deleted := await self.conversation.history.undo_delete():
                    self.open_chat(deleted.chat_id, deleted.message_id)
                else:
                    self.tell("Nothing to undo.")
            self.list_chats()

    @property
    def chat_id(self) -> str | None:
        """Return the open chat; None for one without messages."""
        return self.conversation.chat.id if self.conversation.chat else None

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Show a `CpuchatError` raised inside the block as a toast."""
        try:
            yield
        except CpuchatError as error:
            self.tell(str(error), "error")

    @work
    async def _rename(self, chat_id: str, title: str = "") -> None:
        """Rename a chat; without a title, ask for one."""
        with self._telling():
            with self.services.keys_held():
                chat = await self.conversation.history.stored_chat(chat_id)
            if title := title or await self.app.push_screen_wait(AskTextScreen("Rename chat", chat.title)) or "":
                await self.conversation.history.rename(chat_id, title)
                self.show_chat_title()
        self.list_chats()

    @work
    async def _pin(self, chat_id: str) -> None:
        """Pin a chat, or unpin it."""
        with self._telling():
            chat = await self.conversation.history.stored_chat(chat_id)
            await self.conversation.history.pin(chat_id, not chat.pinned)
            self.tell("Unpinned." if chat.pinned else "Pinned: it is listed first.")
        self.list_chats()

    @work
    async def _delete(self, chat_id: str) -> None:
        if chat_id == self.chat_id and self.refuse_while_writing("delete this chat"):
            return
        with self._telling():
            with self.services.keys_held():
                title = (await self.conversation.history.stored_chat(chat_id)).title
            question = f"Delete “{title}” and all its messages? {_UNDO}"
            if await self.app.push_screen_wait(ConfirmScreen("Delete chat", question, "Delete", "Cancel")):
                # The dialog may have been open while a queued message was sent.
                if chat_id == self.chat_id and self.refuse_while_writing("delete this chat"):
                    return
                was_open = chat_id == self.chat_id
                await self.conversation.delete_chat(chat_id)
                self.tell(f"Deleted “{title}”. U in the chat list undoes it.")
                if was_open:
                    self.show_chat()
        self.list_chats()
