"""The main screen: chats, transcript, prompt and figures."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.widgets import TextArea

from cpuchat.attachments import start_folder
from cpuchat.chats.records import StoredMessage
from cpuchat.chats.store import Matcher
from cpuchat.config.servers import Source
from cpuchat.models.library.places import is_demo
from cpuchat.tui import keys
from cpuchat.tui.chat.answering import Answering
from cpuchat.tui.chat.attaching import Attaching, Paths
from cpuchat.tui.chat.chat_list import ChatList
from cpuchat.tui.chat.clipboard import Clipboard
from cpuchat.tui.chat.commands import chat_provider, model_provider, other_models
from cpuchat.tui.chat.composer import Composer
from cpuchat.tui.chat.messages import attached, stored_message, system_prompt
from cpuchat.tui.chat.queued import QueuedMessages
from cpuchat.tui.chat.sending import SendingScreen
from cpuchat.tui.chat.slash import commands
from cpuchat.tui.chat.status import StatusLine
from cpuchat.tui.chat.stream import ChatStream
from cpuchat.tui.chat.telemetry import LiveFigures, TelemetryLine, TelemetryPanel
from cpuchat.tui.chat.transcript import ChatTranscript
from cpuchat.tui.chat.welcome import WelcomePane, questions, start_of
from cpuchat.tui.commands import Palette, listing
from cpuchat.tui.markdown.parser import warm_up
from cpuchat.tui.services import Services
from cpuchat.tui.terminal.painter import Painter, TypingScreen
from cpuchat.tui.threads import collect_garbage
from cpuchat.tui.widgets.download_line import DownloadLine, QuantizeLine
from cpuchat.tui.widgets.key_footer import KeyFooter, set_size_classes
from cpuchat.tui.widgets.prompt import Prompt


class ChatScreen(TypingScreen, SendingScreen):
    """Owns every change of state of the chat; widgets only say what the user did."""

    AUTO_FOCUS = TEXT_FIELD = "#prompt"
    HORIZONTAL_BREAKPOINTS: ClassVar[list[tuple[int, str]] | None] = [(0, "-tiny"), (60, "-narrow"), (100, "-wide")]
    VERTICAL_BREAKPOINTS: ClassVar[list[tuple[int, str]] | None] = [(0, "-low"), (30, "-high")]
    BINDINGS: ClassVar[list[BindingType]] = keys.bindings("chat")
    KEYS: ClassVar = "chat"
    READS_FILES: ClassVar = True  # those that a message names

    def __init__(self, services: Services, initial_model: Source | None, text: str = "") -> None:
        """`initial_model` is loaded after the first paint; `text` is put into the prompt."""
        super().__init__()
        self._compositor = Painter()
        self.services = services
        self.conversation = services.conversation
        self.conversation.asks_when_full = True
        self.conversation.preset.of_new_chats = lambda: self.conversation.settings.chat.preset
        self._initial_model, self._initial_text = initial_model, text
        self.COMMANDS = {chat_provider(services), model_provider(services)}  # pyright: ignore[reportAttributeAccessIssue]

    def on_compose(self) -> None:
        set_size_classes(self)

    def compose(self) -> ComposeResult:
        yield StatusLine(id="status")
        with Horizontal(id="body"):
            yield ChatList(id="chats")
            with Vertical(id="middle"):
                with Horizontal(id="talk", classes="" if self.conversation.messages else "-empty"):
                    yield ChatTranscript(id="transcript")
                    yield WelcomePane(self.services)
                    yield TelemetryPanel(id="telemetry")
                yield TelemetryLine(id="telemetry-line")
                yield Paths()
                yield QueuedMessages()
                yield Prompt(self.submit_or_save, id="prompt")
        yield DownloadLine(self.services.downloading)
        yield QuantizeLine(self.services.quantizing)
        yield KeyFooter()

    def on_mount(self) -> None:
        self._transcript = self.query_one(ChatTranscript)
        self._prompt = self.query_one(Prompt)
        self._queued = self.query_one(QueuedMessages)
        self._prompt.recall = self._recall_queued
        self._chats = self.query_one(ChatList)
        self._composer = Composer(self._prompt)
        self._figures = LiveFigures(self, self.services)
        self._answering = Answering(
            self.conversation, self._transcript, self.query_one(StatusLine), self._make_reader(), self.tell,
            self._begun, self._show_messages, lambda: bool(self._composer.queue),
        )  # fmt: skip
        self._stream = ChatStream(
            self, self.services, self._answering, self._initial_model,
            on_start=self._started, on_idle=self._show_idle, on_model=self._model_ready, on_title=self._title_written,
        )  # fmt: skip
        self._clipboard = Clipboard(self.app, self._transcript, self.tell)
        self._attaching = Attaching(
            self._prompt, self.query_one(Paths), self._composer,
            lambda: self.conversation.model, lambda text: self.conversation.backend.count_tokens(text),
            lambda: self.conversation.history.n_past, self.conversation.meter.prefill_s,
            self._show_prompt_title, start_folder() if self.READS_FILES else None,
            lambda: {name: title for name, (title, _) in commands(self).items()},
        )  # fmt: skip
        self.conversation.on_save_problem = self.show_save_problem
        self._apply_ui_settings()
        if self.services.settings.ui.show_reasoning:
            self._transcript.toggle_reasoning()
        self.show_chat()
        if self._initial_text:
            self._prompt.put(self._initial_text)
        if self.services.tools_folder is not None:
            self.offer_folder(self.services.tools_folder)
        self.call_after_refresh(self._start)  # after the first paint, which waits for nothing

    def _start(self) -> None:
        collect_garbage()
        if self._initial_model is not None:
            self.load_model(self._initial_model)
        for name, server in self.services.tool_servers.items():
            self.start_server(name, server)
        self.list_chats()
        self._figures.show()
        warm_up()

    def on_resize(self) -> None:
        self.call_after_refresh(self._figures.show)  # the other of panel and line may be shown now

    # What runs

    @property
    def busy(self) -> bool:
        return self._stream.busy

    @property
    def model_path(self) -> Source | None:
        """Return the chosen model, loaded or not."""
        return self._stream.path if hasattr(self, "_stream") else self._initial_model

    @property
    def unsent(self) -> str:
        """Return text that was not sent; also after the app has ended."""
        return self._composer.unsent if hasattr(self, "_composer") else self._initial_text

    def load_model(self, path: Source) -> None:
        """Load in the background; refuses while something runs."""
        if not self.refuse_while_busy("load another model"):
            self._stream.load(path)

    def run_detached(self, work: Awaitable[None], leave: Callable[[], None]) -> None:
        """Run `work` in the place of an answer; `leave` stops it when the app quits."""
        self._stream.run_detached(work, leave)

    async def finish(self) -> None:
        """Stop what runs; return when its last text is shown and stored."""
        self._unqueue()
        await self._stream.finish()

    async def interrupt(self) -> bool:
        """Stop the answer or the load, and send nothing after it; False when there is none."""
        if not self._stream.busy or self._stream.detached:
            return False
        self._unqueue()
        await self._stream.stop()
        return True

    def _started(self) -> None:
        self._held = False
        self.show_chat_title()
        self._show_prompt_title()
        self._figures.start()
        self.refresh_bindings()

    def _show_idle(self) -> None:
        self._figures.stop()
        self._show_welcome()
        self._show_prompt_title()
        self.show_chat_title()
        self.refresh_bindings()
        self._go_on()

    @on(TextArea.Changed, "#prompt")
    def _prompt_changed(self) -> None:
        if hasattr(self, "_attaching"):
            self._attaching.changed()

    def _begun(self) -> None:
        """Update title and list: with the first event, a new chat has its id and title."""
        self._composer.chat_id = self.chat_id
        if self._stream.writing and (question := self.conversation.history.question) is not None:
            self._transcript.show_attachments(attached(question))
        self.show_chat_title()
        self.list_chats()

    def _title_written(self) -> None:
        self.show_chat_title()
        self.list_chats()

    # Showing

    def show_chat(self, message_id: int = 0, matcher: Matcher | None = None) -> None:
        if self._composer.queue and self.chat_id != self._composer.chat_id:
            self._composer.unqueue()  # they belong to the chat that was open
            self.tell("Queued messages were not sent; they are back in the prompt of their chat.")
        sent_with = [attachment for message in self.conversation.messages for attachment in message.attachments]
        self._composer.switch_chat(self.chat_id, self.questions(), sent_with)
        self.remove_class("-chats-over")
        self._show_messages(top=message_id, matcher=matcher)
        self._show_welcome()
        self._show_state()

    def _show_state(self) -> None:
        self.silence()
        self._show_prompt_title()
        self.refresh_bindings()
        self.show_chat_title()
        self._answering.show_context()
        self._figures.show()
        self._clipboard.start_over()

    def show_branch(self, message_id: int) -> None:
        self._composer.switch_branch(self.questions())
        self._show_state()
        self._show_messages(top=message_id)

    def _show_messages(self, end: int | None = None, top: int = 0, matcher: Matcher | None = None) -> None:
        """Show the messages before the one with the index `end`, from the one with the id `top` on."""
        tree, spans, messages = self.conversation.history.tree, self._answering.spans, self.conversation.messages[:end]
        at = next((at for at, message in enumerate(messages) if message.id == top), None)
        chat = self.conversation.chat
        rows = system_prompt(chat.effective_system_prompt, chat.preset) if chat is not None else []
        shown = [*rows, *(partial(stored_message, m, tree, spans.get(m.id, ())) for m in messages)]
        self._transcript.set_messages(shown, None if at is None else at + len(rows), matcher)

    def _show_welcome(self) -> None:
        """Show the welcome pane in place of the transcript while the chat is empty."""
        empty, path = not self._transcript.has_messages, self._stream.path
        self.query_one("#talk").set_class(empty, "-empty")
        offered: tuple[str, ...] = ()
        if empty and path is not None:
            known = isinstance(path, Path) and is_demo(path)
            offered = questions(known, self.check_action("compare", ()), self.services.first_run)
        self._prompt.suggestions = tuple(map(start_of, offered))
        if empty:
            idle = (self._stream.loaded or path is None) and not self.busy
            self.query_one(WelcomePane).show(offered, idle=idle)

    def action_suggest(self, number: int) -> None:
        self._prompt.put(self._prompt.suggestions[number - 1])
        self._prompt.focus()

    # Actions

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "stop" and hasattr(self, "_stream"):
            away = self.focused is not self._prompt
            active = self.busy or self._reader.busy or self._composer.editing is not None or bool(self._composer.queue)
            over = self._attaching.offers or self.has_class("-chats-over")
            return True if active or away or over else None
        return True

    async def action_stop(self) -> None:
        if not self._attaching.close() and (not self.silence() or self._stream.writing):
            await self._stop_working()

    async def _stop_working(self) -> None:
        """Stop what is written or loaded; else leave what Esc leaves."""
        if self._stream.writing:
            await self._stream.stop()  # what is queued is sent then
        elif self._composer.queue:
            self._unqueue()
        elif not await self.interrupt():
            self._composer.cancel_editing()
            self._show_state()
        self.remove_class("-chats-over")
        self._chats.clear_search()
        self._prompt.focus()

    def action_again(self) -> None:
        if self.refuse_while_busy("regenerate"):
            return
        selected = self.selected_message
        if (question := self.question_index(selected)) < 0:
            self.tell("Nothing to regenerate yet. Send a message first.")
        elif not self._stream.loaded:
            self.tell(self.services.no_model, "warning")
        else:
            self._clipboard.start_over()
            self.tell_if_greedy(question + 1)
            self._show_messages(question + 1)
            self._stream.run(self._answer(lambda: self.conversation.regenerate(selected)))

    def action_continue_answer(self) -> None:
        if self.refuse_while_busy("continue the answer"):
            return
        if not self.conversation.history.is_unfinished:
            self.tell("Nothing to continue. Only an answer that was stopped, cut off or edited can be.")
        elif not self._stream.loaded:
            self.tell(self.services.no_model, "warning")
        else:
            self._clipboard.start_over()
            self._stream.run(self._answer(self.conversation.continue_answer, continues=True))

    def action_edit(self) -> None:
        if self.refuse_while_writing("edit a message"):
            return
        if self._transcript.selects_system_prompt:
            self.action_system_prompt()
        elif (answer := self.selected_answer) is not None:
            self.edit_in_prompt(answer, "summary" if answer.is_summary else "answer")
        elif (at := self.question_index(self.selected_message)) < 0:
            self.tell("No message to edit yet.")
        else:
            self.edit_question(at)

    def edit_question(self, index: int) -> None:
        kind = "last message" if index == self.question_index() else "message"
        self.edit_in_prompt(self.conversation.messages[index], kind)

    def edit_in_prompt(self, message: StoredMessage, kind: str) -> None:
        self._composer.edit(message, kind)
        self._show_prompt_title()
        self.refresh_bindings()

    def action_copy_answer(self) -> None:
        self._clipboard.copy_answer()

    def action_copy_plain(self) -> None:
        self._clipboard.copy_plain()

    def action_copy_code(self) -> None:
        self._clipboard.copy_code()

    @on(ChatTranscript.CopyAsked)
    def _copy_asked(self, event: ChatTranscript.CopyAsked) -> None:
        self._clipboard.copy_block(event.block)

    @work
    async def action_models(self) -> None:
        await self._change_model(await self.services.navigation.models())

    @work(exclusive=True, group="switch-model")
    async def action_switch_model(self) -> None:
        """Choose among the models that are here: Enter loads one, Esc leaves."""
        if rows := await other_models(self.services):
            self.app.push_screen(Palette(providers=[listing(rows)], placeholder="Switch to …"))
        else:
            self.tell("No other model is here. Ctrl+O downloads one.")

    @work
    async def action_downloads(self) -> None:
        await self._change_model(await self.services.navigation.downloads())

    async def _change_model(self, path: Source | None) -> None:
        if path is not None:
            if self._answering.loading:
                await self.finish()  # the other model is not wanted any more
            self.load_model(path)

    def action_hardware(self) -> None:
        self.services.navigation.hardware()
