"""What keys, palette and typed commands do in a chat: they ask what is missing, and call the session."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

from textual.screen import Screen
from textual.worker import Worker

from cpuchat.base import paths
from cpuchat.base.errors import CpuchatError, SettingsError, UsageError
from cpuchat.base.files import write_named
from cpuchat.base.processes import run_in_daemon_thread
from cpuchat.chats.records import Chat, WhenFull
from cpuchat.chats.transfer import export_chat
from cpuchat.config.servers import ServerModel, Source
from cpuchat.config.settings import Settings
from cpuchat.hardware.placement.placement import PlacementSpec
from cpuchat.models.hub.repository import choose_repo_model
from cpuchat.models.library import usage
from cpuchat.models.library.places import is_demo
from cpuchat.present import answers
from cpuchat.present.chats import document
from cpuchat.present.tools import server_state
from cpuchat.session.activity import Activity
from cpuchat.session.attachments import start_folder
from cpuchat.session.chat import ChatSession
from cpuchat.session.events import Changed
from cpuchat.telemetry import units
from cpuchat.tools.config import load_servers
from cpuchat.tui.chat.conversation_pane import ConversationPane
from cpuchat.tui.chat.reader import Reader
from cpuchat.tui.services import Services
from cpuchat.tui.widgets.dialogs import AskTextScreen, ChoiceScreen, ConfirmScreen, DialogChoice

if TYPE_CHECKING:
    from cpuchat.compare.comparison import Opened, Sides

FIRST_PROMPT = "Tell me a story about a dragon and a baker"
"""Default prompt for the demo pair: its two quantizations answer it differently."""
_UNDO = "You can undo this until you quit (U in transcript or chat list)."
_WHEN_FULL = tuple(DialogChoice(choice, label) for choice, label in answers.WHEN_FULL.items())
T = TypeVar("T")
P = ParamSpec("P")
Asked = Callable[Concatenate["ChatCommands", P], Awaitable[None]]
Begun = Callable[Concatenate["ChatCommands", P], Worker[None] | None]


def _in_worker(group: str = "", waits: str = "") -> Callable[[Asked[P]], Begun[P]]:
    """Run a command in a worker of the screen, one at a time in a `group`. Its CpuchatError is shown. `waits`: what it
    does, if it has to wait while an answer is written."""

    def decorate(run: Asked[P]) -> Begun[P]:
        @functools.wraps(run)
        def begin(self: ChatCommands, *args: P.args, **kwargs: P.kwargs) -> Worker[None] | None:
            async def work() -> None:
                with self.telling():
                    await run(self, *args, **kwargs)

            if waits and self._session.refuse_while_writing(waits):
                return None
            return self._screen.run_worker(work, run.__name__, group or "default", exclusive=bool(group))

        return begin

    return decorate


def needs_reload(before: Settings, after: Settings) -> bool:
    """Return whether something changed that takes effect only on a load."""
    return (
        before.load_options() != after.load_options()
        or PlacementSpec.of(before) != PlacementSpec.of(after)
        or before.speculation.wanted_draft != after.speculation.wanted_draft
    )


class ChatCommands:
    """The commands of the chat on `screen`, by the names that its actions have in the table of keys."""

    def __init__(
        self, screen: Screen[Any], services: Services, session: ChatSession, pane: ConversationPane, reader: Reader
    ) -> None:
        self._screen, self._services, self._session = screen, services, session
        self._pane, self._transcript, self._reader = pane, pane.transcript, reader

    def route_actions(self) -> None:
        """Let the screen's actions be the commands."""
        for name in vars(ChatCommands):
            if not name.startswith("_"):
                setattr(self._screen, f"action_{name}", getattr(self, name))

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Say that what is done inside failed with a `CpuchatError`."""
        try:
            yield
        except CpuchatError as error:
            self._session.refuse(str(error), "error")

    async def _ask(self, dialog: Screen[T]) -> T | None:
        return await self._screen.app.push_screen_wait(dialog)

    async def _confirms(self, title: str, question: str, action: str = "Delete") -> bool:
        return await self._ask(ConfirmScreen(title, question, action, "Cancel")) == "yes"

    # Answers

    def regenerate(self) -> None:
        self._session.regenerate(self._transcript.selected_id)

    def continue_answer(self) -> None:
        self._session.continue_answer()

    async def answer_now(self) -> None:
        await self._session.answer_now()

    def compact(self) -> None:
        self._session.summarize()

    def edit(self) -> None:
        if self._transcript.selects_system_prompt:
            self.options()
        elif not self._session.refuse_while_writing("edit a message"):
            self._pane.edit_selected()

    @_in_worker("context")
    async def ask_when_full(self, problem: str) -> None:
        """Ask what a full chat does, and let it answer its last question."""
        question = f"{problem} What should this chat do when the context is full?"
        choice = await self._ask(ChoiceScreen("Context full", question, _WHEN_FULL))
        await self._session.choose_when_full(cast(WhenFull, choice or ""))

    @_in_worker("speech")
    async def speak(self) -> None:
        await self._session.stop_background()
        await self._reader.switch()

    @_in_worker("speech")
    async def read_answer(self) -> None:
        if text := self._transcript.current_message_text():
            await self._session.stop_background()
            await self._reader.read(text)
        else:
            self._session.tell("No answer to read yet.")

    def drafting(self) -> None:
        """Switch drafting of the next answers of this run off, or on as the settings say: from none to auto."""
        conversation, tell = self._session.conversation, self._session.tell
        if isinstance(self._services.loaded, ServerModel):
            tell("The server drafts as it was started; its options switch it on or off.")
            return
        if conversation.settings.speculation.drafters == "off":
            conversation.drafts = True
            self._services.save_settings({"speculation": {"drafters": "auto"}})
            tell("Drafting on from the next answer. The draft model comes with the next load (Ctrl+O).")
        elif conversation.drafts:
            conversation.drafts = False
            tell("Drafting off from the next answer. F9: on; F2 to disable it permanently.")
        else:
            conversation.drafts = True
            is_tuned_off = conversation.in_effect.speculation.drafters == "off"
            why = "because tuning found it slower with this model (`cpuchat tune --undo` reverts it)."
            tell(f"Drafting off, {why}" if is_tuned_off else "Drafting on from the next answer.")
        self._session.listen(Changed("ceilings"))

    def color_drafts(self) -> None:
        on = not self._transcript.colors_drafts  # the setting is written in the background, and may lag behind
        self._transcript.color_drafts(on)
        self._services.save_settings({"ui": {"color_drafts": on}})
        if on and not any(message.spans for message in self._transcript.messages):
            self._session.tell("New answers of models on this machine are colored by drafter (Ctrl+T turns it off).")

    # Chats

    def new_chat(self) -> None:
        with self.telling():
            self._session.new()

    @_in_worker("open-chat")
    async def open(self, chat_id: str, message_id: int = 0) -> None:
        """Show a stored chat, or a comparison, from `message_id` unless 0. While an answer is written, it is read on a
        screen of its own."""
        session, history = self._session, self._session.history
        with self._services.keys_held():
            if (chat := await history.stored_chat(chat_id)).sides:
                self.open_comparison(chat, message_id)
                return
            if not session.writing:
                await session.open(chat_id, message_id)
                return
            read = await asyncio.to_thread(history.read, chat_id, message_id)
        if await self._services.navigation.read_chat(read, message_id):
            await session.open(chat_id, message_id)

    def _open_chat(self) -> str:
        """Return the id of the open chat. Raises UsageError: it has none yet."""
        if (chat_id := self._session.chat_id) is None:
            raise UsageError("This chat has no messages yet.")
        return chat_id

    @_in_worker()
    async def rename_chat(self, title: str = "", chat_id: str = "") -> None:
        chat_id = chat_id or self._open_chat()
        with self._services.keys_held():
            before = (await self._session.history.stored_chat(chat_id)).title
        if title := title or await self._ask(AskTextScreen("Rename chat", before)) or "":
            await self._session.rename(chat_id, title)

    @_in_worker()
    async def export_chat(self) -> None:
        """Write the open chat to a file that the user names, as Markdown or JSON."""
        history, chat_id = self._session.history, self._open_chat()
        name = re.sub(r"[^\w.-]+", "-", history.chat.title if history.chat else "").strip("-.") or "chat"
        about = f"Folder: {paths.shown(start_folder())} (a path chooses another)"
        dialog = AskTextScreen("Export to Markdown (.md) or JSON (.json)", f"{name}.md", 4096, about)
        if not (wanted := await self._ask(dialog)):
            return
        file = start_folder() / paths.expanded(wanted)
        if file.is_file() and not await self._confirms("Replace file", f"{paths.shown(file)} exists.", "Replace"):
            return
        exported = await asyncio.to_thread(export_chat, history.store, await history.stored_chat(chat_id))
        await asyncio.to_thread(write_named, file, document([exported], file), force=True)
        self._session.tell(f"Exported to {paths.shown(file)}.")

    @_in_worker()
    async def delete_chat(self, chat_id: str = "") -> None:
        session, chat_id = self._session, chat_id or self._open_chat()
        if chat_id == session.chat_id and session.refuse_while_writing("delete this chat"):
            return
        with self._services.keys_held():
            title = (await session.history.stored_chat(chat_id)).title
        confirmed = await self._confirms("Delete chat", f"Delete “{title}” and all its messages? {_UNDO}")
        if confirmed and await session.delete(chat_id):
            session.tell(f"Deleted “{title}”. U in the chat list undoes it.")

    @_in_worker(waits="delete messages")
    async def delete_message(self) -> None:
        """Delete the selected message and what follows from it, on all branches."""
        session = self._session
        if not (message_id := self._transcript.selected_id):
            session.tell("Select a message first (k or j).")
            return
        following = len(session.history.tree.subtree(message_id)) - 1
        rest = f" and {units.plural(following, 'message')} after it, on all branches" if following else ""
        is_summary = any(message.id == message_id and message.is_summary for message in session.messages)
        what = "this summary? What follows it stays." if is_summary else f"this message{rest}?"
        if await self._confirms("Delete message", f"Delete {what} {_UNDO}"):
            with self._services.keys_held():
                if await session.delete_message(message_id):
                    self._transcript.focus()  # U is a key there, and a letter in the prompt
                    session.tell(f"Deleted. U {'' if self._transcript.has_messages else 'in the chat list '}undoes it.")

    @_in_worker()
    async def undo_delete(self) -> None:
        if deleted := await self._session.undo():
            self.open(deleted.chat_id, deleted.message_id)

    @_in_worker()
    async def fork(self) -> None:
        await self._session.fork(self._transcript.selected_id)

    def branch(self, step: int) -> None:
        """Open the branch beside the selected message, or beside the last one that has any."""
        self.switch_branch(self._transcript.selected_id, step)

    @_in_worker("open-chat")
    async def switch_branch(self, message_id: int, step: int) -> None:
        with self._services.keys_held():
            await self._session.switch_branch(message_id, step)

    # What the chat is answered with

    @_in_worker("options", "change this chat")
    async def options(self) -> None:
        """Show what the chat is answered with, and change it."""
        for name, starts in (await self._services.navigation.chat_options() or {}).items():
            if not starts:
                await self._session.end_server(name)
            elif (config := (await asyncio.to_thread(load_servers)).get(name)) is not None:
                self.start_server(name, config)

    @_in_worker()
    async def start_server(self, name: str, config: Any) -> None:
        """Start an MCP server; of one that is not valid, say why."""
        if isinstance(config, SettingsError):
            raise config
        server = await self._session.start_server(name, config)
        state = server_state(server, self._session.tools.toolbox.offered(server))
        self._session.tell_offered(f"MCP server {name}: {state}. Each call needs your approval.")

    # Models and other screens

    @_in_worker()
    async def models(self) -> None:
        offer = self._pane.welcome.about.offer
        best = offer.path if offer is not None else None
        await self._change_model(await self._services.navigation.models(best=best))

    @_in_worker("offer")
    async def accept_offer(self) -> None:
        """Do what the welcome offers: open a model of the user, or download one that suits this machine."""
        pane, services = self._pane, self._services
        if (offer := pane.welcome.about.offer) is None:
            self._session.tell("Opens the best of your models once they are read.")
            offer = await pane.welcome.wait_for_offer()
            if offer is None or offer.path is None or pane.composer.text or "" not in pane.composer.actions:
                return  # nobody has seen what would be downloaded; or something else is wanted by now
        if (model := offer.model) is None:
            if offer.path is not None and not offer.path.is_file():
                self._session.refuse(f"{paths.shown(offer.path)} is no longer there.")
                offer = None
            await self._change_model(offer.path if offer is not None else None)
            return
        self._session.tell("Contacting Hugging Face…")
        try:
            repository = await services.ask_hub(lambda: services.hub.repository(model.repos[0]))
        finally:
            pane.show_welcome()
        chosen = choose_repo_model(repository, model.quantization)
        services.downloading.start(repository.id, repository.revision, chosen, repository.newest_at)

    @_in_worker()
    async def downloads(self) -> None:
        await self._change_model(await self._services.navigation.models(at_downloads=True))

    async def _change_model(self, path: Source | Sides | None) -> None:
        if isinstance(path, tuple):
            self.compare_sides(path, await self._pane.composer.read_question())
        elif path is not None:
            if self._session.activity is Activity.LOADING:
                self._pane.composer.unqueue()
                await self._session.finish()  # the other model is not wanted any more
            self._session.load(path)
        else:
            self._pane.show_welcome()  # folders, files and downloads may have changed

    async def confirms_reload(self) -> Source | None:
        """Ask whether to load the model again with other settings; returns it, None where that waits for later."""
        session, effect = self._session, "Some of these settings take effect on the next load"
        if session.source is not None and (session.busy or isinstance(session.source, ServerModel)):
            session.tell(f"{effect} of a model on this machine.")
        elif session.source is not None:
            dialog = ConfirmScreen("Settings", f"{effect}. Reload the model now?", "Reload", "Later", False)
            return session.source if await self._ask(dialog) == "yes" else None
        return None

    def hardware(self) -> None:
        self._services.navigation.hardware()

    @_in_worker("compare")
    async def replay(self, name: str) -> None:
        if then := await self._services.navigation.replay(name):
            self._screen.call_later(self._screen.run_action, then)

    @_in_worker("compare")
    async def compare(self, q4_with_q8: bool = False) -> None:
        """Compare the loaded model: the demo model with its Q4_K_M at once, and `q4_with_q8` of any other if both are
        here; else with what the user chooses."""
        from cpuchat.compare.runner import Side, pair_of

        services, resolve = self._services, self._services.library.resolve
        if self._session.refuse_while_busy("compare"):
            return
        if isinstance(services.loaded, ServerModel):
            self._session.tell("Only models on this machine can be compared. Ctrl+O chooses one.")
            return
        path, first = services.loaded_path, ""
        if path is None or is_demo(path):
            first = FIRST_PROMPT
            sides = await run_in_daemon_thread(lambda: (Side.of(resolve("demo")), Side.of(resolve("demo-q4"))))
        elif q4_with_q8 and (found := await run_in_daemon_thread(lambda: pair_of(path, services.library))) is not None:
            sides = found
        elif (other := await services.navigation.compare_with(path)) is not None:
            sides = await run_in_daemon_thread(lambda: Side.of(path)), other
        else:
            return
        self.compare_sides(sides, await self._pane.composer.read_question() or first)

    @_in_worker("open-chat")
    async def open_comparison(self, chat: Chat, message_id: int = 0) -> None:
        """Show a stored comparison, from the turn with this message unless 0."""
        from cpuchat.compare.comparison import sides_of, turn_with, turns_of

        with self._services.keys_held():
            messages = await asyncio.to_thread(self._session.history.store.messages, chat.id)
        kept = (chat.id, turns_of(chat, messages), turn_with(messages, message_id))
        self.compare_sides(sides_of(chat), kept=kept)

    @_in_worker()
    async def compare_sides(
        self, sides: Sides, prompt: str = "", kept: Opened | None = None, then: Source | None = None
    ) -> None:
        """Open the compare screen; afterwards the file that the user chose there, else the model that was loaded, or
        `then`, is loaded.

        Meanwhile the chat's worker is not in memory: the two sides have the machine."""
        session, services = self._session, self._services
        if session.refuse_while_busy("compare"):
            return
        self._reader.stop()
        loaded = services.loaded or then
        await session.stop_background()
        with services.keys_held():
            await session.conversation.backend.unload()
        try:
            if (chosen := await services.navigation.compare(sides, prompt, kept)) is not None:
                loaded = chosen
                await asyncio.to_thread(usage.loaded, [chosen])  # also if the user quits before it is
        finally:
            if self._screen.is_running and not services.leaving:
                session.listen(Changed("chats"))
                if loaded is not None:
                    session.load(loaded)
