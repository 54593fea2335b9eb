"""The prompt of a chat: new messages and edits, the files and commands that are typed into it, and the queue above it.

Paths are completed after @, commands after /. What a message would send is shown before it is sent.
"""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

from textual import on
from textual.content import Content
from textual.screen import Screen
from textual.widgets import OptionList, Static, TextArea

from cpuchat.base.errors import UsageError
from cpuchat.base.processes import run_in_daemon_thread
from cpuchat.base.text import clean_line
from cpuchat.chats.drafts import Draft, joined
from cpuchat.chats.history import estimated_tokens, sent_text
from cpuchat.chats.records import Attachment, StoredMessage
from cpuchat.protocol.messages import ANSWER_SHARE
from cpuchat.session import attachments
from cpuchat.session.activity import Activity
from cpuchat.session.chat import ChatSession
from cpuchat.session.events import Outgoing
from cpuchat.telemetry.units import plural, time_left
from cpuchat.tui.commands import offered, run_on_screen
from cpuchat.tui.widgets.prompt import PromptInput

ACTIONS = {"/rename": "rename_chat"}
"""Of the commands that take an argument, which it is for."""
_COMMAND = re.compile(rf"(/[A-Za-z\d-]*)|({'|'.join(ACTIONS)}) +(\S.*)")
_LIKE_COMMAND = re.compile(r"(/[A-Za-z\d-]+) +\S.*")
_PAUSE_SECONDS = 0.15  # in typing, before files are read
_COUNTED = 200  # characters from which the tokens of a message without attachments are shown
_MIN_WAIT = 2.0  # seconds to read a message from which they are shown
_QUEUED = "Queued: "

running_command: ContextVar[str] = ContextVar("running_command", default="")
"""The command that started what runs in this context, as it was typed."""


def command_in(text: str) -> tuple[str, str] | None:
    """Return name and argument of a command, "" for none: `/rename Regex for dates`."""
    match = _COMMAND.fullmatch(text)
    return None if match is None else (match[1] or match[2], match[3] or "")


def refused(text: str, known: Collection[str]) -> str:
    """Return why a text that begins as a command does is neither run nor sent, "" for any other."""
    if (typed := command_in(text)) is not None:
        return "" if typed[0] in known else f"Unknown command {typed[0]}."
    match = _LIKE_COMMAND.fullmatch(text)
    if match is None or (match[1] not in known and Path(match[1]).exists()):
        return ""  # a path and a question, for one
    return f"{match[1]} takes no argument." if match[1] in known else f"Unknown command {match[1]}."


def dropped_model(text: str) -> Path | None:
    """Return the model file that is all of a message, as when it is dropped on the terminal: nobody asks a path."""
    if not text.rstrip("'\" ").lower().endswith(".gguf"):
        return None
    from cpuchat.tui.models.entries import problem_at, typed_path

    path = typed_path(text)
    return path if path is not None and not problem_at(path) else None


def commands(screen: Screen[Any]) -> dict[str, tuple[str, Callable[[], Any]]]:
    """Return what can be done now, by name (`/copy-code`): its title, and what does it."""
    return {f"/{key.id.partition('.')[2].replace('_', '-')}": (title, run) for key, title, run in offered(screen)}


def _pasted_in(texts: Mapping[str, str]) -> dict[str, Attachment]:
    return {mark: Attachment(mark=mark, title=mark[1:].partition(":")[0], text=text) for mark, text in texts.items()}


class Paths(OptionList, can_focus=False):
    """The paths or commands that continue what is typed; the prompt keeps the focus and its keys choose."""

    def __init__(self) -> None:
        super().__init__(id="paths", compact=True)
        self.marks: list[str] = []

    def offer(self, titles: Mapping[str, str], highlights: bool = True) -> None:
        """Show these marks, each beside its title if it has one; nothing if there are none. `highlights`: the first."""
        self.marks = [*titles]
        self.clear_options()
        rows = [(f"{mark:<18}" if title else mark, (title, "dim")) for mark, title in titles.items()]
        self.add_options([Content.assemble(*row) for row in rows])
        self.highlighted = 0 if titles and highlights else None
        self.set_class(bool(titles), "-open")


