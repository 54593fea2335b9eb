"""Quantizes a model to a type that the user chooses by size and speed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from textual import on, work
from textual.app import ComposeResult
from textual.content import Content

from cpuchat.base import paths
from cpuchat.base.errors import CpuchatError, QuantizeFailed
from cpuchat.base.text import clean_line
from cpuchat.models.library.places import LocalModel
from cpuchat.models.quantize.make import QuantizeJob
from cpuchat.models.quantize.types import TYPES, QuantType, smaller_types, suggested_folder, suggested_path
from cpuchat.present import models
from cpuchat.present.table import ListRow
from cpuchat.tui.services import Services
from cpuchat.tui.widgets.download_line import QuantizeLine
from cpuchat.tui.widgets.model_list import ModelList, PanesScreen

if TYPE_CHECKING:
    from cpuchat.models.gguf.header import GGUFHeader


USUAL = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "IQ4_XS", "Q3_K_M")
"""Types that most people want, best quality first; the others are folded."""
_BY_NAME = {kind.name: kind for kind in TYPES}


class QuantizeScreen(PanesScreen[Path | None], keys="quantize"):
    """Returns the new file if it is finished while the screen is open, else None: the job continues when the screen is
    closed."""

    def __init__(self, services: Services, model: LocalModel) -> None:
        super().__init__()
        self._services, self._model = services, model
        self.list_title = models.quantize_title(model)
        self._source: GGUFHeader | None = None
        self.predictions: dict[str, models.TypePrediction | str] = {}
        self._unfolded = False
        self._working = False
        self._outcome = ""
        self._made: Path | None = None

    def compose_below(self) -> ComposeResult:
        yield QuantizeLine(self._services.quantizing)

    def on_mount(self) -> None:
        self._show_types()
        self._services.quantizing.changed.subscribe(self, self._work_changed)
        self._work_changed(None)
        self._forecast()

    # What each type would give

    @work(exclusive=True, group="forecast")
    async def _forecast(self) -> None:
        """Forecast type by type; figures fill in."""
        from cpuchat.models.machine import TunedMachine, this_machine
        from cpuchat.models.quantize.types import QuantizeProcess, forecast_type, source_header

        settings, loaded = self._services.settings, self._services.conversation.model
        machine = TunedMachine(settings, await asyncio.to_thread(this_machine, settings, loaded=loaded), loaded)
        try:
            self._source = await source_header(self._model.path)
            self._marked()
            async with QuantizeProcess() as process:
                for kind in self._types:
                    if kind.name in self.predictions:
                        continue
                    try:
                        forecast = await forecast_type(process, self._source, kind)
                    except QuantizeFailed as error:  # its rows have a length that this type cannot hold
                        self.predictions[kind.name] = error.message
                    else:
                        self.predictions[kind.name] = await asyncio.to_thread(
                            models.predict_type, self._source, forecast, machine, self._services.library
                        )
                    self._show_types()
                    done, of = len(self.predictions), len(self._types)
                    progress = f"Computing sizes and speeds · {done} of {of}" if done < of else ""
                    self._say(self._outcome or progress)
        except CpuchatError as error:
            self._say(error.message)
            self.notify(clean_line(str(error)), severity="error", timeout=10, markup=False)

    @property
    def _types(self) -> list[QuantType]:
        """Return the listed types: those that make the file smaller."""
        return [kind for kind in smaller_types(self._model) if self._unfolded or kind.name in USUAL]

    def _show_types(self) -> None:
        listed, best = self.listed, models.recommended(self.predictions, USUAL, self._model.size)
        rows = [models.quantize_row(kind, self.predictions) for kind in self._types]
        rows = [replace(row, mark="★", name=f"{row.key} · recommended") if row.key == best else row for row in rows]
        if folded := len(smaller_types(self._model)) - len(self._types):
            rows.append(ListRow(models.MORE, "▸", f"{folded} more types", note="Enter shows them"))
        listed.show(rows, listed.marked if listed.moved or not best else best)

    @property
    def _kind(self) -> QuantType | None:
        return _BY_NAME.get(self.marked_key)

    @on(ModelList.Marked)
    def _marked(self) -> None:
        if (kind := self._kind) is None:
            self.show_details([("types", "older, smaller and special-purpose types")], "More types")
            return
        prediction = self.predictions.get(kind.name)
        rows = models.quantize_details(kind, prediction, self._model.size)
        if (out := self._out(kind)) is not None:
            rows.insert(0, ("writes", paths.shown(out)))
        self.show_details(rows, kind.name)

    def _out(self, kind: QuantType) -> Path | None:
        """Return the file to write; None until the header of the source is read."""
        if self._source is None:
            return None
        return suggested_path(self._source, kind, suggested_folder(self._model.path, self._services.library))

    # Making it

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Offer quantizing or, while a job runs, stopping that: one at a time."""
        busy = self._services.quantizing.job is not None
        return not (action == "make" and busy) and not (action == "stop" and not busy)

    @on(ModelList.Chosen)
    @work(exclusive=True, group="ask")
    async def action_make(self) -> None:
        """Ask the necessary questions, then start the job."""
        if (kind := self._kind) is None:
            self._unfolded = True
            self._show_types()
            self.listed.mark(next(kind.name for kind in self._types if kind.name not in USUAL))
            self._forecast()
            return
        found, out = self.predictions.get(kind.name), self._out(kind)
        if isinstance(found, str):
            self.warn(found)
            return
        if found is None or out is None:
            self.notify(f"The size of {kind.name} is still being computed. Press Enter again when it is shown.")
            return
        forecast = found.forecast
        again = f"Already quantized ({', '.join(forecast.lossy)}). Requantizing loses quality a second time."
        if forecast.lossy and not await self.confirm("Requantize", again, "Requantize"):
            return
        exists = out.exists()
        if exists and not await self.confirm("Replace file", clean_line(f"{out} exists."), "Replace"):
            return
        if self._services.quantizing.job is None:
            self._services.quantizing.start(
                QuantizeJob(source=self._model.path, out=out, type=kind, requantize=bool(forecast.lossy), force=exists)
            )

    def _work_changed(self, made: Path | None) -> None:
        now = self._services.quantizing
        before, self._working = self._working, now.job is not None
        if self._working != before:
            self._outcome = now.outcome
            self._say(self._outcome)
            self.refresh_bindings()
        if made is not None:
            self._made = made
            self.on_screen_resume()

    @work(exclusive=True, group="ask")
    async def action_stop(self) -> None:
        if await self.confirm("Stop", "The partial file will be deleted.", "Stop", "Continue"):
            self._services.quantizing.stop()

    def _say(self, text: str) -> None:
        self.query_one("#list").border_subtitle = Content(clean_line(text))

    def on_screen_resume(self) -> None:
        """Return the finished file, unless a dialog is open above."""
        if self._made is not None and self.is_active:
            self.dismiss(self._made)
