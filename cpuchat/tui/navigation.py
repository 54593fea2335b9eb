"""Opens screens by name, so that no screen imports another. Each is imported on first use."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from textual.app import App
from textual.screen import Screen

if TYPE_CHECKING:
    from cpuchat.compare.comparison import Opened, Sides
    from cpuchat.compare.runner import Side
    from cpuchat.config.servers import Source
    from cpuchat.config.settings import Settings
    from cpuchat.models.library.places import LocalModel


class Navigator:
    """Opens the screens of `app`, which get `services` (`Services`, whose module imports this one). Those that return
    something are awaited in a worker, until the screen closes; None when nothing was chosen."""

    def __init__(self, app: App[Any], services: Any) -> None:
        self._app = app
        self._services = services

    async def models(self, *, best: Path | None = None, at_downloads: bool = False) -> Source | Sides | None:
        """Returns the model to load, or two to compare. `best` is selected while the demo is loaded; `at_downloads`:
        the download that came last is."""
        return await self._result("models.screen.ModelsScreen", self._services, best=best, at_downloads=at_downloads)

    async def repository(self, repo: str, quantization: str = "") -> Path | None:
        """Returns the model to load."""
        return await self._result("models.repository.RepositoryScreen", self._services, repo, quantization=quantization)

    async def draft_models(self, model: LocalModel) -> Path | None:
        """Returns the file of `model` when it is to be loaded, or loaded again."""
        return await self._result("models.drafts.DraftModelsScreen", self._services, model)

    async def quantize(self, model: LocalModel) -> Path | None:
        """Returns the new file if it was written meanwhile."""
        return await self._result("models.quantize.QuantizeScreen", self._services, model)

    async def settings(self, first: str = "") -> Settings | None:
        """Returns the settings if they were saved. `first`: the one to show."""
        return await self._result("settings.SettingsScreen", self._services, self._app.available_themes, first)

    async def chat_options(self) -> dict[str, bool] | None:
        """Returns the MCP servers to start (True) and to end, if the options were saved."""
        return await self._result("chat.options.ChatOptionsScreen", self._services)

    async def read_chat(self, opened: Any, message_id: int) -> bool | None:
        """Returns True when the chat, as of `ChatHistory.read`, is to be opened."""
        return await self._result("chat.reading.ReadingScreen", self._services, opened, message_id)

    def hardware(self) -> None:
        self._app.push_screen(self._screen("hardware.screen.HardwareScreen", self._services))

    async def compare(self, sides: Sides, prompt: str = "", kept: Opened | None = None) -> Path | None:
        """`kept`: one that was saved, to continue. Returns the file to use for chats, if one was chosen."""
        return await self._result("compare.screen.CompareScreen", self._services, sides, prompt, kept)

    async def compare_with(self, model: Path) -> Side | None:
        """Returns what to compare the model with."""
        return await self._result("compare.pane.OtherSideScreen", self._services, model)

    async def replay(self, name: str) -> str | None:
        """Replay a recording; returns the action of the chat that is to follow. Raises RecordingError."""
        return await self._result("compare.replay.ReplayScreen", name)

    async def _result(self, where: str, *arguments: object, **more: object) -> Any:
        return await self._app.push_screen_wait(self._screen(where, *arguments, **more))

    def _screen(self, where: str, *arguments: object, **more: object) -> Screen[Any]:
        """Return a screen: its class with its module in this package."""
        module, _, name = where.rpartition(".")
        return getattr(import_module(f"cpuchat.tui.{module}"), name)(*arguments, **more)
