"""Dialogs and lists of the chat: what they ask, and what the session does with the answer.

Each returns when it is done. Errors of the user are raised (`CpuchatError`).
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from textual.command import Hit, Hits, Provider
from textual.content import Content
from textual.screen import Screen

from cpuchat.base import paths
from cpuchat.base.errors import CpuchatError, SettingsError, UsageError
from cpuchat.base.files import write_atomically
from cpuchat.base.processes import run_in_daemon_thread
from cpuchat.base.text import clean_line
from cpuchat.chats.records import WhenFull
from cpuchat.config.presets import MAX_NAME, Preset, delete_preset, load_presets, save_preset
from cpuchat.config.servers import ServerModel, Source, host
from cpuchat.config.settings import with_changes
from cpuchat.models.library.places import LocalModel, is_demo
from cpuchat.present import answers
from cpuchat.present.answers import reasoning
from cpuchat.present.tools import server_state
from cpuchat.session.attachments import start_folder
from cpuchat.session.chat import ChatSession
from cpuchat.telemetry import units
from cpuchat.tools.config import load_servers
from cpuchat.tui.chat.chat_list import ChatAction
from cpuchat.tui.commands import RECENT, Listed, Palette, Row, highlighted, line, listing, load_hit, matches
from cpuchat.tui.services import Services
from cpuchat.tui.widgets.dialogs import AskTextScreen, Choice, ChoiceScreen, ConfirmScreen

if TYPE_CHECKING:
    from cpuchat.compare.comparison import Sides

UNDO: Final = "You can undo this until you quit (U in the chat list)."
MOST_RECENT = 3
_REASONING = (Choice("on", "On"), Choice("off", "Off"), Choice("limit", "Limit…"), Choice("default", "Default"))
_WHEN_FULL = tuple(Choice(choice, label) for choice, label in answers.WHEN_FULL.items())
_WIDEST = 36  # of what a preset sets, in cells
T = TypeVar("T")


class Menus:
    """Opens them over `screen`, whose actions the rows of lists call. Use from its workers."""

    def __init__(self, screen: Screen[Any], services: Services, session: ChatSession) -> None:
        self._screen, self._services, self._session = screen, services, session

    async def _answer(self, dialog: Screen[T]) -> T | None:
        return await self._screen.app.push_screen_wait(dialog)

    def _list(self, placeholder: str, rows: Sequence[Row]) -> None:
        self._screen.app.push_screen(Palette(providers=[listing(rows)], placeholder=placeholder))

    def _row(self, title: str, action: str, argument: str, about: str = "") -> Row:
        return Row(clean_line(title), partial(self._screen.run_action, f"{action}({argument!r})"), about=about)

    # Chats

    async def change_chat(self, action: ChatAction, chat_id: str, title: str = "") -> bool:
        """Rename, pin, export or delete a chat; True if the open one was deleted."""
        match action:
            case "rename":
                await self._rename_chat(chat_id, title)
            case "pin":
                await self._session.pin_chat(chat_id)
            case "export":
                await self._export_chat(chat_id)
            case "delete":
                return await self._delete_chat(chat_id)
        return False

    async def _rename_chat(self, chat_id: str, title: str = "") -> None:
        with self._services.keys_held():
            chat = await self._session.history.stored_chat(chat_id)
        if title := title or await self._answer(AskTextScreen("Rename chat", chat.title)) or "":
            await self._session.rename_chat(chat_id, title)

    async def _export_chat(self, chat_id: str) -> None:
        """Ask for a file and write the chat to it."""
        from cpuchat.chats.transfer import export_chat
        from cpuchat.present.chats import document

        history = self._session.history
        with self._services.keys_held():
            chat = await history.stored_chat(chat_id)
        name = re.sub(r"[^\w.-]+", "-", chat.title).strip("-.") or "chat"
        folder = f"Folder: {paths.shown(start_folder())} (a path chooses another)"
        asking = AskTextScreen("Export to Markdown (.md) or JSON (.json)", f"{name}.md", 4096, folder)
        if not (wanted := await self._answer(asking)):
            return
        file = start_folder() / paths.expanded(wanted)
        exported = await asyncio.to_thread(export_chat, history.store, await history.stored_chat(chat_id))
        try:
            await asyncio.to_thread(write_atomically, file, document([exported], file))
        except OSError as error:
            raise CpuchatError(f"Cannot write {file}: {error.strerror}. Choose another file.") from None
        self._session.tell(f"Exported to {paths.shown(file)}.")

    async def _delete_chat(self, chat_id: str) -> bool:
        """Ask whether to delete a chat, and delete it; True if it was the open one. Raises ChatsError."""
        session = self._session

        def is_refused() -> bool:
            return chat_id == session.chat_id and session.refuse_while_writing("delete this chat")

        if is_refused():
            return False
        with self._services.keys_held():
            title = (await session.history.stored_chat(chat_id)).title
        question = f"Delete “{title}” and all its messages? {UNDO}"
        # The dialog may have been open while a queued message was sent.
        if not await self.confirms("Delete chat", question) or is_refused():
            return False
        was_open = chat_id == session.chat_id
        await session.conversation.delete_chat(chat_id)
        session.tell(f"Deleted “{title}”. U in the chat list undoes it.")
        return was_open

    async def confirms_message_deletion(self, message_id: int) -> bool:
        """Ask whether to delete a message of the open chat with all that follows from it."""
        session = self._session
        if session.refuse_while_writing("delete messages"):
            return False
        following = len(session.history.tree.subtree(message_id)) - 1
        rest = f" and {units.plural(following, 'message')} after it, on all branches" if following else ""
        is_summary = any(message.id == message_id and message.is_summary for message in session.conversation.messages)
        what = "this summary? What follows it stays." if is_summary else f"this message{rest}?"
        if not await self.confirms("Delete message", f"Delete {what} {UNDO}"):
            return False
        return not session.refuse_while_writing("delete messages")

    async def confirms(self, title: str, question: str, yes: str = "Delete", no: str = "Cancel") -> bool:
        return bool(await self._answer(ConfirmScreen(title, question, yes, no)))

    async def when_full(self, question: str) -> WhenFull:
        """Ask what the open chat should do when its context is full; "" if it was not answered."""
        return cast(WhenFull, await self._answer(ChoiceScreen("Context full", question, _WHEN_FULL)) or "")

    async def set_when_full(self) -> None:
        """Choose what the open chat does when its context is full."""
        session = self._session
        if (chat := session.conversation.chat) is None:
            session.tell("Send a message first.")
            return
        now = answers.WHEN_FULL.get(chat.when_full, "Ask").lower()
        choice = await self.when_full(f"When the context is full (now: {now})")
        if choice and session.chat_id == chat.id:
            await session.history.set_options(when_full=choice)
            session.tell(f"When the context is full: {answers.WHEN_FULL[choice].lower()}.")

    async def choose_reasoning(self, choice: str | None) -> None:
        """Set how the model reasons in the open chat, or in the next one; "" asks."""
        if choice := choice or await self._ask_reasoning():
            await self._session.set_reasoning(choice)

    async def _ask_reasoning(self) -> str | None:
        used = self._session.conversation.chosen.chat
        now = reasoning(used.reasoning, used.reasoning_budget or None).removeprefix("reasoning ")
        choice = await self._answer(ChoiceScreen("Reasoning", f"Reasoning in this chat (now: {now})", _REASONING))
        if choice == "limit":
            budget = str(self._session.conversation.preset.reasoning[1] or "")
            choice = await self._answer(AskTextScreen("Most tokens of reasoning (0: no limit)", budget, 8))
        return choice

    # Presets

    async def choose_preset(self, name: str) -> None:
        """Use the named preset in the open chat, or in the next one, "none" for none; "" lists them."""
        session, presets = self._session, await asyncio.to_thread(load_presets)
        if name in presets or name == "none":
            await session.use_preset(presets.get(name))
        elif name:
            session.refuse(f"No preset named {clean_line(name)}. /preset lists them.")
        elif presets or session.conversation.preset.name:
            rows = [self._row(one.name, "preset", one.name, _shortened(gist(one))) for one in presets.values()]
            none = [self._row("No preset", "preset", "none")] if session.conversation.preset.name else []
            self._list("Preset …", [*rows, *none])
        else:
            session.tell("There are no presets yet. Save the current settings as one: Ctrl+P, Save as a preset.")

    async def save_preset(self) -> Preset | None:
        """Save system prompt, sampling, reasoning and model of the chat under a name; None if that was left."""
        conversation, presets = self._session.conversation, await asyncio.to_thread(load_presets)
        if not (name := await self._answer(AskTextScreen("Save as a preset", conversation.preset.name, MAX_NAME))):
            return None
        question = f"Replace the preset {clean_line(name)}?"
        if name in presets and not await self.confirms("Preset", question, "Replace", "Keep"):
            return None
        await conversation.preset.find()
        chosen = conversation.chosen
        if conversation.chat is not None:
            chosen = with_changes(chosen, {"chat": {"system_prompt": self._session.system_prompt}})
        preset = Preset.of(name, chosen, await run_in_daemon_thread(self._model_name))
        await asyncio.to_thread(save_preset, preset)
        await conversation.preset.choose(preset)
        self._session.tell(f"Preset {clean_line(name)} saved.")
        return preset

    def _model_name(self) -> str:
        path, model = self._services.loaded_path, self._session.conversation.model
        return self._services.library.spec(path) if path is not None else model.path if model is not None else ""

    async def delete_preset(self, name: str) -> None:
        """Delete the named preset; "" lists them."""
        presets = await asyncio.to_thread(load_presets)
        if not presets:
            self._session.tell("There are no presets.")
        elif name not in presets:
            rows = [self._row(one.name, "delete_preset", one.name, _shortened(gist(one))) for one in presets.values()]
            self._list("Delete the preset …", rows)
        else:
            of_new_chats = self._services.settings.chat.preset == name
            question = f"Delete the preset {clean_line(name)}? Chats that have it keep it."
            question += " New chats will have no preset." if of_new_chats else ""
            if await self.confirms("Preset", question, "Delete", "Keep"):
                await asyncio.to_thread(delete_preset, name)
                if of_new_chats:
                    self._services.save_settings({"chat": {"preset": ""}})
                self._session.tell(f"Preset {clean_line(name)} deleted.")

    # Tools

    async def choose_folder(self, wanted: str) -> None:
        """Let the model read files in a folder, "off" for none; "" asks which."""
        session = self._session
        chosen = wanted or await self._ask_folder()
        if not chosen or session.refuse_while_writing("change the tools"):  # a queued message was sent meanwhile
            return
        session.offer_folder(None if chosen == "off" else start_folder() / paths.expanded(chosen))
        if chosen == "off":
            session.tell_offered("The model can no longer read files.")
        else:
            session.tell_offered(f"The model may read files in {clean_line(chosen)}. Each call needs your approval.")

    async def _ask_folder(self) -> str:
        path = self._session.tools.folder
        if path is not None:
            what = f"The model may list, read and search files in {paths.shown(path)}."
            choices = (Choice("keep", "Keep"), Choice("change", "Change…"), Choice("off", "Turn off"))
            dialog = ChoiceScreen("Tools", f"{what} Each call needs your approval.", choices)
            if (choice := await self._answer(dialog)) != "change":
                return "off" if choice == "off" else ""
        title = "Folder in which the model may read files"
        return await self._answer(AskTextScreen(title, paths.shown(path or start_folder()), 4096)) or ""

    async def tool_server(self, name: str) -> None:
        """Start the named MCP server of mcp.json, or end it if it runs; "" lists them."""
        session = self._session
        if name in session.tools.servers:
            await session.end_server(name)
            return
        servers = await asyncio.to_thread(load_servers)
        if not servers:
            file = paths.shown(paths.tool_servers_file())
            raise UsageError(f"There are no MCP servers in {file}.", "docs/tools.md shows the format.")
        if name in servers:
            await self.start_server(name, servers[name])
            return
        rows = list[Row]()
        for one, config in servers.items():
            invalid = isinstance(config, SettingsError)
            about = "invalid: see why" if invalid else "start"
            if one in session.tools.servers:
                about = self._server_state(one)
            rows.append(self._row(one, "tool_servers", one, about))
        self._list("MCP server …", rows)

    async def start_server(self, name: str, config: Any) -> None:
        """Start an MCP server. Raises CpuchatError, of a server that is not valid why."""
        if isinstance(config, SettingsError):
            raise config
        await self._session.start_server(name, config)
        self._session.tell_offered(f"MCP server {name}: {self._server_state(name)}. Each call needs your approval.")

    def _server_state(self, name: str) -> str:
        server = self._session.tools.servers[name]
        return server_state(server, self._session.tools.box.offered(server))

    # Models

    async def compared_sides(self, ask: bool) -> Sides | None:
        """Return the loaded model and what it is compared with: its Q4_K_M for the demo model, unless `ask`; else what
        the user chooses. None if that was left or no model on this machine is loaded. Raises CpuchatError.
        """
        from cpuchat.compare.runner import Side

        services = self._services
        if isinstance(services.loaded, ServerModel):
            self._session.tell("Only models on this machine can be compared. Ctrl+O chooses one.")
            return None
        path, resolve = services.loaded_path, services.library.resolve
        if not ask and (path is None or is_demo(path)):
            return await run_in_daemon_thread(lambda: (Side.of(resolve("demo")), Side.of(resolve("demo-q4"))))
        if path is None:
            self._session.tell("Load a model first. Ctrl+O chooses one.")
            return None
        if (other := await services.navigation.compare_with(path)) is None:
            return None
        return await run_in_daemon_thread(lambda: Side.of(path)), other

    async def confirms_reload(self) -> Source | None:
        """Ask whether to load the model again with other settings; returns it, None where that waits for later."""
        session, effect = self._session, "Some of these settings take effect on the next load"
        if session.source is not None and (session.busy or isinstance(session.source, ServerModel)):
            session.tell(f"{effect} of a model on this machine.")
        elif session.source is not None:
            dialog = ConfirmScreen("Settings", f"{effect}. Reload the model now?", "Reload", "Later", False)
            return session.source if await self._answer(dialog) else None
        return None

    async def switch_model(self) -> None:
        """List the models that can be loaded without a download: those on this machine, the last used first, then those
        that servers listed.
        """
        services = self._services
        here = [(_title(one), one.path, units.size(one.size)) for one in await _other_models(services)]
        served = [(_served_title(one), one, "") for one in services.served if one != services.loaded]
        if rows := [Row(title, partial(self._session.load, one), about=about) for title, one, about in here + served]:
            self._list("Switch to …", rows)
        else:
            self._session.tell("No other local models. Ctrl+O to download one.")


def gist(preset: Preset) -> str:
    """Return what a preset sets, in short: `temperature 0.2 · reasoning off · Qwen3-8B-Q4_K_M`."""
    options = [f"{name.replace('_', ' ')} {value:g}" for name, value in preset.options.items()]
    reasoning = [f"reasoning {preset.reasoning}"] if preset.reasoning in ("on", "off") else []
    model = [preset.model.rpartition("/")[2].removesuffix(".gguf")] if preset.model else []
    return clean_line(" · ".join((*options, *reasoning, *model)))


def _shortened(about: str) -> str:
    return about if len(about) <= _WIDEST else f"{about[: _WIDEST - 1]}…"


# In the command palette


def chat_provider(services: Services) -> type[Provider]:
    """Stored chats by title, once something is typed."""

    class ChatProvider(Provider):
        async def search(self, query: str) -> Hits:
            try:
                chats = await services.conversation.history.list_chats()
            except CpuchatError:
                return
            matcher = self.matcher(query)
            rows = [(f"Open {clean_line(chat.title)}", "Chat", chat) for chat in chats]
            for score, title, chat in matches(matcher, rows, fuzzy=False):  # there may be thousands
                shown = line(self.app, "Chat", highlighted(matcher, title))
                yield Hit(score, shown, partial(services.chat.open_chat, chat.id), text=title)

    return ChatProvider


def model_provider(services: Services) -> type[Provider]:
    """Models on this machine, those that were used last before anything is typed; and those that servers listed."""

    class ModelProvider(Provider):
        _models: list[LocalModel]

        async def startup(self) -> None:
            self._models = await _other_models(services)

        async def discover(self) -> Hits:
            loaded = services.conversation.model
            draft = loaded.draft if loaded is not None else ""  # in use as it should be
            recent = [model for model in self._models if model.last_used and model.name != draft]
            for number, model in enumerate(recent[:MOST_RECENT]):
                shown = line(self.app, "" if number else RECENT, Content(_title(model)), units.size(model.size))
                load = partial(services.chat.load_model, model.path)
                yield Listed(shown, load, text=_title(model), group=RECENT)

        async def search(self, query: str) -> Hits:
            matcher = self.matcher(query)
            rows = [(_title(one), "Model", (one.path, units.size(one.size))) for one in self._models]
            served = [source for source in services.served if source != services.loaded]
            rows += [(_served_title(one), "Model", (one, "")) for one in served]
            for score, title, (source, size) in matches(matcher, rows):
                shown = line(self.app, "Model", highlighted(matcher, title), size)
                yield load_hit(score, shown, partial(services.chat.load_model, source), text=title)

    return ModelProvider


async def _other_models(services: Services) -> list[LocalModel]:
    """Return the models on this machine that are not loaded, the last used first."""
    try:
        found = await run_in_daemon_thread(services.library.local_models)
    except (CpuchatError, OSError):
        found = []
    usable = [model for model in found if not model.damaged and model.path != services.loaded_path]
    return sorted(usable, key=lambda model: -model.last_used)


def _title(model: LocalModel) -> str:
    return clean_line(f"Load {model.name} {model.quantization}")


def _served_title(source: ServerModel) -> str:
    return clean_line(f"Load {source.stem} on {host(source.server)}")
