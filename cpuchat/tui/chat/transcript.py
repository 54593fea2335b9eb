"""The transcript of a chat: its messages and branches, the answer that is being written, and what is copied of them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import ClassVar

from textual.binding import BindingType
from textual.content import Content

from cpuchat.base.text import clean_line
from cpuchat.chats.records import StoredMessage, Tree
from cpuchat.present import answers
from cpuchat.protocol import messages as protocol
from cpuchat.session import events as session_events
from cpuchat.session.activity import Activity
from cpuchat.session.chat import ChatSession
from cpuchat.session.events import SessionEvent
from cpuchat.telemetry.units import plural
from cpuchat.tui import keys
from cpuchat.tui.chat.figure_sections import fit
from cpuchat.tui.markdown.message_view import Spans
from cpuchat.tui.markdown.transcript import Transcript, TranscriptMessage

SUMMARY = "Summary of earlier messages"
_TITLES = {
    "worker_died": "Worker crashed",
    "worker_stuck": "Worker ended",
    "does_not_fit": "Not enough memory",
    "server_unreachable": "Connection lost",
    "context_full": "Context full",
}
_WAITING = "Waiting for the first token…"
_RUNNING = "running…"
_GIST = 40  # characters of a folded system prompt
MAX_COLORED = 100
"""Answers whose drafters are remembered while the app runs, the last ones."""


class ChatTranscript(Transcript):
    BINDINGS: ClassVar[list[BindingType]] = keys.bindings("branches")

    def __init__(self, session: ChatSession, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._session = session
        self.is_private = False
        """Nothing names a chat: others are looking."""
        self._next_block = 0  # to copy, from the last one back
        self._open = False  # an answer is being written
        self._written = False  # its first text has come
        self._reading: protocol.PrefillProgress | None = None  # the newest event, of a prompt
        self._replaces = False  # it is to take the place of something that is not shown any more
        self._summarizes = False
        self._left_out = ""
        self._spans: dict[int, Spans] = {}  # drafters of the parts of this run's answers, by message id

    @property
    def _selected(self) -> TranscriptMessage | None:
        """Return the message under the marker, while the transcript is in use."""
        in_use = self.has_focus and self._current is not None and self._current < len(self._entries)
        return self._entries[self._current or 0].message if in_use else None

    @property
    def selected_id(self) -> int:
        """Return the id of the message under the marker; 0 when none is stored there."""
        return max(0, self._selected.id) if self._selected is not None else 0

    @property
    def selects_system_prompt(self) -> bool:
        """Return whether the marker is at the system prompt, which is no message."""
        return self._selected is not None and self._selected.role == "system" and not self._selected.id

    @property
    def has_messages(self) -> bool:
        return bool(self._entries)

    def show_chat(self, end: int | None = None, top: int = 0) -> None:
        """Show the messages of the open chat before the index `end`, from the one with the id `top` on."""
        conversation, tree = self._session.conversation, self._session.history.tree
        messages = conversation.messages[:end]
        at = next((at for at, message in enumerate(messages) if message.id == top), None)
        chat = conversation.chat
        rows = system_prompt(chat.system_prompt) if chat is not None else []
        shown = [*rows, *(partial(stored_message, m, tree, self._spans.get(m.id, ())) for m in messages)]
        self.set_messages(shown, None if at is None else at + len(rows))

    # The answer that is being written

    def show_reading(self) -> None:
        """Say how much of the prompt is read, and how long the rest takes from now on."""
        if self._reading is not None:
            conversation = self._session.conversation
            left_s = None if self._summarizes else conversation.meter.prefill_left_s(conversation.clock())
            self.set_pending(answers.prefill_progress(self._reading, left_s))

    def follow(self, event: SessionEvent) -> None:
        self._reading = None
        match event:
            case protocol.TextDelta():
                self._written = True
                self.append(event.text, event.channel, "" if self._summarizes else event.drafter)
            case protocol.PrefillProgress() if not self._written:
                self._reading = event
                self.show_reading()
            case protocol.LoadProgress() if self._open:  # a dead worker is started again before it answers
                remote = event.phase in answers.SERVER_PHASES
                loading = answers.load_progress("the server", event)
                self.set_pending(loading if remote else "Restarting the worker…")
            case protocol.Reconnecting() if self._open:
                self.set_pending(answers.reconnecting(event))
            case protocol.ContextTrimmed():
                self._left_out = answers.left_out(event)
                self._session.tell(answers.context_trimmed(event), "warning")
            case protocol.GenerationFinished() if not event.calls or event.stop_reason == "cancelled":  # or it goes on
                answer = self._session.history.answer
                note = answers.summary(event.timings, event.stop_reason, answer.sampling, answer.default_sampling)
                is_empty = event.stop_reason == "cancelled" and not (answer.content or answer.reasoning or answer.steps)
                self._close(" · ".join(filter(None, (note, event.note, self._left_out))))
                if is_empty:
                    self.show_chat()  # without the empty answer
                    self._session.tell("The request was stopped before the first token.")
                if note := answers.note(event.timings):
                    self._session.tell(note, "warning")
            case protocol.CallsMade() | protocol.CallDone():
                steps = self._session.history.answer.steps
                self._show_call(_RUNNING)
                self._written = False
                self.set_pending(_WAITING if len(steps[-1].results) == len(steps[-1].calls) else "")
            case protocol.Failed():
                self._close("")
                loads = self._session.activity is Activity.LOADING
                what = _TITLES.get(event.code, "Not loaded" if loads else "Request failed")
                self.add_message(TranscriptMessage(role="notice", title=what, content=answers.failure(event)))
            case _:
                self._follow_session(event)

    def show_title(self) -> None:
        """Show the chat's title; before an audience the model's name."""
        conversation = self._session.conversation
        title = conversation.chat.title if conversation.chat else "New chat"
        if self.is_private:
            title = conversation.model_name
        self.border_title = Content(clean_line(title))

    def _follow_session(self, event: SessionEvent) -> None:
        match event:
            case session_events.Changed("saving"):
                problem = self._session.history.saver.problem
                self.border_subtitle = Content(f"Not saved: {problem.message}") if problem else ""
                if problem is not None:
                    self._session.tell(f"The answer is not saved. {problem} Saving is being retried.", "error")
                elif not self._session.history.saver.lost:
                    self.identify_last()
                    self._session.tell("Answer saved.")
            case session_events.MessagesChanged():
                self._close("")
                self.show_chat(event.end)
            case session_events.MessageSent():
                self.start_copying_over()
                self.add_message(sent_message(event.message.text))
            case session_events.Changed("question") if (question := self._session.history.question) is not None:
                entry = next((entry for entry in reversed(self._entries) if entry.message.role == "user"), None)
                if entry is not None and entry.message.attachments != attached(question):
                    entry.message = replace(entry.message, attachments=attached(question))
                    self._show_whole(entry)
            case session_events.AnswerBegun(summarizes=True):
                self.begin_answer(SUMMARY)
                self.set_pending("Summarizing the chat…")
                self._summarizes, self._written, self._reading = True, False, None
            case session_events.AnswerBegun():
                conversation = self._session.conversation
                if event.message is not None and conversation.chat is None:
                    rows = system_prompt(conversation.chosen.chat.system_prompt)
                    if rows:
                        self.set_messages([*rows, sent_message(event.message.text)])
                self.start_copying_over()
                drafted, model = bool(conversation.speculation.drafters), conversation.model
                hint = "F10 answers now" if model is not None and not model.server else ""
                begin = self.reopen_answer if event.continues else self.begin_answer
                begin(conversation.model_name or "Answer", drafted, hint)
                self.set_pending(_WAITING)
                self._open, self._written, self._reading, self._left_out = True, False, None, ""
                self._replaces = event.message is None or event.message.editing is not None
            case session_events.AnswerEnded():
                self._close("stopped")  # if it ended without a final event
            case session_events.SummaryEnded():
                self.finish_answer()
                self._summarizes = False
            case session_events.ApprovalAsked():
                self._show_call("waiting for your approval")
            case session_events.ApprovalEnded() if event.choice is not None:
                self._show_call(_RUNNING)

    def _close(self, note: str) -> None:
        if not self._open:
            return
        self._open = False
        answer, messages = self.finish_answer(note), self._session.conversation.messages
        if answer is not None and messages and messages[-1].role == "assistant":
            # Also when it has none: the id may be that of an answer that was deleted.
            self._spans[messages[-1].id] = answer.spans
            if len(self._spans) > MAX_COLORED:  # a drafted answer has hundreds
                del self._spans[next(iter(self._spans))]
        if self._replaces and not self._written:
            self.show_chat()  # what was to be replaced is back
        else:
            self.identify_last()

    def _show_call(self, state: str) -> None:
        if (answer := self._entries.open_answer()) is not None:
            answer.show_steps(self._session.history.answer.steps, state)
            self._flush_soon()

    def identify_last(self) -> None:
        """Give the last question, and the answer to it, their ids, places and attachments, unless an answer is open."""
        messages = self._session.messages
        if not messages or self._entries.open_answer() is not None:
            return
        for message in messages[-2:] if messages[-1].role == "assistant" else messages[-1:]:
            stored = stored_message(message, self._session.history.tree)
            entry = next((one for one in reversed(self._entries) if one.message.role == stored.role), None)
            if entry is not None:
                known = entry.message
                entry.message = replace(known, id=stored.id, place=stored.place, attachments=stored.attachments)
                if (known.place, known.attachments) != (stored.place, stored.attachments):
                    self._show_whole(entry)

    # Copying

    def start_copying_over(self) -> None:
        self._next_block = 0

    def copy_message(self) -> None:
        if text := self.current_message_text():
            self.app.copy_to_clipboard(text, plural(len(text), "character"))  # pyright: ignore[reportCallIssue] (of ChatApp)
        else:
            self._session.tell("No answer to copy yet.")

    def copy_code(self) -> None:
        """Copy the last code block of the selected message or the last answer; called again, the one before."""
        if not (blocks := self.code_blocks()):
            self._session.tell("No code block to copy.")
            return
        index = len(blocks) - 1 - self._next_block % len(blocks)
        self._next_block += 1
        block, which = blocks[index], f" (block {index + 1} of {len(blocks)})" if len(blocks) > 1 else ""
        n_lines = plural(block.text.count("\n") + 1, "line")
        what = f"{n_lines} of {clean_line(block.language) or 'code'}{which}"
        self.app.copy_to_clipboard(block.text, what)  # pyright: ignore[reportCallIssue] (of ChatApp)


def sent_message(text: str) -> TranscriptMessage:
    return TranscriptMessage(role="user", title="You", content=text)


def attached(message: StoredMessage) -> tuple[tuple[str, str], ...]:
    return tuple((attachment.title, attachment.text) for attachment in message.attachments)


def system_prompt(text: str) -> list[TranscriptMessage]:
    """Return the folded row of a system prompt; nothing for none."""
    if not text.strip():
        return []
    title = f"System prompt: {fit(clean_line(text), _GIST)}"
    return [TranscriptMessage(role="system", title="", content="", attachments=((title, text),))]


def stored_message(message: StoredMessage, tree: Tree, spans: Spans = ()) -> TranscriptMessage:
    """Convert a message of the chat with these branches. `spans`: the drafter of each part, if known."""
    siblings = tree.siblings(message.id)
    place = f"{siblings.index(message.id) + 1}/{len(siblings)}" if len(siblings) > 1 else ""
    if message.role == "user":
        sent = sent_message(message.content)
        return replace(sent, id=message.id, place=place, attachments=attached(message))
    is_whole = message.timings is not None and not any(step.reasoning for step in message.steps)
    return TranscriptMessage(
        role=message.role, title=SUMMARY if message.is_summary else message.model or "Answer", content=message.content,
        reasoning=message.reasoning,
        reasoning_s=message.timings.reasoning_ms / 1e3 if message.timings is not None and is_whole else 0.0,
        note=answers.summary(message.timings, message.stop_reason or "", message.sampling, message.default_sampling),
        spans=spans, id=message.id, place=place, steps=message.steps,
    )  # fmt: skip
