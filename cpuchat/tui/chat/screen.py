"""The main screen: chats, transcript, prompt and figures."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable
from typing import ClassVar

from textual import on, work
from textual.app import ComposeResult, ScreenStackError
from textual.containers import Horizontal
from textual.widgets import Input

from cpuchat.config.servers import Source
from cpuchat.models.gguf.header import known_as
from cpuchat.present import answers
from cpuchat.protocol.messages import Failed, LoadProgress, ModelLoaded, PrefillProgress
from cpuchat.session import events
from cpuchat.session.activity import Activity
from cpuchat.session.events import SessionEvent, Severity
from cpuchat.tui import keys
from cpuchat.tui.chat.call_screen import CallScreen
from cpuchat.tui.chat.chat_list import ChatList, Chats
from cpuchat.tui.chat.commands import ChatCommands, needs_reload
from cpuchat.tui.chat.composer import running_command
from cpuchat.tui.chat.conversation_pane import ConversationPane
from cpuchat.tui.chat.probes import PassProbe
from cpuchat.tui.chat.reader import Reader
from cpuchat.tui.chat.status import StatusLine
from cpuchat.tui.chat.telemetry import LiveFigures, TelemetryPanel
from cpuchat.tui.markdown.render import warm_up
from cpuchat.tui.services import Services
from cpuchat.tui.terminal.painter import Painter, TypingScreen
from cpuchat.tui.threads import collect_garbage, yield_to_inference
from cpuchat.tui.widgets.download_line import DownloadLine, QuantizeLine
from cpuchat.tui.widgets.key_footer import KeyFooter

_NOTICE_SECONDS = 60.0  # of what the user has to know about a damaged file


class ChatScreen(keys.Keyed, TypingScreen, keys="chat"):
    """Lays the chat out, binds its actions, and shows the events of its session."""

    AUTO_FOCUS = TEXT_FIELD = "#prompt"
    HORIZONTAL_BREAKPOINTS: ClassVar[list[tuple[int, str]] | None] = [
        (0, "-tiny"), (60, "-narrow"), (120, "-panel"), (146, "-wide"),
    ]  # fmt: skip
    VERTICAL_BREAKPOINTS: ClassVar[list[tuple[int, str]] | None] = [(0, "-low"), (30, "-high")]

    def __init__(self, services: Services, initial_model: Source | None) -> None:
        """`initial_model` is loaded after the first paint."""
        super().__init__()
        self._compositor = Painter()
        self.services = services
        self.conversation = services.conversation
        self.conversation.asks_when_full = True
        self.session = services.session
        self.session.source, self.session.listen = initial_model, self._follow
        self._initial_model = initial_model
        self.status = StatusLine(id="status")
        self._chats = ChatList(id="chats")
        self._pane = ConversationPane(services, self.session)
        self._transcript, self._composer = self._pane.transcript, self._pane.composer
        self.reader = Reader(self, services, self.session)
        self.commands = ChatCommands(self, services, self.session, self._pane, self.reader)
        self.commands.route_actions()
        self._call_dialog: CallScreen | None = None

    def compose(self) -> ComposeResult:
        yield self.status
        with Horizontal(id="body"):
            yield self._chats
            yield self._pane
        yield DownloadLine(self.services.downloading)
        yield QuantizeLine(self.services.quantizing)
        yield KeyFooter()

    def on_mount(self) -> None:
        self.figures = LiveFigures(self, self.services)
        self.pass_probe = PassProbe(self, self.services, self.session, self.reader)
        self._apply_ui_settings()
        if self.services.settings.ui.show_reasoning:
            self._transcript.toggle_reasoning()
        self.show_chat()
        self._unsent_in = ""
        with self.commands.telling():
            self._unsent_in = self._composer.restore_drafts()
        self.call_after_refresh(self._start)  # after the first paint, which waits for nothing

    def _start(self) -> None:
        collect_garbage()
        if self._initial_model is not None:
            self.session.load(self._initial_model)
        if self._unsent_in and not self._composer.text:
            self.commands.open(self._unsent_in)
            self.tell("Opened the chat with your unsent message. Ctrl+N starts a new one.")
        for name, server in self.services.tool_servers.items():
            self.commands.start_server(name, server)
        self.list_chats()
        self.figures.show()
        warm_up()

    def on_resize(self) -> None:
        self.call_after_refresh(self.figures.show)  # the other of panel and line may be shown now

    async def on_unmount(self) -> None:
        self.services.machine_watch.close()
        await self.reader.close()

    # What others need of the chat

    async def finish(self) -> None:
        """Stop what runs; return when its last text is shown and stored."""
        with contextlib.suppress(ScreenStackError):  # after an error, which has ended the screens; the text is put
            self._composer.unqueue()
        self._composer.save_draft()
        await self.session.finish()

    async def interrupt(self) -> bool:
        """Stop the answer or the load, and send nothing after it; False when there is none."""
        if not self.session.busy or self.session.activity is Activity.MEASURING:
            return False
        self._composer.unqueue()
        await self.session.stop()
        return True

    # Notices

    def tell(self, text: str, severity: Severity = "information") -> None:
        timeout = 5 if severity == "information" else 10
        self.notify(text, severity=severity, timeout=timeout, markup=False)

    def refuse(self, text: str, severity: Severity = "warning") -> None:
        """Say why something cannot be done. The command that was typed for it goes back into an empty prompt."""
        self.tell(text, severity)
        if not self._composer.text and (command := running_command.get()):
            self._composer.put(command)

    # Events of the session

    def _follow(self, event: SessionEvent) -> Awaitable[None] | None:
        self._transcript.follow(event)
        self._pane.follow(event)
        self.status.follow(event, self.session)
        reading = self.reader.follow(event)
        match event:
            case events.Notice():
                (self.refuse if event.refuses else self.tell)(event.text, event.severity)
            case events.Changed("state"):
                self._show_state()
            case events.Changed("question" | "chats"):
                self._transcript.show_title()
                self.list_chats()
            case events.Changed("ceilings"):
                self.figures.show()
            case events.Changed("model") if self.session.loaded:
                self._show_ready()
            case events.LoadBegun() | LoadProgress():  # with the status line
                self.figures.show()
                if isinstance(event, events.LoadBegun) and event.again:
                    self.notify(f"Loading {known_as(event.source)} again.", markup=False)
            case PrefillProgress():
                self.figures.show_with_text()
            case events.LoadEnded(last=ModelLoaded()):
                if problem := self.conversation.draft_problem:
                    self.tell(problem, "error")
                self._show_ready()
                # It may fit the cost model anew, so nothing waits for it.
                self.run_worker(self.session.show_ceiling(), group="ceiling", exclusive=True)
                self.services.save_settings({"model": {"last": str(event.source)}})
            case events.ChatOpened():
                self._show_opened(event)
            case events.AnswerBegun():
                self.refresh_bindings()
            case events.SummaryEnded():
                self._show_opened(events.ChatOpened(is_branch=True))
                if isinstance(event.last, Failed):
                    self.tell(answers.failure(event.last), "error")
                elif event.is_kept and event.last is not None:
                    lost = event.trimmed is not None or event.last.stop_reason != "end"
                    self.tell(answers.summarized(event.last, event.trimmed), "warning" if lost else "information")
                else:
                    self.tell("Stopped. The chat is unchanged.", "warning")
            case events.WhenFullAsked():
                self.commands.ask_when_full(event.failed.message)
            case events.ApprovalAsked():
                self._call_dialog = CallScreen(event.tool, event.call)
                self.app.push_screen(self._call_dialog, lambda choice: self.session.approve(choice or "refuse"))
            case events.ApprovalEnded(choice=None) if self._call_dialog is not None:  # the answer was stopped
                self.run_worker(self._call_dialog.dismiss_when_on_top("refuse"), group="approval")
        return reading

    def _show_ready(self) -> None:
        """Share the cores with the model that was loaded."""
        yield_to_inference()
        self.figures.share_the_cores()
        self.run_worker(self.reader.prepare_if_enabled(), group="speech")

    def _show_state(self) -> None:
        if not self.app.is_running:  # after an error or a signal, and while the app ends: its widgets are gone
            self.session.hold()
            return
        if self.session.busy:
            self.figures.start()
            if self.session.activity is Activity.MEASURING:
                self.reader.stop()
        else:
            self.figures.stop()
        self._pane.show_welcome()
        self._pane.show_options()
        self._transcript.show_title()
        self.refresh_bindings()

    # Showing

    def _show_opened(self, event: events.ChatOpened) -> None:
        if event.is_branch:
            self._composer.switch_branch()
            self._show_chat_state()
            self._transcript.show_chat(top=event.message_id)
            return
        self._chats.clear_search()
        self.show_chat(event.message_id)
        if event.message_id:
            self._transcript.focus()

    def show_chat(self, message_id: int = 0) -> None:
        """Show the open chat from its end, or from a message."""
        self._composer.switch_chat()
        self.remove_class("-chats-over")
        self._transcript.show_chat(top=message_id)
        self._pane.show_welcome()
        self._show_chat_state()

    def _show_chat_state(self) -> None:
        self.reader.stop()
        self._pane.show_options()
        self.refresh_bindings()
        self._transcript.show_title()
        self.status.show_fill(self.session)
        self.figures.show()
        self._transcript.start_copying_over()

    def action_suggest(self, number: int) -> None:
        self._composer.focus()
        self._composer.suggest(number)

    def action_reasoning(self) -> None:
        self._transcript.toggle_reasoning()

    def action_sidebar(self) -> None:
        if self.has_class("-wide"):
            shown = self.has_class("-no-sidebar")
            self.set_class(not shown, "-no-sidebar")
            self.services.save_settings({"ui": {"sidebar": shown}})
        else:
            shown = not self.has_class("-chats-over")
            self.set_class(shown, "-chats-over")
        self.list_chats()  # another window may have changed them
        (self._chats.query_one(Chats) if shown else self._composer).focus()
        self.refresh_bindings()

    def action_telemetry(self) -> None:
        """Show the figures in brief, then all of them, over the chat where there is no room beside it, then none."""
        panel, hidden = self.query_one(TelemetryPanel), self.has_class("-no-telemetry")
        everything = not hidden and not (panel.display and panel.has_class("-all"))
        panel.set_class(everything, "-all")
        self.set_class(everything and not panel.display, "-figures-over")
        self.set_class(not hidden and not everything, "-no-telemetry")
        self.services.save_settings({"ui": {"telemetry": hidden or everything, "all_figures": everything}})
        self.figures.show()

    def action_present(self) -> None:
        """Show large figures and no titles of chats, for an audience; again: the chat as it was."""
        self.toggle_class("-presenting")
        self._transcript.is_private = self.has_class("-presenting")
        self._transcript.show_title()
        self._composer.focus()
        self.refresh_bindings()
        self.call_after_refresh(self.figures.show)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action in ("sidebar", "telemetry"):
            return not self.has_class("-presenting")
        if action in ("stop", "back") and self._composer.is_mounted:
            composer, session = self._composer, self.session
            stops = session.busy or self.reader.busy or bool(session.queue)
            is_open = composer.editing is not None or composer.offers_completions or self.has_class("-chats-over")
            return stops if action == "stop" else not stops and (is_open or self.focused is not composer)
        return True

    async def action_back(self) -> None:
        """Do what Esc does where nothing runs."""
        await self.action_stop()

    async def action_stop(self) -> None:
        """Close what is offered, else be silent, else stop what is written or loaded, else leave what Esc leaves."""
        if self._composer.close_completions() or (self.reader.stop() and not self.session.writing):
            return
        if self.session.writing:
            await self.session.stop()  # what is queued is sent then
        elif self.session.queue:
            self._composer.unqueue()
        elif not await self.interrupt():
            self._composer.cancel_editing()
            self._show_chat_state()
        self.remove_class("-chats-over")
        self._chats.clear_search()
        self._composer.focus()

    def action_copy_answer(self) -> None:
        self._transcript.copy_message()

    def action_copy_code(self) -> None:
        self._transcript.copy_code()

    # Chats

    @on(Input.Changed, "#chat-search")
    @work(exclusive=True, group="list-chats")
    async def list_chats(self) -> None:
        if not self.app.is_running:  # its widgets may be gone
            return
        with self.commands.telling():
            found = await self.conversation.history.list_chats(self._chats.searching)
            if self.app.is_running:
                self._chats.show(found, self.session.chat_id)
                if not self._chats.searching:
                    self._pane.welcome.count_chats(len(found))
        for notice in self.conversation.history.store.take_notices():
            self.notify(notice, severity="warning", timeout=_NOTICE_SECONDS, markup=False)

    # Settings

    def _apply_ui_settings(self) -> None:
        ui = self.services.settings.ui
        self.set_class(not ui.sidebar, "-no-sidebar")
        self.set_class(not ui.telemetry, "-no-telemetry")
        self.query_one(TelemetryPanel).set_class(ui.all_figures, "-all")
        self.figures.show()
        self._transcript.color_drafts(ui.color_drafts)

    @work
    async def action_settings(self, first: str = "") -> None:
        """Change the settings; `first`: the one to show."""
        if (result := await self.services.navigation.settings(first)) is None:
            return
        before, self.conversation.settings = self.services.settings, result
        if result.ui.theme != before.ui.theme:
            self.services.show_theme(result.ui.theme)
        self._apply_ui_settings()
        self._pane.show_options()
        await self.reader.settings_changed(before.speech)
        if result.model.folders != before.model.folders:
            self.services.set_folders(result.model.folders)
            self._pane.show_welcome()
        self.figures.show()
        if needs_reload(before, result) and (path := await self.commands.confirms_reload()):
            self.session.load(path)
