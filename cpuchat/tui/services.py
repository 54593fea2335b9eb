"""Services that screens share, and navigation between them. The app creates them and hands them to every screen."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from textual.app import App
from textual.signal import Signal

from cpuchat import paths, settings
from cpuchat.backend.base import Backend
from cpuchat.backend.local import LocalBackend
from cpuchat.backend.remote.keys import KeyRing
from cpuchat.conversation import Conversation
from cpuchat.errors import CpuchatError, SettingsError
from cpuchat.models.library.library import Library
from cpuchat.present.welcome import welcome
from cpuchat.servers import ServerModel, Source, source
from cpuchat.setting_sources import SettingSources
from cpuchat.settings import Changes, Settings, with_changes
from cpuchat.tui import keys
from cpuchat.tui.downloading import Downloading, Opener, open_downloads
from cpuchat.tui.machine_watch import MachineWatch
from cpuchat.tui.quantizing import Quantizing

if TYPE_CHECKING:
    from cpuchat.compare.comparison import Comparison
    from cpuchat.compare.kept import Opened, Sides
    from cpuchat.compare.side import Side
    from cpuchat.models.gguf.header import GGUFHeader
    from cpuchat.models.hub.client import Hub
    from cpuchat.models.library.model import LocalModel
    from cpuchat.tools.config import Server


class Chat(Protocol):
    """The interface of the chat for other features."""

    @property
    def busy(self) -> bool:
        """Return whether a load, an answer or a measurement is running."""
        ...

    def load_model(self, path: Source) -> None:
        """Load in the background; refuses while something runs."""

    def open_chat(self, chat_id: str) -> object:
        """Show a stored chat."""

    def run_detached(self, work: Awaitable[None], leave: Callable[[], None]) -> None:
        """Run `work` in the place of an answer; `leave` is called when the app quits meanwhile."""


class Navigation(Protocol):
    """Opens screens by name. Those that return something are awaited in a worker, until the screen closes."""

    async def models(self) -> Source | None:
        """Returns the model to load."""
        ...

    async def repository(self, repo: str, quantization: str = "") -> Path | None:
        """Returns the model to load."""
        ...

    async def downloads(self) -> Path | None:
        """Returns the model to load."""
        ...

    async def draft_models(self) -> Path | None:
        """Returns the loaded model when it has to be loaded again."""
        ...

    async def quantize(self, model: LocalModel) -> Path | None:
        """Returns the new file if it was written meanwhile."""
        ...

    async def tune(self, model: Path) -> Path | None:
        """Returns the loaded model when it has to be loaded again."""
        ...

    async def settings(self) -> Settings | None:
        """Returns the settings if they were saved."""
        ...

    def inspection(self, title: str, read: Callable[[], GGUFHeader]) -> None:
        """`read` runs in a thread and may raise CpuchatError."""

    def hardware(self) -> None: ...

    def plan(self) -> None: ...

    def keys(self) -> None: ...

    async def compare(self, sides: Sides, prompt: str = "", kept: Opened | None = None) -> None:
        """`kept`: one that was saved, to continue."""

    async def compare_with(self, model: Path) -> Side | None:
        """Returns what to compare the model with."""
        ...


class Services:
    """Use from the app's event loop. `chat` and `navigation` are set by the app before the first screen opens."""

    chat: Chat
    navigation: Navigation

    def __init__(
        self,
        app: App[Any],
        conversation: Conversation,
        library: Library,
        downloads: Opener = open_downloads,
        key_ring: KeyRing | None = None,
        sources: SettingSources | None = None,
    ) -> None:
        self.conversation = conversation
        self.library = conversation.library = library
        self.downloading = Downloading(app, downloads)
        self.quantizing = Quantizing(app)
        self.machine_watch = MachineWatch()
        self.new_backend: Callable[[], Backend] = LocalBackend
        """Makes the backend of one side of a comparison."""
        self.keys = key_ring or KeyRing()
        """The API keys of servers."""
        self.setting_sources = sources or SettingSources()
        self.servers_seen: dict[str, None] = {}
        """Servers that were used or typed in this run, in order."""
        self.served: list[ServerModel] = []
        """Models on servers, as they were listed last."""
        self.comparison: Comparison | None = None
        """The one on the screen."""
        self.on_input: Callable[[], None] = lambda: None
        """Called at each key, paste, click and turn of the wheel: what runs while the app is idle gives way."""
        self.no_model = "No model is loaded. Ctrl+O chooses one."
        """What to tell where a model is needed."""
        self.show_theme: Callable[[str], None] = lambda name: None
        """Shows the theme that a name in the settings means."""
        self.keys_held: Callable[[], AbstractContextManager[None]] = nullcontext
        """Inside, what is typed waits for what is being opened."""
        self.keymap: dict[str, str] = {}
        """Keys that the user moved, by action."""
        self.keys_changed = Signal[None](app, "keys_changed")
        self.describe_machine = welcome
        """Describes the machine for an empty chat. Slow: call it in a thread."""
        self.first_run = not paths.state_file().exists()
        """The app has not remembered anything yet: an empty chat shows how to begin."""
        self.tools_folder: Path | None = None
        """In which the model may read files from the start."""
        self.tool_servers: Mapping[str, Server | SettingsError] = {}
        """MCP servers to start with the chat."""
        self.leaving = False
        """True once the app is quitting."""
        self._app = app
        self._saving = asyncio.Lock()

    @cached_property
    def hub(self) -> Hub:
        """Return the client of the Hugging Face Hub. Its calls block: use it in threads."""
        from cpuchat.models.hub.client import Hub

        return Hub()

    @property
    def settings(self) -> Settings:
        return self.conversation.settings

    @property
    def loaded(self) -> Source | None:
        """Return the loaded model: its file, or its server and name."""
        model = self.conversation.model
        return source(model.path) if model is not None else None

    @property
    def loaded_path(self) -> Path | None:
        """Return the file of the loaded model; None also for one on a server."""
        return loaded if isinstance(loaded := self.loaded, Path) else None

    def use_keymap(self, keymap: dict[str, str]) -> None:
        """Use these keys, by action, from now on."""
        self.keymap = keymap
        self._app.set_keymap({id: moved or keys.unbound(id) for id, moved in keymap.items()})
        self.keys_changed.publish(None)

    def set_folders(self, folders: list[str]) -> None:
        """Search these folders for models from now on."""
        self.library = self.conversation.library = Library(folders)

    def save_settings(self, changes: Changes) -> None:
        """Write some settings in the background; a failure is shown, not raised."""
        self._app.run_worker(self._save_settings(changes), group="settings", name="settings")

    async def _save_settings(self, changes: Changes) -> None:
        async with self._saving:
            try:
                await asyncio.to_thread(settings.update, changes)
                self.setting_sources.saved(changes)
                self.conversation.settings = with_changes(self.settings, changes)
            except (CpuchatError, OSError) as error:
                self._app.notify(f"{error}", title="Settings not saved", severity="warning", timeout=10, markup=False)

    def kill_workers(self) -> None:
        """Kill every worker; what is unsaved is lost."""
        for backend in self.backends:
            backend.kill()

    @property
    def backends(self) -> list[Backend]:
        """Return the backends in use: of the chat and of a comparison's sides."""
        runners = self.comparison.runners if self.comparison is not None else ()
        return [self.conversation.backend, *(runner.conversation.backend for runner in runners)]

    async def close_comparison(self) -> None:
        """End its workers."""
        comparison, self.comparison = self.comparison, None
        if comparison is not None:
            await comparison.close()

    async def close_conversation(self) -> None:
        """Close the conversation, after pending settings are written."""
        async with self._saving:
            await self.conversation.close()
