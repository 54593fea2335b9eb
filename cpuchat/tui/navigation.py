"""Opens screens by name, so that no screen imports another. Each is imported on first use."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from textual.app import App
from textual.screen import Screen

from cpuchat.config.servers import Source
from cpuchat.config.settings import Settings
from cpuchat.tui.services import Services

if TYPE_CHECKING:
    from cpuchat.compare.comparison import Opened, Sides
    from cpuchat.compare.runner import Side
    from cpuchat.models.library.places import LocalModel

T = TypeVar("T")


class Navigator:
    """The app's `services.Navigation`."""

    def __init__(self, app: App[Any], services: Services) -> None:
        self._app = app
        self._services = services

    async def result_of(self, screen: Screen[T]) -> T | None:
        """Show a screen until it closes."""
        return await self._app.push_screen_wait(screen)

    def show(self, screen: Screen[Any]) -> None:
        self._app.push_screen(screen)

    async def models(self) -> Source | None:
        from cpuchat.tui.models.screen import ModelsScreen

        return await self.result_of(ModelsScreen(self._services))

    async def repository(self, repo: str, quantization: str = "") -> Path | None:
        from cpuchat.tui.models.repository import RepositoryScreen

        return await self.result_of(RepositoryScreen(self._services, repo, quantization=quantization))

    async def downloads(self) -> Path | None:
        from cpuchat.tui.models.downloads import DownloadsScreen

        return await self.result_of(DownloadsScreen(self._services))

    async def draft_models(self) -> Path | None:
        from cpuchat.tui.models.drafts import DraftModelsScreen

        return await self.result_of(DraftModelsScreen(self._services))

    async def quantize(self, model: LocalModel) -> Path | None:
        from cpuchat.tui.models.quantize import QuantizeScreen

        return await self.result_of(QuantizeScreen(self._services, model))

    async def tune(self, model: Path) -> Path | None:
        from cpuchat.tui.models.quantize import TuneScreen

        if self._services.session.busy:
            self._app.notify("Tune when the answer is done (Esc in the chat stops it).", severity="warning")
            return None
        return await self.result_of(TuneScreen(self._services, model))

    async def settings(self) -> Settings | None:
        from cpuchat.tui.settings import SettingsScreen

        return await self.result_of(SettingsScreen(self._services, self._app.available_themes))

    def hardware(self) -> None:
        from cpuchat.tui.hardware.screen import HardwareScreen

        self.show(HardwareScreen(self._services))

    def plan(self) -> None:
        from cpuchat.tui.plan import PlanScreen

        if not isinstance(self._app.screen, PlanScreen):
            self.show(PlanScreen(self._services))

    async def compare(self, sides: Sides, prompt: str = "", kept: Opened | None = None) -> None:
        from cpuchat.tui.compare.screen import CompareScreen

        await self.result_of(CompareScreen(self._services, sides, prompt, kept))

    async def replay(self, name: str) -> bool:
        """Replay a recording; True when the user wants to open a model then. Raises RecordingError."""
        from cpuchat.tui.compare.replay import ReplayScreen

        return bool(await self.result_of(ReplayScreen(name)))

    async def compare_with(self, model: Path) -> Side | None:
        from cpuchat.tui.compare.pane import OtherSideScreen

        return await self.result_of(OtherSideScreen(self._services, model))
