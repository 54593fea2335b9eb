"""Services that screens share, and navigation between them. The app creates them and hands them to every screen.

Among them are the counters of memory traffic and power, read a few times a second for all screens that show them, and
how often the app draws while a model computes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from textual.app import App

from cpuchat.backend.base import Backend
from cpuchat.backend.local import LocalBackend
from cpuchat.base import paths
from cpuchat.base.errors import CpuchatError, HubOffline, SettingsError
from cpuchat.base.processes import run_in_daemon_thread
from cpuchat.config import settings
from cpuchat.config.servers import KeyRing, Source, computes_here
from cpuchat.config.settings import Changes, Settings, SettingSources, with_changes
from cpuchat.hardware.sysfs import own_cpus
from cpuchat.models.library.library import Library
from cpuchat.present.chats import welcome
from cpuchat.protocol.model_info import ModelInfo
from cpuchat.session.chat import ChatSession
from cpuchat.session.conversation import Conversation
from cpuchat.tui.downloading import Downloading, Opener, Quantizing, open_downloads
from cpuchat.tui.navigation import Navigator

if TYPE_CHECKING:
    from cpuchat.compare.comparison import Comparison
    from cpuchat.hardware.monitor import Monitor
    from cpuchat.models.hub.client import Hub
    from cpuchat.telemetry.machine import MachineSample
    from cpuchat.tools.config import ToolServerConfig


MonitorOpener = Callable[[], "Monitor"]
T = TypeVar("T")


def open_monitor() -> Monitor:
    """Open the machine's counters. Blocks for some milliseconds."""
    from cpuchat.hardware.monitor import Monitor
    from cpuchat.hardware.topology import read_topology

    return Monitor(read_topology())


class MachineWatch:
    """Samples the counters for all screens: two readers of the same events would take them from each other.

    Use from one event loop. Counters are opened and read in threads, so a slow kernel blocks no key; the first calls
    return None."""

    def __init__(self, opener: MonitorOpener = open_monitor) -> None:
        self._opener = opener
        self._reading: asyncio.Task[None] | None = None
        self._monitor: Monitor | None = None
        self._newest: MachineSample | None = None
        self._failed = False

    def sample(self) -> MachineSample | None:
        """Return the newest figures, None while there are none."""
        if self._reading is None and not self._failed:
            self._reading = asyncio.ensure_future(self._read(self._monitor))
        return self._newest

    async def _read(self, monitor: Monitor | None) -> None:
        sample: MachineSample | None = None
        with suppress(Exception):  # a machine that cannot be read has no counters
            monitor = monitor or await run_in_daemon_thread(self._opener)
            sample = await run_in_daemon_thread(monitor.sample)
        if self._reading is asyncio.current_task():
            self._reading, self._monitor, self._failed = None, monitor, sample is None
            self._newest = sample or self._newest
        elif monitor is not None:
            monitor.close()  # it comes too late

    def close(self) -> None:
        """Close the counters; `sample` opens them again."""
        if self._reading is None and self._monitor is not None:
            self._monitor.close()
        self._reading = self._monitor = self._newest = None
        self._failed = False


