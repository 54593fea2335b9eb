"""The middle of the chat screen: the transcript or the welcome, figures, queued messages and the prompt."""

from __future__ import annotations

from pathlib import Path

from textual import on
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.widgets import OptionList

from cpuchat.base.text import clean_line
from cpuchat.models.gguf.header import known_as
from cpuchat.models.library.places import is_demo
from cpuchat.present import answers
from cpuchat.session import events
from cpuchat.session.chat import ChatSession
from cpuchat.session.events import SessionEvent
from cpuchat.tui.chat.composer import Composer, Paths, QueuedMessages
from cpuchat.tui.chat.telemetry import PresentedFigures, TelemetryLine, TelemetryPanel
from cpuchat.tui.chat.transcript import ChatTranscript
from cpuchat.tui.chat.welcome import ACCEPTS, OF_DEMO, OF_OTHERS, STARTS, SUGGESTED_ACTIONS, WelcomePane
from cpuchat.tui.services import Services
from cpuchat.tui.widgets.prompt import PromptInput


class ConversationPane(Vertical):
    """Shows the open chat, and what is typed."""

    def __init__(self, services: Services, session: ChatSession) -> None:
        super().__init__(id="middle")
        self._session = session
        self.transcript = ChatTranscript(session, id="transcript")
        self.composer = Composer(session, id="prompt")
        self.welcome = WelcomePane(services)
        self._queued = QueuedMessages(id="queue")

    def compose(self) -> ComposeResult:
        with Horizontal(id="talk", classes="" if self._session.conversation.messages else "-empty"):
            yield self.transcript
            yield self.welcome
            yield TelemetryPanel(id="telemetry")
        yield TelemetryLine(id="telemetry-line")
        yield PresentedFigures()
        yield Paths()
        yield self._queued
        yield self.composer

    def follow(self, event: SessionEvent) -> None:
        """Show what an event changes around the transcript."""
        match event:
            case events.MessageSent():
                self.show_welcome()
            case events.MessageReturned():
                self.composer.put_back(event.message)
                self.composer.show_titles()
            case events.QuestionTooLong():
                if self.composer.editing is None and not self.composer.text and self._session.questions:
                    self._edit_question(self._session.question_index())
            case events.Changed("queue"):
                self.composer.save_draft()
                self.composer.show_titles()
                if self._queued.is_attached:  # not when the app ends
                    self._queued.show(self._session.queue)
            case events.Changed("question"):
                self.composer.follow_chat()
            case events.Changed("options" | "tools"):
                self.show_options()

    def show_options(self) -> None:
        """Show what the chat has beside the settings, `temperature 0.2 · reasoning off`, and what the demo is worth."""
        options, source = self._session.conversation.options, self._session.source
        is_toy = isinstance(source, Path) and is_demo(source) and self.transcript.has_messages
        own = "own system prompt" if options.has_next_system_prompt else ""  # later it is in the transcript
        toy = "the demo is a toy and errs · F1 keys" if is_toy else ""
        self.composer.show_titles(" · ".join(filter(None, (own, answers.options(options.own), toy))))

    def show_welcome(self) -> None:
        path, problem = self._session.source, ""
        if path is not None and (failed := self._session.failed_loads.get(path)) is not None:
            problem = clean_line(f"{known_as(path)} was not loaded: {failed.message} {failed.hint}")
            path = None
            if not self._session.messages:
                self.transcript.show_chat()  # in whose place the welcome says it
        empty = not self.transcript.has_messages
        self.query_one("#talk").set_class(empty, "-empty")
        has_own = path is not None and not (isinstance(path, Path) and is_demo(path))
        offered = () if not empty or path is None else OF_OTHERS if has_own else OF_DEMO
        self.composer.suggestions = tuple(STARTS.get(question, question) for question in offered)
        self.composer.actions = SUGGESTED_ACTIONS | ({} if has_own else ACCEPTS) if empty else {}
        if empty:
            idle = (self._session.loaded or not has_own) and not self._session.busy
            self.welcome.show(offered, has_own=has_own, idle=idle, problem=problem)

    def edit_selected(self) -> None:
        """Put the selected message of the user, that of the selected answer, or the last one into the prompt."""
        if (at := self._session.question_index(self.transcript.selected_id)) < 0:
            self._session.tell("No message to edit yet.")
        else:
            self._edit_question(at)

    def _edit_question(self, index: int) -> None:
        kind = "last message" if index == self._session.question_index() else "message"
        self.composer.begin_editing(self._session.conversation.messages[index], kind)
        self.screen.refresh_bindings()

    @on(OptionList.OptionSelected, "#paths")
    def _complete_with_the_clicked(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.composer.complete()

    @on(PromptInput.Scrolled)
    def _scrolled(self, event: PromptInput.Scrolled) -> None:
        self.transcript.scroll_pages(event.pages)
