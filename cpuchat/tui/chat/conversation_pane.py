"""The middle of the chat screen: the transcript or the welcome, figures, queued messages and the prompt."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path

from textual import on, work
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical

from cpuchat.base.errors import CpuchatError
from cpuchat.base.processes import run_in_daemon_thread
from cpuchat.chats.records import StoredMessage
from cpuchat.config.servers import Source
from cpuchat.models.library.places import is_demo
from cpuchat.present import answers
from cpuchat.session import events
from cpuchat.session.chat import ChatSession
from cpuchat.session.events import SessionEvent
from cpuchat.tui.chat.composer import Composer, Paths, QueuedMessages
from cpuchat.tui.chat.telemetry import TelemetryLine, TelemetryPanel
from cpuchat.tui.chat.transcript import ChatTranscript
from cpuchat.tui.chat.welcome import OF_DEMO, OF_OTHERS, STARTS, SUGGESTED_ACTIONS, WelcomePane, start_of
from cpuchat.tui.services import Services
from cpuchat.tui.widgets.prompt import PromptInput


class ConversationPane(Vertical):
    """Shows the open chat, and what is typed."""

    def __init__(self, services: Services, session: ChatSession) -> None:
        super().__init__(id="middle")
        self._services, self._session = services, session
        self.transcript = ChatTranscript(session, id="transcript")
        self.composer = Composer(session, id="prompt")
        self._queued = QueuedMessages()
        self.preset_models: dict[str, Source | None] = {}
        """Models by the names that presets have for them; None: not here."""

    def compose(self) -> ComposeResult:
        with Horizontal(id="talk", classes="" if self._session.conversation.messages else "-empty"):
            yield self.transcript
            yield WelcomePane(self._services)
            yield TelemetryPanel(id="telemetry")
        yield TelemetryLine(id="telemetry-line")
        yield Paths()
        yield self._queued
        yield self.composer

    def follow(self, event: SessionEvent) -> None:
        """Show an event of the session."""
        self.transcript.follow(event)
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
        """Show what the chat has beside the settings: `review (its model is not loaded) · reasoning off`."""
        preset, loaded = self._session.conversation.preset, self._services.loaded
        name = preset.name
        if preset.current is not None and (model := preset.current.model) and loaded is not None:
            if model not in self.preset_models:
                self._find_preset_model(model)
            elif self.preset_models[model] not in (loaded, self._session.source):
                name = f"{name} (its model is not loaded)"
        own = "own system prompt" if preset.has_next_system_prompt else ""  # later it is in the transcript
        self.composer.show_titles(" · ".join(filter(None, (name, own, answers.reasoning(*preset.reasoning)))))

    @work(exclusive=True, group="preset-model")
    async def _find_preset_model(self, name: str) -> None:
        found: Source | None = None
        with contextlib.suppress(CpuchatError):
            found = await run_in_daemon_thread(partial(self._session.find_model, name))
        self.preset_models[name] = found
        self.show_options()

    def show_welcome(self) -> None:
        """Show the welcome pane in place of the transcript while the chat is empty."""
        empty, path = not self.transcript.has_messages, self._session.source
        self.query_one("#talk").set_class(empty, "-empty")
        offered: tuple[str, ...] = ()
        if empty and path is not None:
            offered = OF_DEMO if isinstance(path, Path) and is_demo(path) else OF_OTHERS
        self.composer.suggestions = tuple(map(start_of, offered))
        self.composer.incomplete = frozenset(STARTS.values())
        self.composer.actions = SUGGESTED_ACTIONS if empty else {}
        if empty:
            idle = (self._session.loaded or path is None) and not self._session.busy
            self.query_one(WelcomePane).show(offered, idle=idle)

    def edit_selected(self) -> None:
        """Put the selected message, or the last one of the user, into the prompt."""
        selected = self.transcript.selected_id
        messages = self._session.conversation.messages
        if answer := [one for one in messages if one.id == selected and one.role != "user"]:
            self.edit(answer[0], "summary" if answer[0].is_summary else "answer")
        elif (at := self._session.question_index(selected)) < 0:
            self._session.tell("No message to edit yet.")
        else:
            self._edit_question(at)

    def _edit_question(self, index: int) -> None:
        kind = "last message" if index == self._session.question_index() else "message"
        self.edit(self._session.conversation.messages[index], kind)

    def edit(self, message: StoredMessage, kind: str) -> None:
        """Put a message into the prompt; `kind` as `Composer.edits`."""
        self.composer.begin_editing(message, kind)
        self.screen.refresh_bindings()

    @on(PromptInput.Scrolled)
    def _scrolled(self, event: PromptInput.Scrolled) -> None:
        self.transcript.scroll_pages(event.pages)

    @on(Paths.Chosen)
    def _path_chosen(self) -> None:
        self.composer.take_clicked()

    @on(QueuedMessages.EditAsked)
    def _edit_asked(self, event: QueuedMessages.EditAsked) -> None:
        self.composer.edit_queued(event.message)

    @on(QueuedMessages.DeleteAsked)
    def _queued_delete_asked(self, event: QueuedMessages.DeleteAsked) -> None:
        self._session.delete_queued(event.message)
        if not self._session.queue:
            self.composer.focus()
