"""The main screen: chats, transcript, prompt and figures."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from textual import on, work
from textual.app import ComposeResult, ScreenStackError
from textual.containers import Horizontal

from cpuchat.base import paths
from cpuchat.base.errors import CpuchatError
from cpuchat.chats.records import Chat, StoredMessage
from cpuchat.chats.saving import UNSAVED
from cpuchat.chats.store import Matcher
from cpuchat.config.servers import Source
from cpuchat.models.library.places import is_demo
from cpuchat.present import answers
from cpuchat.protocol.messages import Failed, LoadCancelled, ModelLoaded
from cpuchat.session import events
from cpuchat.session.chat import ChatSession
from cpuchat.session.events import SessionEvent, Severity
from cpuchat.tools.config import Server
from cpuchat.tui import keys
from cpuchat.tui.chat import draft_controls
from cpuchat.tui.chat.call_screen import CallScreen
from cpuchat.tui.chat.chat_list import ChatAction, ChatList, Chats
from cpuchat.tui.chat.composer import ACTIONS, Composer, commands, running_command
from cpuchat.tui.chat.conversation_pane import ConversationPane
from cpuchat.tui.chat.menus import Menus, chat_provider, model_provider
from cpuchat.tui.chat.probes import BuildProbe, ChatTitler, PassProbe
from cpuchat.tui.chat.reader import Reader
from cpuchat.tui.chat.status import StatusLine
from cpuchat.tui.chat.telemetry import LiveFigures, Presentation, TelemetryPanel
from cpuchat.tui.chat.transcript import ChatTranscript
from cpuchat.tui.markdown.render import warm_up
from cpuchat.tui.services import Services
from cpuchat.tui.terminal.painter import Painter, TypingScreen
from cpuchat.tui.threads import collect_garbage, yield_to_inference
from cpuchat.tui.widgets.download_line import DownloadLine, QuantizeLine
from cpuchat.tui.widgets.key_footer import KeyFooter

if TYPE_CHECKING:
    from cpuchat.compare.comparison import Opened, Sides

FIRST_PROMPT = "Tell me a story about a dragon and a baker"
"""Default prompt for the demo pair: its two quantizations answer it differently."""
_NOTICE_SECONDS = 60.0  # of what the user has to know about a damaged file


class ChatScreen(keys.Keyed, TypingScreen, keys="chat"):
    """Lays the chat out, binds its actions, and shows the events of its session."""

    AUTO_FOCUS = TEXT_FIELD = "#prompt"
    HORIZONTAL_BREAKPOINTS: ClassVar[list[tuple[int, str]] | None] = [(0, "-tiny"), (60, "-narrow"), (100, "-wide")]
    VERTICAL_BREAKPOINTS: ClassVar[list[tuple[int, str]] | None] = [(0, "-low"), (30, "-high")]

    def __init__(self, services: Services, initial_model: Source | None) -> None:
        """`initial_model` is loaded after the first paint."""
        super().__init__()
        self._compositor = Painter()
        self.services = services
        self.conversation = services.conversation
        self.conversation.asks_when_full = True
        self.session = ChatSession(self.conversation, initial_model)
        self.session.listen = self._follow
        self._initial_model = initial_model
        self._menus = Menus(self, services, self.session)
        self._status = StatusLine(id="status")
        self._chats = ChatList(id="chats")
        self._pane = ConversationPane(services, self.session)
        self._transcript, self._composer = self._pane.transcript, self._pane.composer
        self._reader = Reader(self, services, self.session)
        self._call_dialog: CallScreen | None = None
        self.COMMANDS = {chat_provider(services), model_provider(services)}  # pyright: ignore[reportAttributeAccessIssue]

    def compose(self) -> ComposeResult:
        yield self._status
        yield Presentation()
        with Horizontal(id="body"):
            yield self._chats
            yield self._pane
        yield DownloadLine(self.services.downloading)
        yield QuantizeLine(self.services.quantizing)
        yield KeyFooter()

    def on_mount(self) -> None:
        self._figures = LiveFigures(self, self.services)
        self._figures.speech = self._reader.figures
        probes = self.services, self.session, self._reader
        self.titler, self.build_probe, self.pass_probe = (
            ChatTitler(self, *probes), BuildProbe(self, *probes), PassProbe(self, *probes)
        )  # fmt: skip
        self._apply_ui_settings()
        if self.services.settings.ui.show_reasoning:
            self._transcript.toggle_reasoning()
        self.show_chat()
        self._unsent_in = ""
        with self._telling():
            self._unsent_in = self._composer.restore_drafts()
        if self.services.tools_folder is not None:
            self.session.tools.first_folder = self.services.tools_folder
            self.session.offer_folder(self.services.tools_folder)
        self.call_after_refresh(self._start)  # after the first paint, which waits for nothing

    def _start(self) -> None:
        collect_garbage()
        if self._initial_model is not None:
            self.load_model(self._initial_model)
        if self._unsent_in and self.services.tools_folder is None and not self._composer.text:
            self.open_chat(self._unsent_in)
            self.tell("Opened the chat with your unsent message. Ctrl+N starts a new one.")
        for name, server in self.services.tool_servers.items():
            self.start_server(name, server)
        self.list_chats()
        self._figures.show()
        warm_up()

    def on_resize(self) -> None:
        self.call_after_refresh(self._figures.show)  # the other of panel and line may be shown now

    async def on_unmount(self) -> None:
        self.services.machine_watch.close()
        await self._reader.close()

    # What others need of the chat

    @property
    def busy(self) -> bool:
        return self.session.busy

    @property
    def model_path(self) -> Source | None:
        """Return the chosen model, loaded or not."""
        return self.session.source

    def load_model(self, path: Source) -> None:
        """Load in the background; refuses while something runs."""
        self.session.load(path)

    def run_detached(self, work: Awaitable[None], leave: Callable[[], None]) -> None:
        """Run `work` in the place of an answer; `leave` stops it when the app quits."""
        self._reader.stop()
        self.session.measure(work, leave)

    def submit(self, text: str) -> None:
        """Send a text, or run the command that it is, as if it was typed."""
        self._composer.submit(text)

    async def finish(self) -> None:
        """Stop what runs; return when its last text is shown and stored."""
        with contextlib.suppress(ScreenStackError):  # after an error, which has ended the screens; the text is put
            self._composer.unqueue()
        self._composer.save_draft()
        self.session.leaving = self.services.leaving
        await self.session.finish()

    async def interrupt(self) -> bool:
        """Stop the answer or the load, and send nothing after it; False when there is none."""
        if not self.session.busy or self.session.measuring:
            return False
        self._composer.unqueue()
        await self.session.stop()
        return True

    # Notices

    def tell(self, text: str, severity: Severity = "information") -> None:
        """Show a toast, as plain text."""
        timeout = 5 if severity == "information" else 10
        self.notify(keys.renamed(text, self.services.keymap), severity=severity, timeout=timeout, markup=False)

    def refuse(self, text: str, severity: Severity = "warning") -> None:
        """Say why something cannot be done. The command that was typed for it goes back into an empty prompt."""
        self.tell(text, severity)
        if not self._composer.text and (command := running_command.get()):
            self._composer.put(command)

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        """Show a `CpuchatError` raised inside the block as a toast."""
        try:
            yield
        except CpuchatError as error:
            self.refuse(str(error), "error")

    # Events of the session

    def _follow(self, event: SessionEvent) -> Awaitable[None] | None:
        """Show an event; returns what has to be awaited before an answer begins."""
        self._pane.follow(event)
        self._status.follow(event, self.session)
        reading = self._reader.follow(event)
        match event:
            case events.Notice():
                (self.refuse if event.refuses else self.tell)(event.text, event.severity)
            case events.Changed():
                self._show_change(event.what)
            case events.LoadBegun(again=True):
                self.notify(f"Loading {event.source.stem} again.", markup=False)
            case events.LoadEnded():
                self._end_load(event)
            case events.AnswerBegun():
                self.refresh_bindings()
            case events.SummaryEnded():
                self._end_summary(event)
            case events.WhenFullAsked():
                self._ask_when_full(event.failed)
            case events.ApprovalAsked():
                self._call_dialog = CallScreen(event.tool, event.call)
                self.app.push_screen(self._call_dialog, lambda choice: self.session.approve(choice or "refuse"))
            case events.ApprovalEnded(choice=None) if self._call_dialog is not None:  # the answer was stopped
                self.run_worker(self._call_dialog.dismiss_when_on_top("refuse"), group="approval")
        return reading

    def _show_change(self, what: str) -> None:
        match what:
            case "state":
                self._show_state()
            case "question" | "chats":
                self._transcript.show_title()
                self.list_chats()
            case "ceilings":
                self._figures.show()
            case "model":
                if self.session.loaded:
                    self._show_ready()

    def _end_load(self, event: events.LoadEnded) -> None:
        if isinstance(event.last, LoadCancelled):
            self.tell("Load stopped. Your next message restarts it.")
        elif isinstance(event.last, ModelLoaded):
            if problem := self.conversation.draft_problem:
                self.tell(problem, "error")
            self._show_ready()
            # It may fit the cost model anew, so nothing waits for it.
            self.run_worker(self.session.show_ceiling(), group="ceiling", exclusive=True)
            self.services.save_settings({"model": {"last": str(event.source)}})

    def _show_ready(self) -> None:
        """Share the cores with the model that was loaded."""
        yield_to_inference()
        self._figures.share_the_cores()
        self.run_worker(self._reader.prepare_if_enabled(), group="speech")

    def _show_state(self) -> None:
        if not self.app.is_running:  # after an error or a signal, and while the app ends: its widgets are gone
            self.session.hold()
            return
        if self.session.busy:
            self._figures.start()
        else:
            self._figures.stop()
            self._pane.show_welcome()
        self._pane.show_options()
        self._transcript.show_title()
        self.refresh_bindings()

    def _end_summary(self, event: events.SummaryEnded) -> None:
        self.show_branch(0)
        if event.problem is not None:
            self.tell(answers.failure(event.problem), "error")
        elif event.is_kept and event.finished is not None:
            lost = event.trimmed is not None or event.finished.stop_reason != "end"
            told = f"{answers.summarized(event.finished, event.trimmed)} Select it and press F4 to edit it."
            self.tell(told, "warning" if lost else "information")
        else:
            self.tell("Stopped. The chat is unchanged.", "warning")

    @work(exclusive=True, group="context")
    async def _ask_when_full(self, failed: Failed) -> None:
        question = f"{failed.message} What should this chat do when the context is full?"
        choice = await self._menus.when_full(question)
        with self._telling():
            await self.session.choose_when_full(choice)

    @on(Reader.Changed)
    def _reading_changed(self) -> None:
        """Keep the figures of what is read up to date, and Esc enabled."""
        self._figures.follow_reading(self._reader.busy)
        self.refresh_bindings()

    # Showing

    def show_chat(self, message_id: int = 0, matcher: Matcher | None = None) -> None:
        """Show the open chat from its end, or from a message, with what `matcher` finds marked."""
        self._composer.switch_chat()
        self.remove_class("-chats-over")
        self._transcript.show_chat(top=message_id, matcher=matcher)
        self._pane.show_welcome()
        self._show_chat_state()

    def show_branch(self, message_id: int) -> None:
        """Show another branch of the same chat from this message."""
        self._composer.switch_branch()
        self._show_chat_state()
        self._transcript.show_chat(top=message_id)

    def _show_chat_state(self) -> None:
        self._reader.stop()
        self._pane.show_options()
        self.refresh_bindings()
        self._transcript.show_title()
        self._status.show_fill(self.session)
        self._figures.show()
        self._transcript.start_copying_over()

    def action_suggest(self, number: int) -> None:
        self._composer.focus()
        self._composer.suggest(number)

    def action_reasoning(self) -> None:
        self._transcript.toggle_reasoning()

    def action_sidebar(self) -> None:
        if self.has_class("-wide"):
            hidden = not self.has_class("-no-sidebar")
            self.set_class(hidden, "-no-sidebar")
            self.services.save_settings({"ui": {"sidebar": not hidden}})
            shown = not hidden
        else:
            self.toggle_class("-chats-over")
            shown = self.has_class("-chats-over")
        (self._chats.query_one(Chats) if shown else self._composer).focus()
        self.refresh_bindings()

    def action_telemetry(self) -> None:
        """Show the figures in brief, then all of them where there is room for a panel, then none."""
        panel, hidden = self.query_one(TelemetryPanel), self.has_class("-no-telemetry")
        everything = self.has_class("-wide") and not hidden and not panel.has_class("-all")
        panel.set_class(everything, "-all")
        self.set_class(not hidden and not everything, "-no-telemetry")
        self.services.save_settings({"ui": {"telemetry": hidden or everything, "all_figures": everything}})
        self._figures.show()

    def action_present(self) -> None:
        """Toggle large figures over the chat."""
        self.toggle_class("-present")
        self._figures.show()

    def action_drafting(self) -> None:
        self.tell(draft_controls.cycle(self.services))
        self._figures.show()

    def action_color_drafts(self) -> None:
        if text := draft_controls.color(self.services, self._transcript):
            self.tell(text)

    # Sending, stopping, regenerating

    @on(Composer.CommandTyped)
    async def _run_command(self, event: Composer.CommandTyped) -> None:
        """Run a command in a context that knows how it was typed, which workers inherit."""
        run = commands(self)[event.name][1]
        if event.argument:
            run = partial(getattr(self, f"action_{ACTIONS[event.name]}"), event.argument)
        token = running_command.set(event.text)
        try:
            if inspect.isawaitable(ran := run()):
                await ran
        finally:
            running_command.reset(token)

    @on(Composer.Saved)
    @work(exclusive=True, group="context")
    async def _save_edited(self, event: Composer.Saved) -> None:
        """Save an edited answer as another answer to the same question, a summary or system prompt in its place."""
        messages, history = self.conversation.messages, self.conversation.history
        with self._telling():
            if event.kind == "system prompt":
                self._change_options("save the system prompt", self._set_system_prompt, event.text)
            elif event.kind == "summary":
                await history.edit_summary(event.message_id, event.text)
                self.tell("Summary saved.")
            elif not any(one.id == event.message_id and one.content.strip() == event.text for one in messages):
                self.show_branch((await history.edit_answer(event.message_id, event.text)).id)
                self.tell("Saved as a new branch. Alt+R continues it.")
        if event.kind == "summary":
            self.show_branch(0)

    @on(Composer.ActionWanted)
    async def _action_wanted(self, event: Composer.ActionWanted) -> None:
        await self.run_action(event.action)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "stop" and self._composer.is_mounted:
            away = self.focused is not self._composer
            active = self.busy or self._reader.busy or self._composer.editing is not None or bool(self.session.queue)
            over = self._composer.offers_completions or self.has_class("-chats-over")
            return True if active or away or over else None
        return True

    async def action_stop(self) -> None:
        """Close what is offered, else be silent, else stop what is written or loaded, else leave what Esc leaves."""
        if self._composer.close_completions() or (self._reader.stop() and not self.session.writing):
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

    def action_again(self) -> None:
        selected = self._transcript.selected_id
        repeats = self.session.will_repeat(selected)
        if self.session.regenerate(selected) and repeats:
            self.tell("Greedy sampling: expect the same answer again. F2, Temperature changes that.")

    def action_continue_answer(self) -> None:
        self.session.continue_answer()

    async def action_answer_now(self) -> None:
        await self.session.answer_now()

    def action_compact(self) -> None:
        self.session.summarize()

    @work(exclusive=True, group="context")
    async def action_when_full(self) -> None:
        with self._telling():
            await self._menus.set_when_full()

    # Editing

    def action_edit(self) -> None:
        if self._transcript.selects_system_prompt:
            self.action_system_prompt()
        elif not self.session.refuse_while_writing("edit a message"):
            self._pane.edit_selected()

    def action_copy_answer(self) -> None:
        self._transcript.copy_message()

    def action_copy_plain(self) -> None:
        self._transcript.copy_message(plain=True)

    def action_copy_code(self) -> None:
        self._transcript.copy_code()

    # Chats

    @on(ChatList.Searched)
    @work(exclusive=True, group="list-chats")
    async def list_chats(self) -> None:
        """Show the chats, or those that match the search."""
        if not self.app.is_running:  # its widgets may be gone
            return
        with self._telling():
            found = await self.conversation.history.list_chats(self._chats.searching)
            if self.app.is_running:
                self._chats.show(found, self.session.chat_id)
        for notice in self.conversation.history.store.take_notices():
            self.notify(notice, severity="warning", timeout=_NOTICE_SECONDS, markup=False)

    @work(exclusive=True, group="open-chat")
    async def open_chat(self, chat_id: str, message_id: int = 0, matcher: Matcher | None = None) -> None:
        """Show a stored chat, from `message_id` unless 0, with what `matcher` finds marked."""
        if self.session.refuse_while_writing("open another chat"):
            return
        with self._telling(), self.services.keys_held():
            if (chat := await self.conversation.history.stored_chat(chat_id)).sides:
                self.open_comparison(chat, message_id)
                return
            before = self.session.tools.folder
            await self.session.open_chat(chat_id, message_id)
            self._show_opened(before, message_id, matcher)
        self.list_chats()

    def action_new_chat(self) -> None:
        if self.session.refuse_while_writing("start a new chat"):
            return
        with self._telling():
            before = self.session.tools.folder
            self.session.new_chat()
            self._show_opened(before)
        self.list_chats()

    def _show_opened(self, folder: Path | None, message_id: int = 0, matcher: Matcher | None = None) -> None:
        """Show the chat that was opened. `folder`: in which the model could read files in the one before."""
        self._chats.clear_search()
        self.show_chat(message_id, matcher)
        if message_id and matcher is not None:
            self._transcript.focus()  # n goes to the next match
        if (path := self.session.tools.folder) != folder:
            can = f"The model may read {paths.shown(path)}" if path else "The model can no longer read files"
            self.tell(f"{can}: /tools holds for one chat.")

    @on(ChatList.Opened)
    def _opened(self, event: ChatList.Opened) -> None:
        searching = self._chats.searching
        self.open_chat(event.chat_id, event.message_id, Matcher(searching) if searching else None)

    @on(ChatList.ActionAsked)
    def _chat_action_asked(self, event: ChatList.ActionAsked) -> None:
        self._change_chat(event.action, event.chat_id)

    def action_rename_chat(self, title: str = "") -> None:
        self._change_open_chat("rename", title)

    def action_pin_chat(self) -> None:
        self._change_open_chat("pin")

    def action_export_chat(self) -> None:
        self._change_open_chat("export")

    def action_delete_chat(self) -> None:
        self._change_open_chat("delete")

    def _change_open_chat(self, action: ChatAction, title: str = "") -> None:
        if (chat_id := self.session.chat_id) is None:
            self.tell("This chat has no messages yet.")
        else:
            self._change_chat(action, chat_id, title)

    @work
    async def _change_chat(self, action: ChatAction, chat_id: str, title: str = "") -> None:
        with self._telling():
            if await self._menus.change_chat(action, chat_id, title):
                self.show_chat()
        self.list_chats()

    @work
    async def action_delete_message(self) -> None:
        """Delete the selected message and what follows from it, on all branches."""
        if not (message_id := self._transcript.selected_id):
            self.tell("Select a message first (k or j).")
        elif await self._menus.confirms_message_deletion(message_id):
            with self._telling(), self.services.keys_held():
                try:
                    await self.conversation.delete_message(message_id)
                finally:  # it may have been changed in another window
                    self.show_chat()
                self._transcript.focus()  # U is a key there, and a letter in the prompt
                self.tell(f"Deleted. U {'' if self._transcript.has_messages else 'in the chat list '}undoes it.")
            self.list_chats()

    @work
    async def action_undo_delete(self) -> None:
        if self.session.refuse_while_writing("undo"):
            return
        with self._telling():
            if deleted := await self.conversation.history.undo_delete():
                self.open_chat(deleted.chat_id, deleted.message_id)
            else:
                self.tell("Nothing to undo.")
        self.list_chats()

    @work
    async def action_fork(self) -> None:
        """Copy the chat up to the selected message, or all of it, into a new chat."""
        if not self.conversation.messages:
            self.tell("This chat has no messages yet.")
        elif not self.session.refuse_while_writing("fork this chat"):
            with self._telling():
                await self.conversation.fork_chat(self._transcript.selected_id or self.conversation.messages[-1].id)
                self._chats.clear_search()
                self.show_chat()
                self.tell("Forked. You are in the new chat.")
            self.list_chats()

    @on(ChatTranscript.BranchAsked)
    def _branch_asked(self, event: ChatTranscript.BranchAsked) -> None:
        self._switch_branch(event.message_id, event.step)

    def action_branch(self, step: int) -> None:
        """Open the branch beside the selected message, or beside the last one that has any."""
        branching = [message.id for message in self.session.branching]
        message_id = self._transcript.selected_id or (branching[-1] if branching else 0)
        if message_id not in branching:
            self.tell("No other answer here. Regenerate or edit makes one.")
        else:
            self._switch_branch(message_id, step)

    @work(exclusive=True, group="open-chat")
    async def _switch_branch(self, message_id: int, step: int) -> None:
        with self._telling(), self.services.keys_held():
            if shown := await self.session.switch_branch(message_id, step):
                self.show_branch(shown)

    # Presets, reasoning, system prompt, tools

    @work(exclusive=True, group="options")
    async def _change_options(self, what: str, change: Callable[..., Awaitable[None]], *arguments: str) -> None:
        """Do `what` to the options of the chat, or of the next one, unless an answer is being written."""
        if self.session.refuse_while_writing(what):
            return
        before = self.session.system_prompt
        with self._telling():
            await change(*arguments)
        if self.session.system_prompt != before:
            self.show_branch(0)
        self._pane.show_options()

    def action_preset(self, name: str = "") -> None:
        """Use a preset: the named one, "none" for none; "" asks which."""
        self._change_options("choose a preset", self._menus.choose_preset, name)

    def action_save_preset(self) -> None:
        self._change_options("save a preset", self._save_preset)

    async def _save_preset(self) -> None:
        if saved := await self._menus.save_preset():
            self._pane.preset_models[saved.model] = self.services.loaded

    @work(exclusive=True, group="options")
    async def action_delete_preset(self, name: str = "") -> None:
        with self._telling():
            await self._menus.delete_preset(name)

    def action_chat_reasoning(self, choice: str = "") -> None:
        """Set whether the model reasons, and for how many tokens; "" asks."""
        self._change_options("choose the reasoning", self._menus.choose_reasoning, choice)

    def action_system_prompt(self, text: str = "") -> None:
        """Edit the system prompt in the prompt; or set it to `text`."""
        self._change_options("edit the system prompt", self._edit_system_prompt, text)

    async def _edit_system_prompt(self, text: str) -> None:
        await self.conversation.preset.find()
        if text:
            await self._set_system_prompt(text)
        else:
            own = self.session.system_prompt
            self._pane.edit(
                StoredMessage(id=UNSAVED, chat_id="", parent=0, role="system", content=own), "system prompt"
            )

    async def _set_system_prompt(self, text: str) -> None:
        if text != self.session.system_prompt:
            await self.session.set_system_prompt(text)

    def action_tools(self, wanted: str = "") -> None:
        """Let the model read files in a folder, "off" for none; "" asks which."""
        self._change_options("change the tools", self._menus.choose_folder, wanted)

    @work(exclusive=True, group="tools")
    async def action_forget_approvals(self) -> None:
        """Ask again before every call."""
        await asyncio.to_thread(self.session.tools.approvals.forget_all)
        self.tell("Every tool call needs your approval again.")

    @work(group="tool servers")
    async def action_tool_servers(self, name: str = "") -> None:
        """Start the named server of mcp.json, or end it if it runs; "" lists them."""
        if not self.session.refuse_while_writing("change the tools"):
            with self._telling():
                await self._menus.tool_server(name)

    @work(group="tool servers")
    async def start_server(self, name: str, config: Server | CpuchatError) -> None:
        with self._telling():
            await self._menus.start_server(name, config)

    # Reading aloud

    @work(exclusive=True, group="speech")
    async def action_speak(self) -> None:
        """Toggle reading answers aloud."""
        await self.session.stop_background()
        with self._telling():
            await self._reader.switch()

    @work(exclusive=True, group="speech")
    async def action_read_answer(self) -> None:
        """Read the selected message, or the last answer."""
        if text := self._transcript.current_message_text():
            await self.session.stop_background()
            with self._telling():
                await self._reader.read(text)
        else:
            self.tell("No answer to read yet.")

    # Other screens

    @work
    async def action_models(self) -> None:
        await self._change_model(await self.services.navigation.models())

    @work
    async def action_downloads(self) -> None:
        await self._change_model(await self.services.navigation.downloads())

    async def _change_model(self, path: Source | None) -> None:
        if path is not None:
            if self.session.loading:
                await self.finish()  # the other model is not wanted any more
            self.load_model(path)

    @work(exclusive=True, group="switch-model")
    async def action_switch_model(self) -> None:
        """Choose among the models that are here: Enter loads one, Esc leaves."""
        await self._menus.switch_model()

    def action_hardware(self) -> None:
        self.services.navigation.hardware()

    def _apply_ui_settings(self) -> None:
        ui = self.services.settings.ui
        self.set_class(not ui.sidebar, "-no-sidebar")
        self.set_class(not ui.telemetry, "-no-telemetry")
        self.query_one(TelemetryPanel).set_class(ui.all_figures, "-all")
        self._figures.show()
        self._transcript.color_drafts(ui.color_drafts)

    @work
    async def action_settings(self) -> None:
        if (result := await self.services.navigation.settings()) is None:
            return
        before, self.conversation.settings = self.services.settings, result
        if result.ui.theme != before.ui.theme:
            self.services.show_theme(result.ui.theme)
        self._apply_ui_settings()
        self._pane.show_options()
        await self._reader.settings_changed(before.speech)
        if result.model.folders != before.model.folders:
            self.services.set_folders(result.model.folders)
        self._figures.show()
        if draft_controls.needs_reload(before, result) and (path := await self._menus.confirms_reload()):
            self.load_model(path)

    @work(exclusive=True, group="compare")
    async def action_replay(self, name: str) -> None:
        with self._telling():
            if await self.services.navigation.replay(name):
                self.action_models()

    def action_compare(self) -> None:
        """Compare the loaded model: the demo model with its Q4_K_M at once, any other with what the user chooses."""
        self._compare_loaded(ask=False)

    def action_compare_with(self) -> None:
        self._compare_loaded(ask=True)

    @work(exclusive=True, group="compare")
    async def _compare_loaded(self, ask: bool) -> None:
        if self.session.refuse_while_busy("compare"):
            return
        with self._telling():
            if sides := await self._menus.compared_sides(ask):
                first = FIRST_PROMPT if is_demo(Path(sides[0].path)) and not ask else ""
                self.compare(sides, await self._composer.read_question() or first)

    @work(exclusive=True, group="open-chat")
    async def open_comparison(self, chat: Chat, message_id: int = 0) -> None:
        """Show a stored comparison, from the turn with this message unless 0."""
        from cpuchat.compare.comparison import sides_of, turn_with, turns_of

        with self._telling():
            with self.services.keys_held():
                messages = await asyncio.to_thread(self.conversation.history.store.messages, chat.id)
            self.compare(sides_of(chat), kept=(chat.id, turns_of(chat, messages), turn_with(messages, message_id)))

    @work
    async def compare(
        self, sides: Sides, prompt: str = "", kept: Opened | None = None, then: Source | None = None
    ) -> None:
        """Open the compare screen; afterwards the model that was loaded, or `then`, is loaded again.

        Meanwhile the chat's worker is not in memory: the two sides have the machine.
        """
        if self.session.refuse_while_busy("compare"):
            return
        self._reader.stop()
        loaded = self.services.loaded or then
        with self.services.keys_held():
            await self.conversation.backend.unload()
        try:
            with self._telling():
                await self.services.navigation.compare(sides, prompt, kept)
        finally:
            if self.is_running and not self.services.leaving:
                self.list_chats()
                if loaded is not None:
                    self.load_model(loaded)