class QueuedMessages(Static):
    """The messages that are sent one after the other when what runs has ended, a line each."""

    def show(self, messages: Sequence[Outgoing]) -> None:
        """Show these, or nothing when there are none."""
        heads = [_QUEUED, *[" " * len(_QUEUED)] * len(messages)]
        self.update(Content("\n".join(heads[at] + clean_line(one.text) for at, one in enumerate(messages))))
        self.set_class(bool(messages), "-open")


class Composer(PromptInput):
    """A prompt that gives messages to a session. It knows what is edited, and each chat's draft and pasted texts."""

    def __init__(self, session: ChatSession, *, id: str | None = None) -> None:
        super().__init__(self.submit, id=id)
        self._session = session
        self._folder = attachments.start_folder()
        self.actions: Mapping[str, str] = {}
        """Texts that are actions of the screen in place of messages; "" is Enter in an empty prompt."""
        self.editing: int | None = None
        """Id of the message that is being edited."""
        self.edits = ""
        """What: "message" or "last message"."""
        self.chat_id: str | None = None
        """The chat that the prompt belongs to."""
        self._before_editing = ""
        self._told = ""  # why drafts are not saved
        self._edited = ""  # what an edit began with
        self._drafts: dict[str | None, Draft] = {}  # of the chats that are not open
        self._pasted: dict[str, Attachment] = {}  # in this chat, by mark
        self._resent: dict[str, Attachment] = {}  # of the message that is being edited, by mark
        self._options = ""  # per-chat overrides
        self._attached = ""  # what would be sent with the message, or why it cannot be
        self._typed = ""  # the mark or command that is completed
        self._seen: tuple[list[str], bool, str] = ([], False, "")

    def on_mount(self) -> None:
        self._paths = self.screen.query_one(Paths)

    def restore_drafts(self) -> str:
        """Take over the drafts of windows that have ended; return the chat of the last or "". Raises ChatsError."""
        self._drafts = self._session.history.drafts.take()
        text, pasted = self._drafts.pop(self.chat_id, ("", {}))
        self._pasted |= _pasted_in(pasted)
        self.put(text)
        return "" if text or self.chat_id else next(filter(None, reversed(self._drafts)), "")

    @property
    def _unsent(self) -> str:
        """Return the draft, and what was changed of a message that is edited."""
        if self.editing is None:
            return self.draft
        return joined(self._before_editing, self.draft if self.draft != self._edited else "")

    def save_draft(self) -> None:
        """Have what is not sent saved, queued messages first."""
        text = joined(*(message.text for message in self._session.queue), self._unsent)
        pasted = {mark: one.text for mark, one in self._held.items() if attachments.is_pasted(one)}
        self._session.history.drafts.put(self.chat_id, text, pasted)

    def follow_chat(self) -> None:
        """Belong to the chat that the first message has begun, with what was typed since."""
        if self.chat_id != self._session.chat_id:
            self._session.history.drafts.put(self.chat_id, "", {})
            self.chat_id = self._session.chat_id
            self.save_draft()

    def show_titles(self, options: str | None = None) -> None:
        """Show in the border what Enter and Esc do, and the per-chat overrides (None: as before)."""
        self._options = self._options if options is None else options
        session, queue = self._session, self._session.queue
        title: Content | str = Content(f"Message · {clean_line(self._options)}") if self._options else "Message"
        recalls = ["↑ edits the last one"] if queue else []
        if self.editing is not None:
            title = f"Edit {self.edits}"
            what = "Enter regenerates from here · Esc cancels"
        elif session.next_begins_chat:
            title, what = "Message for a new chat", "Enter sends it when the answer is done · Ctrl+N: to this chat"
        elif self.offers_completions:
            thing = "command" if self._typed.startswith("/") else "path"
            what = f"↑↓ {plural(len(self._paths.marks), thing)} · Tab completes"
        elif command_in(self.text):
            what = "Enter runs"
        elif session.busy and session.activity is not Activity.LOADING:
            what = " · ".join(("Enter queues", *recalls, "Esc stops the answer"))
        elif queue:
            what = " · ".join((*recalls, "Esc unqueues all"))
        elif session.busy:
            what = "Enter queues it until the model is ready"
        else:
            what = f"Enter sends · {'Alt+R continues' if session.history.is_unfinished else 'Ctrl+J new line'}"
        if self._attached:
            title = Content(f"{title} · {self._attached}")
        self.border_title, self.border_subtitle = title, what
        self.set_class(self.editing is not None, "-editing")
        self.hold_cursor(session.busy)

    # Sending

    def action_submit(self) -> None:
        if not self.text.strip() and (action := self.actions.get("")):
            self.clear()
            self.call_later(self.screen.run_action, action)
        else:
            super().action_submit()

    def submit(self, text: str) -> None:
        """Run `text` if it is a command; else send it, or leave it in the prompt and say why."""
        session = self._session
        known = commands(self.screen) if self.editing is None else {}
        if self.editing is None and (why := refused(text, known)):
            session.tell(f"{why} Type / for a list; to send this, put a word before it.", "warning")
        elif self.editing is None and (typed := command_in(text)) is not None:
            name, argument = typed
            run = known[name][1]
            if argument:
                run = partial(self.app.run_action, ("", ACTIONS[name], (argument,)), self.screen)

            async def run_typed() -> None:
                token = running_command.set(text)  # workers inherit it
                try:
                    if inspect.isawaitable(ran := run()):
                        await ran
                finally:
                    running_command.reset(token)

            self.clear()
            self.call_later(run_typed)
        elif action := self.actions.get(text):
            self.clear()
            self.call_later(self.screen.run_action, action)
        elif self.editing is None and (model := dropped_model(text)) is not None:
            if not session.busy:
                self.clear()
            session.load(model)  # or says that it waits for the answer
        elif session.source is None:
            session.tell("Choose a model first; your text stays in the prompt.")
            run_on_screen(self, "models")
        else:
            self.accept()
            self.close_completions()
            read = partial(attachments.attach, text, self._folder, self._held) if attachments.named(text) else None
            message = Outgoing(text, read, self.editing, self._resent, session.next_begins_chat)
            self.editing, self._resent, session.next_begins_chat = None, {}, False
            session.submit(message)
            self.save_draft()
            self.show_titles()

    async def read_question(self) -> str:
        """Return the text in the prompt with what it names, as the model gets it; else the last question of the chat.
        Raises CpuchatError if a file cannot be read."""
        if (text := self.text.strip()) and not command_in(text):
            read = partial(attachments.attach, text, self._folder, self._held)
            return sent_text(text, await run_in_daemon_thread(read))
        if (at := self._session.question_index()) < 0:
            return ""
        return sent_text(self._session.messages[at].content, self._session.messages[at].attachments)

    # The queue

    def recall(self) -> bool:
        if (message := self._session.take_back()) is not None:
            self._bring_back(message, message.text)
        return message is not None

    def unqueue(self) -> None:
        """Put the queued messages back into the prompt, before what was typed since."""
        if messages := self._session.take_back_all():
            self._bring_back(messages[0], joined(*(message.text for message in messages), self.text))

    def put_back(self, message: Outgoing) -> None:
        """Put a message that was not sent back into the prompt, or before the queue if another text is in there."""
        if self.text:
            self._session.requeue(message)
        else:
            self._bring_back(message, message.text)

    def _bring_back(self, message: Outgoing, text: str) -> None:
        """Put a text back into the prompt; if its first message was an edit, that goes on."""
        self.put(text)
        if message.editing is not None:
            self.editing, self._resent = message.editing, dict(message.resent)
            self.edits = self.edits or "message"

    # Editing, and each chat's own

    def begin_editing(self, message: StoredMessage, kind: str) -> None:
        """Edit a sent message, with the attachments that it has; `kind` is what `edits` is."""
        if self.editing is None:
            self._before_editing = self.draft
        self._edited = message.content
        self.editing, self.edits = message.id, kind
        self._resent = {attachment.mark: attachment for attachment in message.attachments}
        self.put(message.content)
        self.focus()
        self.show_titles()

    def cancel_editing(self) -> None:
        if self.editing is not None:
            self.editing, self._resent = None, {}
            self.put(self._before_editing)

    def switch_branch(self) -> None:
        """Show another branch of the chat, whose sent messages ↑ brings back; an edit ends, the draft stays."""
        self.cancel_editing()  # of a message that may not be on this branch
        self.begin_chat(self._session.questions, self.draft)

    def switch_chat(self) -> None:
        """Switch to the open chat; ↑ brings back what was sent, with its attachments. Each chat keeps its draft."""
        session = self._session
        if session.queue and session.chat_id != self.chat_id:
            self.unqueue()  # the messages belong to the chat that was open
            session.tell("Queued messages were not sent; they are back in the prompt of their chat.")
        self._drafts[self.chat_id] = self._unsent, {mark: one.text for mark, one in self._pasted.items()}
        self.chat_id, self.editing, self._resent = session.chat_id, None, {}
        draft, unsent = self._drafts.pop(self.chat_id, ("", {}))
        sent = [attachment for message in session.conversation.messages for attachment in message.attachments]
        self._pasted = {one.mark: one for one in sent if attachments.is_pasted(one)} | _pasted_in(unsent)
        self.begin_chat(session.questions, draft)
        self.focus()

    # Attachments

    @property
    def _held(self) -> dict[str, Attachment]:
        """Return the attachments that marks in the prompt stand for, beside files that are still to be read."""
        return self._pasted | self._resent

    def fold(self, text: str) -> str:
        """Return what is inserted for a pasted text: for a long one its mark."""
        if len(text) <= attachments.PASTED_CHARACTERS and len(text.splitlines()) <= attachments.PASTED_LINES:
            return text
        number = 1
        while any(mark.startswith(f"[Pasted text {number}:") for mark in self._held):
            number += 1
        attachment = attachments.pasted(text, number)
        self._pasted[attachment.mark] = attachment
        row, column = min(self.selection)
        before = self.document.get_line(row)[:column]
        return f"{' ' if before[-1:].strip() else ''}{attachment.mark} "

    @on(TextArea.Changed)
    def _text_changed(self) -> None:
        """Offer completions, show what the message would send, and save it as the draft."""
        self.save_draft()
        if (problem := str(self._session.history.drafts.problem or "")) and problem != self._told:
            self._session.tell(f"What you type is not saved. {problem}", "warning")
        self._told = problem
        text = self.text
        typed = text and text != self.placed  # not a message that was recalled
        mark = self._unfinished() if typed else None
        command = command_in(text) if self.editing is None else None
        if typed and command is not None and not command[1]:
            titles = {name: title for name, (title, _) in commands(self.screen).items()}
            begun = [name for name in titles if name.startswith(text)]
            word = text.removeprefix("/")
            meant = [name for name in titles if any(part.startswith(word) for part in titles[name].lower().split())]
            found = {name: titles[name] for name in (*begun, *meant) if name != text}
            self._typed = text
            self._paths.offer(found, highlights=text not in ("/", *titles))
        elif mark is None:
            self.close_completions()
        else:
            self.run_worker(partial(self._offer_paths, mark), exclusive=True, group="paths")
        self.show_titles()
        marks = attachments.named(text)
        seen = marks, mark is not None, text if marks or len(text) >= _COUNTED else ""
        if seen != self._seen:
            self._seen = seen
            self.run_worker(partial(self._show_attached, *seen), exclusive=True, group="attachments")

    async def _show_attached(self, marks: list[str], typing: bool, text: str) -> None:
        attached = ""
        if text:
            await asyncio.sleep(_PAUSE_SECONDS)
            try:
                found = await run_in_daemon_thread(partial(attachments.attach, text, self._folder, self._held))
            except UsageError as error:  # what is being typed may still become right
                attached = "" if typing else error.message
            else:
                if found or len(text) >= _COUNTED:
                    title = clean_line(found[0].title) if len(found) == 1 else plural(len(found), "attachment")
                    attached = f"{title}, {self._cost(text, found)}" if found else self._cost(text, found)
        if attached != self._attached:
            self._attached = attached
            self.show_titles()

    def _cost(self, text: str, found: tuple[Attachment, ...]) -> str:
        """Return the tokens of a message, and what they cost: `≈63 tokens · ≈4 s to read`."""
        conversation = self._session.conversation
        n_ctx, used = conversation.n_ctx, conversation.history.n_past
        parts = [*(sent_text("", [attachment]) + "\n\n" for attachment in found), text]
        n_tokens = sum(map(estimated_tokens, parts))
        tokens = f"≈{plural(n_tokens, 'token')}"
        room = n_ctx - n_ctx // ANSWER_SHARE
        if 0 < room < n_tokens:
            return f"{tokens}: too long for the context of {n_ctx:,}"
        if 0 < room < n_tokens + used:
            tokens = f"{tokens}: with this chat {n_tokens + used:,} of {n_ctx:,}"
        seconds = conversation.meter.prefill_s(n_tokens)
        if seconds is not None and seconds > _MIN_WAIT:
            tokens = f"{tokens} · ≈{time_left(seconds).removesuffix(' left')} to read"
        return tokens

    # Completion

    @property
    def offers_completions(self) -> bool:
        return bool(self._paths.marks)

    def complete(self, sends: bool = False) -> bool:
        """Complete with what is highlighted; a space follows a file."""
        index = self._paths.highlighted
        if not self.offers_completions or index is None:
            return False
        chosen = self._paths.marks[index]
        if self._typed.startswith("/"):
            is_unchanged = self.text == self._typed
            self.close_completions()
            if is_unchanged:
                self.put(chosen)
            return is_unchanged and not sends
        if (mark := self._unfinished()) != self._typed:
            return False
        self.close_completions()
        row, column = self.cursor_location
        rest = self.document.get_line(row)[column:]
        insert = chosen if chosen.endswith("/") or (rest and not rest[0].isalnum()) else f"{chosen} "
        start = column - len(mark or "")
        self.replace(insert, (row, start), (row, column))
        self.move_cursor((row, start + len(insert)))
        return True

    def move_completion(self, step: int) -> bool:
        if not self.offers_completions:
            return False
        (self._paths.action_cursor_down if step > 0 else self._paths.action_cursor_up)()
        return True

    def close_completions(self) -> bool:
        """Offer nothing more for what is typed; False if nothing was offered."""
        was_open, self._typed = self.offers_completions, ""
        if was_open:
            self._paths.offer({})
            self.show_titles()
        return was_open

    def _unfinished(self) -> str | None:
        row, column = self.cursor_location
        return attachments.unfinished(self.document.get_line(row)[:column]) if self.selection.is_empty else None

    async def _offer_paths(self, mark: str) -> None:
        found = await run_in_daemon_thread(lambda: attachments.completions(mark, self._folder))
        if self._unfinished() == mark and self.has_focus:
            self._typed = mark
            self._paths.offer({} if found == [mark] else dict.fromkeys(found, ""))
            self.show_titles()