class Services:
    """Use from the app's event loop."""

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
        self.session = ChatSession(conversation)
        self.navigation = Navigator(app, self)
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
        self.models_order = "name"
        """How the list of models is sorted in this run."""
        self.comparison: Comparison | None = None
        """The one on the screen."""
        self.on_input: Callable[[], None] = lambda: None
        """Called at each key, paste, click and turn of the wheel: what runs while the app is idle gives way."""
        self.show_theme: Callable[[str], None] = lambda name: None
        """Shows the theme that a name in the settings means."""
        self.keys_held: Callable[[], AbstractContextManager[None]] = nullcontext
        """Inside, what is typed waits for what is being opened."""
        self.keymap: dict[str, str] = {}
        """Keys that the user moved, by action."""
        self.describe_machine = welcome
        """Describes the machine for an empty chat. Slow: call it in a thread."""
        self.tool_servers: Mapping[str, ToolServerConfig | SettingsError] = {}
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

    async def ask_hub(self, question: Callable[[], T]) -> T:
        """Run `question`, which asks the hub, in a thread, and remember whether that was reached. Raises as it does."""
        try:
            found = await run_in_daemon_thread(question)
        except CpuchatError as error:
            self.downloading.hub_problem = error.message if isinstance(error, HubOffline) else ""
            raise
        self.downloading.hub_problem = ""
        return found

    @property
    def settings(self) -> Settings:
        return self.conversation.settings

    @property
    def loaded(self) -> Source | None:
        """Return the loaded model: its file, or its server and name."""
        return self.session.loaded_source

    @property
    def loaded_path(self) -> Path | None:
        """Return the file of the loaded model; None also for one on a server."""
        return loaded if isinstance(loaded := self.loaded, Path) else None

    def set_folders(self, folders: list[str]) -> None:
        self.library = self.conversation.library = Library(folders)

    def save_settings(self, changes: Changes) -> None:
        """Write some settings in the background; a failure is shown, not raised."""

        async def save() -> None:
            async with self._saving:
                try:
                    self.conversation.settings = await self.write_settings(changes)
                except CpuchatError as error:
                    self._tell_unsaved(str(error))

        self._app.run_worker(save(), group="settings", name="settings")

    async def write_settings(self, changes: Changes, *, saved: str = "") -> Settings:
        """Write some settings, say `saved`, and return all with them. Where the file cannot be written, they hold for
        this run, which is said, unless chats are not saved either: that was said. Raises SettingsError."""
        try:
            await asyncio.to_thread(settings.update, changes)
            self.setting_sources.saved(changes)
            if saved:
                self._app.notify(saved)
        except OSError as error:
            if self.conversation.history.store.unsaved is None:
                where = f"{paths.shown(Path(error.filename).parent)}: " if error.filename else ""  # none on a full disk
                self._tell_unsaved(f"{where}{error.strerror}. It holds until you quit.")
        return with_changes(self.settings, changes)

    def _tell_unsaved(self, text: str) -> None:
        self._app.notify(text, title="Settings not saved", severity="warning", timeout=10, markup=False)

    def use_draft_model(self, target: Path, wanted: str) -> None:
        """Make `wanted` (the path of a file, "auto" or "none") the draft model of `target` from its next load on.

        One that the settings have for all models no longer counts. Drafting with a model is turned on if the settings
        have it off."""
        from cpuchat.models.drafts.choice import NO_DRAFT, ChosenDrafts

        ChosenDrafts().put(target, wanted)
        section, changes = self.settings.speculation, dict[str, Any]()
        if section.draft_model:
            changes["draft_model"] = ""
        if wanted != NO_DRAFT and section.drafters not in ("auto", "draft"):
            changes["drafters"] = "auto"
        if changes:
            self.conversation.settings = with_changes(self.settings, {"speculation": changes})
            self.save_settings({"speculation": changes})

    def kill_workers(self) -> None:
        """Kill every worker; what is unsaved is lost."""
        for one in self.conversations:
            one.backend.kill()

    @property
    def conversations(self) -> tuple[Conversation, ...]:
        """Return the conversations in use: of the chat and of a comparison's sides."""
        return self.conversation, *(self.comparison.conversations if self.comparison is not None else ())

    async def close_comparison(self) -> None:
        """End its workers."""
        comparison, self.comparison = self.comparison, None
        if comparison is not None:
            await comparison.close()

    async def close_conversation(self) -> None:
        """Close the conversation, after pending settings are written."""
        async with self._saving:
            await self.conversation.close()


@dataclass(frozen=True)
class Pace:
    """Seconds between two drawings of text that is being written, and of the figures."""

    text: float
    figures: float

    @property
    def interval(self) -> float:
        """Return the shortest time between two drawings of text: what comes a little early does not wait."""
        return 0.8 * self.text


SPARE = Pace(text=0.1, figures=0.25)
# While every core computes, what the UI takes is taken from the model, and more: all threads wait for the one that was
# interrupted. Measured, 8 % of a core cost 6 to 9 % of the tokens on two cores (benchmarks/README.md).
CROWDED = Pace(text=1 / 3, figures=1.0)


def pace_beside_model(model: ModelInfo | None) -> Pace:
    """Return the pace beside a loaded model; a server on this machine may take every core."""
    if model is None:
        return SPARE
    return CROWDED if computes_here(model.path) else pace_beside(model.n_threads)


def pace_beside(n_threads: int) -> Pace:
    """Return the pace beside so many compute threads: slower if they take every core."""
    return CROWDED if n_threads >= len(own_cpus()) else SPARE
