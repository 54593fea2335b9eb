"""The main screen: chats, transcript, prompt and figures."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

from textual import on, work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.widgets import Footer
from textual.worker import Worker, WorkerError

from cpuchat.chats.records import storable
from cpuchat.conversation import Conversation
from cpuchat.models.library.library import Library
from cpuchat.protocol import AnyEvent, Failed, ModelLoaded
from cpuchat.text import clean_line
from cpuchat.tui import keys, wording
from cpuchat.tui.chat import drafts
from cpuchat.tui.chat.answering import Answering
from cpuchat.tui.chat.chat_list import ChatList, Chats
from cpuchat.tui.chat.copying import Copying
from cpuchat.tui.chat.figures import LiveFigures
from cpuchat.tui.chat.history import HistoryScreen
from cpuchat.tui.chat.prompt import Prompt
from cpuchat.tui.chat.status import StatusLine
from cpuchat.tui.chat.telemetry import TelemetryLine, TelemetryPanel
from cpuchat.tui.markdown.transcript import Transcript
from cpuchat.tui.widgets.dialogs import ConfirmScreen
from cpuchat.tui.widgets.download_line import DownloadLine
from cpuchat.tui.widgets.quantize_line import QuantizeLine

if TYPE_CHECKING:
    from cpuchat.tui.app import ChatApp

_WELCOME = "Ask something.\n\nEnter sends · Ctrl+J new line · Ctrl+O models · F1 help"
_NO_MODEL = "No model is loaded.\n\nCtrl+O chooses one · F1 help"


class ChatScreen(HistoryScreen):
    """Owns every change of state of the chat; widgets only tell it what the user did."""

    AUTO_FOCUS = "#prompt"
    HORIZONTAL_BREAKPOINTS: ClassVar[list[tuple[int, str]] | None] = [(0, "-tiny"), (60, "-narrow"), (100, "-wide")]
    VERTICAL_BREAKPOINTS: ClassVar[list[tuple[int, str]] | None] = [(0, "-low"), (30, "-high")]
    BINDINGS: ClassVar[list[BindingType]] = keys.bindings("chat")

    def __init__(self, conversation: Conversation, initial_model: Path | None, text: str = "") -> None:
        """`initial_model` is loaded after the first paint; `text` stands in the prompt."""
        super().__init__()
        self.conversation = conversation
        self._initial_text = text
        self.model_path = initial_model
        self._loaded = False  # the chosen model answered a load once; the backend starts it again by itself
        self._stream: Worker[None] | None = None
        self._editing = False
        self._queued = ""  # taken from the prompt, sent when the model is ready
        self._draft = ""
        self._drafts: dict[str | None, str] = {}  # what is being written in the other chats, by their ids
        self._shown: str | None = None  # id of the chat that the prompt belongs to
        self._leave_apart: Callable[[], None] | None = None

    # What it is made of

    def compose(self) -> ComposeResult:
        yield StatusLine(id="status")
        with Horizontal(id="body"):
            yield ChatList(id="chats")
            with Vertical(id="middle"):
                with Horizontal(id="talk"):
                    yield Transcript(id="transcript")
                    yield TelemetryPanel(id="telemetry")
                yield TelemetryLine(id="telemetry-line")
                yield Prompt(self.submit, id="prompt")
        yield DownloadLine(id="download-line")
        yield QuantizeLine()
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self._status = self.query_one(StatusLine)
        self._transcript = self.query_one(Transcript)
        self._prompt = self.query_one(Prompt)
        self._chats = self.query_one(ChatList)
        self._answering = Answering(
            self.conversation, self._transcript, self._status, self.tell, self._begun, self._show_messages
        )
        self._copying = Copying(self._app, self._transcript, self.tell)
        self._figures = LiveFigures(self, self.conversation)
        self.conversation.on_save_problem = self._show_save_problem
        self._apply_ui_settings()
        if self.conversation.settings.ui.show_reasoning:
            self._transcript.toggle_reasoning()
        self.show_chat()
        if self._initial_text:
            self._prompt.put(self._initial_text)
        # The first paint waits for nothing; the list of chats and the model come after it.
        self.call_after_refresh(self._start)

    def _start(self) -> None:
        # What start-up made stays until the end: full collections that walk it would be felt as a stall.
        gc.freeze()
        self.list_chats()
        self._figures.show()
        if self.model_path is not None:
            self.load_model(self.model_path)

    def on_unmount(self) -> None:
        self._figures.close()

    def release_counters(self) -> None:
        """Another screen watches the machine's counters from now on."""
        self._figures.close()

    def on_resize(self) -> None:
        self.call_after_refresh(self._figures.show)  # the other of panel and line may be shown now

    @property
    def _app(self) -> ChatApp:
        return cast("ChatApp", self.app)

    # Streams

    def load_model(self, path: Path) -> None:
        """Load in the background; refuses while something runs."""
        if self.refuse_while_busy("The model can be changed when the answer is done",
                                  "Another model can be loaded when this is done"):  # fmt: skip
            return
        model = self.conversation.model
        self.model_path, self._loaded = path, False
        self._answering.loading = path.stem
        self._run(self._load(path, Path(model.path) if model is not None else None))

    async def _load(self, path: Path, before: Path | None) -> None:
        """Load `path`; when it turns out to be no good, go back to the model that was loaded `before`."""
        last = await self._load_one(path)
        if isinstance(last, Failed) and before not in (None, path) and not self._app.leaving:
            self.tell(f"{before.stem} is loaded again.")
            await self._load_one(before)

    async def _load_one(self, path: Path) -> AnyEvent | None:
        self.model_path, self._loaded = path, False
        last = await self._answering.load(path)
        self._loaded = isinstance(last, ModelLoaded)
        if self._loaded:
            self._app.yield_to_inference()
            self._figures.share_the_cores()
            self._app.save_settings({"model": {"last": str(path)}})
        return last

    async def _answer(
        self, stream: Callable[[], AsyncIterator[AnyEvent]], text: str = "", editing: bool = False
    ) -> None:
        """Show an answer. `text` is what it answers, if that is new; the prompt gets it back when it was not taken."""
        self.refresh_bindings()
        last = await self._answering.answer(stream, replaces=editing or not text)
        if text and storable(text) != self._last_of_mine() and not self._prompt.text:
            self._prompt.put(text)
            self._editing = editing
        if isinstance(last, Failed) and last.code != "worker_died" and self.conversation.model is None:
            self._loaded = False
        self.list_chats()

    def _run(self, work: object) -> None:
        async def run() -> None:
            self.show_chat_title()
            self._figures.start()
            self.refresh_bindings()
            try:
                await work  # type: ignore[misc]
            finally:
                self._stream = None
                if self.is_running:  # else the app has ended by an error or a signal, and its widgets are gone
                    self._show_idle()
            self.call_next(self._send_queued)

        self._stream = self.run_worker(run(), group="stream", name="stream")
        self._show_prompt_title()

    def _show_idle(self) -> None:
        self._figures.stop()
        self._show_empty_text()
        self._show_prompt_title()
        self.show_chat_title()
        self.refresh_bindings()

    def run_apart(self, work: Awaitable[None], leave: Callable[[], None]) -> None:
        """Run what measures or loads the model again as the chat's stream: no answer can run beside it.

        `leave` is called when the app ends, to stop it.
        """
        self._leave_apart = leave
        self._run(self._apart(work))

    async def _apart(self, work: Awaitable[None]) -> None:
        try:
            await work
        finally:
            self._leave_apart = None
            if self.model_path is not None:
                self._loaded = self.conversation.model is not None
            self._answering.look_again()
            if self._loaded:
                self._figures.share_the_cores()

    @property
    def busy(self) -> bool:
        """A load or an answer is running, or about to."""
        return self._stream is not None

    async def finish(self) -> None:
        """Stop what runs and wait until its last words are shown and stored."""
        self._take_back()
        if self._leave_apart is not None:
            self._leave_apart()
        if (stream := await self._stop_stream()) is not None:
            with contextlib.suppress(WorkerError):
                await stream.wait()

    async def _stop_stream(self) -> Worker[None] | None:
        """Stop the load or the answer, also one that is just about to begin. Returns what may still be at its last
        words.
        """
        stream = self._stream
        while stream and stream is self._stream and not self.conversation.busy and not stream.is_finished:
            await asyncio.sleep(0.01)  # it is just about to begin, or to end
        await self.conversation.stop()
        return stream

    @property
    def unsent(self) -> str:
        """What was typed and not sent; also after the app has ended."""
        prompt = self._prompt_or_none()
        return self._initial_text if prompt is None else "\n".join(filter(None, (self._queued, prompt.text)))

    async def interrupt(self) -> bool:
        """Stop the answer or the load; False when there is none. What is measured has its own screen to stop it."""
        if not self.busy or self._leave_apart is not None:
            return False
        self._take_back()
        await self._stop_stream()
        return True

    @property
    def writing(self) -> bool:
        """An answer is being written, or about to."""
        return self.busy and not self._answering.loading and self._leave_apart is None

    def refuse_while_writing(self, why: str) -> bool:
        if self.writing:
            self.tell(f"{why} (Esc stops it).", "warning")
        return self.writing

    def refuse_while_busy(self, why: str, until_loaded: str) -> bool:
        """Tell `why`, or `until_loaded` while no answer but a load is running, and return True while either is."""
        if self.busy and not self.refuse_while_writing(why):
            self.tell(f"{until_loaded} (Esc stops the load).", "warning")
        return self.busy

    # Sending

    def submit(self, text: str) -> None:
        """Enter in the prompt: send `text`, queue it while a model loads, or leave it where it is and say why."""
        if self.busy and not self._answering.loading:
            self.tell("An answer is being written. Esc stops it; your text stays here.", "warning")
        elif self._queued:
            self.tell("One message is queued already (Esc takes it back); your text stays here.", "warning")
        elif self._loaded and not self.busy:
            self._prompt.accept()
            self._send(text)
        elif self.model_path is not None:
            if not self.busy:
                self.load_model(self.model_path)
            self._prompt.accept()
            self._set_queued(text)
        else:
            self.tell("Choose a model first; your text stays here.")
            self.action_models()

    def _send(self, text: str) -> None:
        self._copying.begin_again()
        if editing := self._editing:
            self._leave_editing()
            self._show_messages(before_last_user=True)
            stream = lambda: self.conversation.edit_last(text)  # noqa: E731
        else:
            stream = lambda: self.conversation.send(text)  # noqa: E731
        self._transcript.add_message(wording.mine(text))
        self._run(self._answer(stream, text, editing))

    def _send_queued(self) -> None:
        if self._queued and self._loaded and not self.busy:
            text = self._queued
            self._set_queued("")
            self._send(text)

    def _set_queued(self, text: str) -> None:
        self._queued = text
        self._show_prompt_title()

    def _take_back(self) -> None:
        """Put the queued message back into the prompt, before what was typed since."""
        if self._queued:
            self._prompt.put("\n".join(filter(None, (self._queued, self._prompt.text))))
            self._set_queued("")

    def _begun(self) -> None:
        """A stream has begun: a new chat has its id and its title now."""
        self._shown = self._chat_id
        self.show_chat_title()
        self.list_chats()

    # Showing

    def _apply_ui_settings(self) -> None:
        ui = self.conversation.settings.ui
        self.set_class(not ui.sidebar, "-no-sidebar")
        self.set_class(not ui.telemetry, "-no-telemetry")
        self._transcript.color_drafts(ui.color_drafts)

    @property
    def _chat_id(self) -> str | None:
        return self.conversation.chat.id if self.conversation.chat else None

    def show_chat(self) -> None:
        if self._queued and self._chat_id != self._shown:
            self._take_back()  # it belongs to the chat that was open
            self.tell("Your message is not sent: it waits in the prompt of its chat.")
        self._drafts[self._shown] = self._draft if self._editing else self._prompt.draft
        self._shown = self._chat_id
        self._leave_editing()
        self.remove_class("-chats-over")
        self._show_messages()
        self.show_chat_title()
        self._show_empty_text()
        self._show_prompt_title()
        mine = [m.content for m in self.conversation.messages if m.role == "user"]
        self._prompt.begin_chat(mine, self._drafts.pop(self._shown, ""))
        self._answering.show_context()
        self._figures.show()
        self._copying.begin_again()
        self._prompt.focus()

    def _show_messages(self, before_last_user: bool = False, before_answer: bool = False) -> None:
        messages = self.conversation.messages
        if before_last_user or before_answer:
            last = max((i for i, m in enumerate(messages) if m.role == "user"), default=-1)
            messages = messages[: last + before_answer]
        self._transcript.set_messages([wording.of_stored(m, self._answering.spans.get(m.id, ())) for m in messages])

    def show_chat_title(self) -> None:
        chat = self.conversation.chat
        self._transcript.border_title = Content(clean_line(chat.title)) if chat else "New chat"

    def _show_save_problem(self) -> None:
        problem = self.conversation.save_problem
        self._transcript.border_subtitle = Content(f"Not saved: {problem.message}") if problem else ""
        if problem is not None:
            self.tell(f"The answer is not saved yet. {problem} Saving is retried until it works.", "error")
        else:
            self.tell("The answer is saved now.")

    def _show_empty_text(self) -> None:
        self._transcript.empty_text = _WELCOME if self.model_path else _NO_MODEL

    def _show_prompt_title(self) -> None:
        self._prompt.border_title, self._prompt.border_subtitle = wording.prompt_titles(
            self._queued, self._editing, self.busy, bool(self._answering.loading)
        )
        self._prompt.set_class(self._editing, "-editing")
        self._prompt.set_class(bool(self._queued), "-queued")

    @on(Prompt.Scrolled)
    def _scrolled(self, event: Prompt.Scrolled) -> None:
        self._transcript.scroll_pages(event.pages)

    # Actions

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "stop":
            over = self.has_class("-chats-over")
            away = self.is_mounted and self.focused is not self._prompt_or_none()
            return True if self.busy or self._editing or bool(self._queued) or over or away else None
        return True

    def _prompt_or_none(self) -> Prompt | None:
        return getattr(self, "_prompt", None)

    async def action_stop(self) -> None:
        if self._queued:
            self._take_back()
        elif await self.interrupt():
            pass
        elif self._editing:
            self._leave_editing()
            self._prompt.put(self._draft)
        self.remove_class("-chats-over")
        self._chats.clear_search()
        self._prompt.focus()

    def action_again(self) -> None:
        if self.refuse_while_busy("Another answer can be written when this one is done",
                                  "Another answer can be written when the model is loaded"):  # fmt: skip
            return
        if self._last_of_mine() is None:
            self.tell("There is nothing to answer yet. Write a message first.")
            return
        if not self._loaded:
            self.tell("No model is loaded. Ctrl+O chooses one.", "warning")
            return
        self._copying.begin_again()
        self._show_messages(before_answer=True)
        self._run(self._answer(self.conversation.regenerate))

    def action_edit_last(self) -> None:
        if self.refuse_while_writing("A message can be edited when the answer is done"):
            return
        mine = self._last_of_mine()
        if mine is None:
            self.tell("There is no message of yours to edit yet.")
            return
        if not self._editing:
            self._draft = self._prompt.text
        self._editing = True
        self._prompt.put(mine)
        self._prompt.focus()
        self._show_prompt_title()
        self.refresh_bindings()

    def _last_of_mine(self) -> str | None:
        return next((m.content for m in reversed(self.conversation.messages) if m.role == "user"), None)

    def _leave_editing(self) -> None:
        self._editing = False
        self._show_prompt_title()
        self.refresh_bindings()

    def action_copy_answer(self) -> None:
        self._copying.answer()

    def action_copy_code(self) -> None:
        self._copying.code()

    def action_reasoning(self) -> None:
        self._transcript.toggle_reasoning()

    def action_sidebar(self) -> None:
        if self.has_class("-wide"):
            hidden = not self.has_class("-no-sidebar")
            self.set_class(hidden, "-no-sidebar")
            self._app.save_settings({"ui": {"sidebar": not hidden}})
            shown = not hidden
        else:
            self.toggle_class("-chats-over")
            shown = self.has_class("-chats-over")
        (self._chats.query_one(Chats) if shown else self._prompt).focus()
        self.refresh_bindings()

    def action_telemetry(self) -> None:
        self.toggle_class("-no-telemetry")
        self._app.save_settings({"ui": {"telemetry": not self.has_class("-no-telemetry")}})
        self._figures.show()

    def action_drafting(self) -> None:
        self.tell(drafts.switch(self._app, self.conversation))
        self._figures.show()

    def action_color_drafts(self) -> None:
        if text := drafts.color(self._app, self._transcript):
            self.tell(text)

    @work
    async def action_models(self) -> None:
        from cpuchat.tui.models.reader import ModelsReader
        from cpuchat.tui.models.screen import ModelsScreen

        reader = ModelsReader(self._app.library, self.conversation.settings, self.conversation.model)
        await self._change_model(await self.app.push_screen_wait(ModelsScreen(reader)))

    @work
    async def action_downloads(self) -> None:
        from cpuchat.tui.models.downloads.screen import DownloadsScreen

        await self._change_model(await self.app.push_screen_wait(DownloadsScreen()))

    async def _change_model(self, path: Path | None) -> None:
        if path is not None:
            if self._answering.loading:
                await self.finish()  # the other model is not wanted any more
            self.load_model(path)

    def action_hardware(self) -> None:
        from cpuchat.tui.hardware.screen import HardwareScreen

        self.app.push_screen(HardwareScreen())

    @work
    async def action_settings(self) -> None:
        from cpuchat.tui.settings.screen import SettingsScreen

        result = await self.app.push_screen_wait(SettingsScreen(self.conversation.settings, self.app.available_themes))
        if result is None:
            return
        before, self.conversation.settings = self.conversation.settings, result
        self.app.theme = result.ui.theme if result.ui.theme in self.app.available_themes else self.app.theme
        self._apply_ui_settings()
        if result.model.folders != before.model.folders:
            self._app.library = self.conversation.library = Library(result.model.folders)
        self._figures.show()
        if not drafts.load_again_for(before, result) or self.model_path is None:
            return
        if self.busy:
            self.tell("Some of these settings take effect when a model is loaded next.")
        else:
            question = "Some of these settings take effect when a model is loaded. Load it again now?"
            if await self.app.push_screen_wait(ConfirmScreen("Settings", question, "Load again", "Later", False)):
                self.load_model(self.model_path)
