"""Sends what is in the prompt on the chat screen, and queues messages while something runs."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncIterator, Callable
from functools import partial

from textual import on

from cpuchat.base.errors import CpuchatError
from cpuchat.chats.records import storable
from cpuchat.protocol.messages import AnyEvent, Failed
from cpuchat.tui.chat.attaching import Attaching
from cpuchat.tui.chat.clipboard import Clipboard
from cpuchat.tui.chat.composer import Outgoing
from cpuchat.tui.chat.messages import sent_message, system_prompt
from cpuchat.tui.chat.panes import PanesScreen
from cpuchat.tui.chat.queued import QueuedMessages
from cpuchat.tui.chat.slash import ACTIONS, FORMER, commands, is_command, running_command, with_argument
from cpuchat.tui.chat.welcome import COMPARE


class SendingScreen(PanesScreen):
    """Base of the chat screen, which defines what only raises here: the metaclass of Textual leaves no room for ABC."""

    _attaching: Attaching
    _clipboard: Clipboard
    _queued: QueuedMessages
    _full: Failed | None = None  # the last message had no room
    _held = False  # the last answer failed: what is queued waits for the user

    def action_models(self) -> object:
        raise NotImplementedError

    def edit_question(self, index: int) -> None:
        """Edit the message with this index in the prompt."""
        raise NotImplementedError

    def _show_messages(self, end: int | None = None) -> None:
        """Show the messages before the one with the index `end`."""
        raise NotImplementedError

    def _show_welcome(self) -> None:
        raise NotImplementedError

    def submit_or_save(self, text: str) -> None:
        """Save an edited summary, answer or system prompt, which needs no model; submit anything else."""
        editing, kind = self._composer.editing, self._composer.edits
        if editing is None or self._composer.attaches:
            self.submit(text)
        elif not self.refuse_while_writing(f"save the {kind}"):
            self._composer.cancel_editing()
            self._show_prompt_title()
            if kind == "system prompt":
                self.save_system_prompt(text)
            else:
                (self.save_answer if kind == "answer" else self.save_summary)(editing, text)

    def submit(self, text: str) -> None:
        """Run `text` if it is a command; else send it, queue it while something runs, or leave it in the prompt and say
        why.
        """
        if self._composer.editing is None and (is_command(text) or with_argument(text)):
            self._run_command(text, *(with_argument(text) or (text, "")))
        elif text == COMPARE and not self._transcript.has_messages and self.check_action("compare", ()):
            self.action_compare()
        elif self._stream.path is None:
            self.tell("Choose a model first; your text stays in the prompt.")
            self.action_models()
        elif not self._attaching.hold_back(text):
            self._prompt.accept()
            self._composer.enqueue(self._attaching.take(text))
            if not self._stream.loaded and not self._stream.busy:
                self.load_model(self._stream.path)
            self._send_queued()
            self._show_prompt_title()

    def _run_command(self, text: str, name: str, argument: str) -> None:
        command = commands(self).get(FORMER.get(name, name))
        if command is None:
            self.tell(f"Unknown command {name}. Type / for a list; your text stays in the prompt.", "warning")
            return
        self._prompt.clear()
        run = partial(getattr(self, f"action_{ACTIONS[name]}"), argument) if argument else command[1]
        self.call_later(self._run_typed, text, run)

    async def _run_typed(self, text: str, run: Callable[[], object]) -> None:
        """Run a command in a context that knows how it was typed, which workers inherit."""
        token = running_command.set(text)
        try:
            if inspect.isawaitable(ran := run()):
                await ran
        finally:
            running_command.reset(token)

    def _send_queued(self) -> None:
        """Send the next message of the queue if nothing runs."""
        if self._composer.queue and self._stream.loaded and not self._stream.busy:
            self._send(self._composer.queue.pop(0))
            self._show_prompt_title()

    def _send(self, message: Outgoing) -> None:
        self._clipboard.start_over()
        text, editing, attach = message.text, message.editing, message.attach
        if editing is not None:
            self._show_messages(self.question_index(editing))
            stream = lambda: self.conversation.edit(text, editing, attach)  # noqa: E731
        else:
            stream = lambda: self.conversation.send(text, attach=attach)  # noqa: E731
        self._transcript.add_message(sent_message(text))
        self._show_welcome()
        self._stream.run(self._answer(stream, message))

    async def _answer(
        self, stream: Callable[[], AsyncIterator[AnyEvent]], message: Outgoing | None = None, continues: bool = False
    ) -> None:
        """Show an answer. `message` is the new one; it goes back into the prompt if it was not stored. `continues`: the
        answer is the end of the last one.
        """
        self.refresh_bindings()
        before = self.conversation.history.question
        if message is not None and self.conversation.chat is None:
            await self._show_system_prompt(message)
        replaces = message is None or message.editing is not None
        last = await self._answering.answer(stream, replaces, continues)
        self._held = isinstance(last, Failed)
        if message is not None:
            not_begun = message.editing is None and self.conversation.history.question is before
            if not_begun or storable(message.text) != self.last_sent():
                self._held = True
                self._composer.put_back(message)
        if isinstance(last, Failed) and last.code == "context_full" and (last.alone or self.conversation.kept_all):
            self._full = last
        elif isinstance(last, Failed) and not last.code.startswith("worker_") and self.conversation.model is None:
            self._stream.loaded = False
        if not self._held:
            self._stream.titles.answered()
        self.list_chats()

    async def _show_system_prompt(self, message: Outgoing) -> None:
        """Show the system prompt that a new chat begins with, before its first message."""
        with contextlib.suppress(CpuchatError):  # the answer fails with it
            await self.conversation.preset.find()
        rows = system_prompt(self.conversation.chosen.chat.system_prompt, self.conversation.preset.current)
        if rows:
            self._transcript.set_messages([*rows, sent_message(message.text)])

    async def answer_last(self) -> None:
        self._show_messages()
        await self._answer(self.conversation.regenerate)

    # The queue

    def _go_on(self) -> None:
        """Ask what to do about a full context, or send the next message, unless the last answer failed. A message that
        is too long by itself is edited: the next one is sent without it.
        """
        if (failed := self._full) is not None:
            self._full = None
            if not failed.alone:
                self.context_full(failed)
            elif self._composer.editing is None and not self._prompt.text and self.questions():
                self.edit_question(self.question_index())
        elif not self._held:
            self.call_next(self._send_queued)

    def _unqueue(self) -> None:
        self._composer.unqueue()
        self._show_prompt_title()

    def _recall_queued(self) -> bool:
        """Edit the last message of the queue; False if there is none."""
        if not self._composer.queue:
            return False
        self._edit_queued(self._composer.queue[-1])
        return True

    def _edit_queued(self, message: Outgoing) -> None:
        self._composer.edit_queued(message)
        self._show_prompt_title()

    @on(QueuedMessages.EditAsked)
    def _edit_asked(self, event: QueuedMessages.EditAsked) -> None:
        self._edit_queued(event.message)

    @on(QueuedMessages.DeleteAsked)
    def _queued_delete_asked(self, event: QueuedMessages.DeleteAsked) -> None:
        self._composer.delete_queued(event.message)
        self._show_prompt_title()
        if not self._composer.queue:
            self._prompt.focus()

    def _show_prompt_title(self) -> None:
        self._composer.show_titles(self._stream.busy, bool(self._answering.loading), self.chat_options())
        if self._queued.is_attached:  # not when the app ends
            self._queued.show(self._composer.queue)
