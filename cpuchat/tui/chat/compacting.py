"""A full context on the chat screen: asks what to do, summarizes, and edits the summary."""

from __future__ import annotations

import contextlib
from typing import cast

from textual import work

from cpuchat.base.errors import CpuchatError
from cpuchat.chats.records import Chat, StoredMessage, WhenFull
from cpuchat.compacting import compact
from cpuchat.present import answers
from cpuchat.protocol.messages import ContextTrimmed, Failed, GenerationFinished, PrefillProgress, TextDelta
from cpuchat.telemetry.meter import PrefillClock
from cpuchat.tui.chat.comparing import ComparingScreen
from cpuchat.tui.chat.composer import Composer
from cpuchat.tui.chat.messages import SUMMARY
from cpuchat.tui.chat.transcript import ChatTranscript
from cpuchat.tui.widgets.dialogs import Choice, ChoiceScreen

_CHOICES = tuple(Choice(choice, label) for choice, label in answers.WHEN_FULL.items())


class CompactingScreen(ComparingScreen):
    """Base of the chat screen, which defines what only raises here: the metaclass of Textual leaves no room for ABC."""

    _transcript: ChatTranscript
    _composer: Composer

    async def answer_last(self) -> None:
        """Answer the last question again."""
        raise NotImplementedError

    def action_compact(self) -> None:
        """Summarize the chat now."""
        if self.refuse_while_busy("summarize the chat"):
            return
        if not self._stream.loaded:
            self.tell(self.services.no_model, "warning")
        elif not self.conversation.messages:
            self.tell("There is nothing to summarize yet.")
        else:
            self._stream.run(self._compact())

    @work(exclusive=True, group="context")
    async def context_full(self, failed: Failed) -> None:
        """Do what the chat does when it is full; ask if that is not known, and remember it."""
        chat = self.conversation.chat
        if chat is None or len(self.conversation.messages) < 2 or failed.alone:
            return
        question = f"{failed.message} What should this chat do when the context is full?"
        choice = chat.when_full or await self._ask(chat, question)
        if self._stream.busy or choice == "stop":
            return
        if choice == "compact":
            self._stream.run(self._compact(again=True))
        elif choice == "drop":
            self._stream.run(self.answer_last())

    @work(exclusive=True, group="context")
    async def action_when_full(self) -> None:
        """Choose what the chat does when it is full."""
        if (chat := self.conversation.chat) is None:
            self.tell("Send a message first.")
            return
        now = answers.WHEN_FULL.get(chat.when_full, "Ask").lower()
        if choice := await self._ask(chat, f"When the context is full (now: {now})"):
            self.tell(f"When the context is full: {answers.WHEN_FULL[choice].lower()}.")

    async def _ask(self, chat: Chat, question: str) -> WhenFull:
        """Ask what a chat should do when it is full, and remember it; "" if it was not answered, or is not open."""
        choice = cast(WhenFull, await self.app.push_screen_wait(ChoiceScreen("Context full", question, _CHOICES)) or "")
        if not choice or self.conversation.chat is None or self.conversation.chat.id != chat.id:
            return ""
        try:
            await self.conversation.history.set_options(when_full=choice)
        except CpuchatError as error:
            self.tell(str(error), "error")
            return ""
        return choice

    async def _compact(self, again: bool = False) -> None:
        """Show the summary while it is written; `again`: then answer the last question."""
        before = len(self.conversation.messages)
        self._transcript.begin_answer(SUMMARY)
        self._transcript.set_pending("Summarizing the chat…")
        problem: Failed | None = None
        finished: GenerationFinished | None = None
        trimmed: ContextTrimmed | None = None
        clock = PrefillClock()  # it is not metered
        try:
            async with contextlib.aclosing(compact(self.conversation)) as events:
                async for event in events:
                    match event:
                        case TextDelta():
                            self._transcript.set_pending("")
                            self._transcript.append(event.text, event.channel)
                        case PrefillProgress():
                            left = clock.seconds_left(event)
                            self._transcript.set_pending(answers.prefill_progress(event, left))
                        case ContextTrimmed():
                            trimmed = event
                        case GenerationFinished():
                            finished = event
                        case Failed():
                            problem = event
                        case _:
                            pass
        except CpuchatError as error:
            problem = Failed.of(error)
        self._transcript.finish_answer()
        self.show_branch(0)
        if problem is not None:
            self.tell(answers.failure(problem), "error")
        elif finished is not None and len(self.conversation.messages) > before:
            lost = trimmed is not None or finished.stop_reason != "end"
            told = f"{answers.summarized(finished, trimmed)} Select it and press F4 to edit it."
            self.tell(told, "warning" if lost else "information")
            if again:
                await self.answer_last()
        else:
            self.tell("Stopped. The chat is unchanged.", "warning")

    @property
    def selected_answer(self) -> StoredMessage | None:
        """Return the answer or summary under the marker of the transcript."""
        selected = self.selected_message
        messages = (one for one in self.conversation.messages if one.is_summary or one.role == "assistant")
        return next((one for one in messages if selected and one.id == selected), None)

    @work(exclusive=True, group="context")
    async def save_answer(self, message_id: int, text: str) -> None:
        """Add what the user made of an answer as another answer to the same question."""
        if any(one.id == message_id and one.content.strip() == text for one in self.conversation.messages):
            return
        with self._telling():
            self.show_branch((await self.conversation.history.edit_answer(message_id, text)).id)
            self.tell("Saved as a new branch. Alt+R continues it.")

    @work(exclusive=True, group="context")
    async def save_summary(self, message_id: int, text: str) -> None:
        """Replace the text of a summary by what the user made of it."""
        with self._telling():
            await self.conversation.history.edit_summary(message_id, text)
            self.tell("Summary saved.")
        self.show_branch(0)
