"""Tunes the settings for a model: runs in the place of the chat's answers, with the chat's model unloaded meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Label

from cpuchat import paths
from cpuchat.errors import CpuchatError, Interrupted
from cpuchat.present.table import table
from cpuchat.text import clean_line
from cpuchat.tui import keys
from cpuchat.tui.services import Services
from cpuchat.tui.widgets.dismissable import Dismissable

if TYPE_CHECKING:
    from cpuchat.tune.result import ChoiceResult, TuneResult
    from cpuchat.tune.tuner import Tuner

_CLOCK_SECONDS = 1.0


class TuneScreen(Dismissable[Path | None], ModalScreen[Path | None]):
    """Returns the model that was loaded before and has to be loaded again; None if there was none.

    `result` is None until it is done.
    """

    CSS_PATH = "tune.tcss"
    BINDINGS: ClassVar[list[BindingType]] = keys.bindings("tune")

    def __init__(self, services: Services, model: Path) -> None:
        super().__init__()
        self._services, self._model = services, model
        self._loaded = services.loaded_path
        self._tuner: Tuner | None = None
        self._stopped = False
        self.result: TuneResult | None = None
        self.done = False

    def compose(self) -> ComposeResult:
        with Vertical(id="dialog") as dialog:
            dialog.border_title = Content(clean_line(f"Tune {self._model.stem}"))
            dialog.border_subtitle = "Esc stops (keeps what was adopted)"
            yield Label("Starting…", id="figures", markup=False)

    def on_mount(self) -> None:
        self.set_interval(_CLOCK_SECONDS, self._show)
        self._services.chat.run_detached(self._run(), self._leave)

    def _leave(self) -> None:
        self._stopped = True
        if self._tuner is not None:
            self._tuner.kill()

    async def _run(self) -> None:
        from cpuchat.chats.token_counts import token_counts
        from cpuchat.tune.result import DEFAULT_PROMPT_SHARE, prompt_share_of
        from cpuchat.tune.tuner import Tuner

        services = self._services
        try:
            share = prompt_share_of(*await asyncio.to_thread(token_counts, paths.chats_db()))
            tuner = self._tuner = Tuner(
                self._model,
                services.settings,
                prompt_share=DEFAULT_PROMPT_SHARE if share is None else share,
                library=services.library,
                tell=self._show,
            )
            self._require_running()
            await services.conversation.backend.unload()  # it would take memory, and time now and then
            self._require_running()
            self.result = await tuner.run()
        except Interrupted:
            self._write(["Stopped; nothing was changed."])
        except (CpuchatError, OSError) as error:
            self._write([f"Not tuned. {clean_line(str(error))}"])
        finally:
            self._tuner, self.done = None, True
        if self.has_widgets:
            self._finish()

    def _require_running(self) -> None:
        if self._stopped:
            raise Interrupted("Stopped.")

    def _show(self) -> None:
        """Show the choices made so far, and how far it is."""
        if self._tuner is None or not self.has_widgets:
            return
        progress = self._tuner.progress
        now = f"{self._tuner.seconds:.0f} of at most {progress.limit:.0f} s · {progress.what}"
        lines = self._table(progress.choices)
        self._write([*lines, "", now] if lines else [now])

    def _table(self, choices: Iterable[ChoiceResult]) -> list[str]:
        from cpuchat.tune import report

        rows = [report.tuning_row(one) for one in choices]
        width = self.query_one("#figures").content_size.width
        return table([report.TUNING_HEADINGS, *rows], report.TUNING_RIGHT, width) if rows else []

    def _finish(self) -> None:
        from cpuchat.tune import report

        self.query_one("#dialog").border_subtitle = "Esc closes"
        if self.result is not None:
            summary = report.tuning_summary(self.result, undo="F8 in the settings (F2) reverts")
            self._write([*self._table(self.result.choices), "", *summary])

    def _write(self, lines: list[str]) -> None:
        if self.has_widgets:
            self.query_one("#figures", Label).update("\n".join(lines))

    async def interrupt(self) -> bool:
        """Stop on Ctrl+C; False when it is done."""
        if self.done:
            return False
        self._stopped = True
        self.query_one("#dialog").border_subtitle = "Stopping…"
        if self._tuner is not None:
            await self._tuner.stop()
        return True

    async def action_close(self) -> None:
        if not await self.interrupt():
            self.dismiss(self._loaded)
