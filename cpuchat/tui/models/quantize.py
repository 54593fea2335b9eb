"""Makes a model faster: quantizes it to a type that the user chooses by size and speed, or tunes its settings.

Tuning runs in the place of the chat's answers, with the chat's model unloaded meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text
from textual import on, work
from textual.app import ComposeResult
from textual.widgets import Static

from cpuchat.base import paths
from cpuchat.base.errors import CpuchatError, Interrupted, QuantizeFailed
from cpuchat.base.text import clean_line
from cpuchat.models.library.places import LocalModel
from cpuchat.models.quantize.make import QuantizeJob
from cpuchat.models.quantize.types import TYPES, QuantType, smaller_types, suggested_folder, suggested_path
from cpuchat.present import models
from cpuchat.present.table import ListRow, table
from cpuchat.tui.services import Services
from cpuchat.tui.widgets.dialogs import Dialog
from cpuchat.tui.widgets.download_line import QuantizeLine
from cpuchat.tui.widgets.model_list import ModelList, PanesScreen

if TYPE_CHECKING:
    from cpuchat.models.gguf.header import GGUFHeader
    from cpuchat.tune.trial import ChoiceResult, TuneResult
    from cpuchat.tune.tuner import Tuner


USUAL = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "IQ4_XS", "Q3_K_M")
"""Types that most people want, best quality first; the others are folded."""
_MORE = "more"
_BY_NAME = {kind.name: kind for kind in TYPES}


class QuantizeScreen(PanesScreen[Path | None], keys="quantize"):
    """Returns the new file if it is finished while the screen is open, else None: the job continues when the screen is
    closed.
    """

    CSS_PATH = "quantize.tcss"

    def __init__(self, services: Services, model: LocalModel) -> None:
        super().__init__()
        self._services, self._model = services, model
        self.list_title = models.quantize_title(model)
        self._source: GGUFHeader | None = None
        self._predictions: dict[str, models.TypePrediction | str] = {}
        self._unfolded = False
        self._working = False
        self._outcome = ""
        self._made: Path | None = None

    def compose_below(self) -> ComposeResult:
        yield Static(id="state", markup=False)
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
        from cpuchat.models.machine import this_machine
        from cpuchat.models.quantize.types import QuantizeProcess, forecast_type, source_header

        settings, loaded = self._services.settings, self._services.conversation.model
        machine = await asyncio.to_thread(this_machine, settings, loaded=loaded)
        try:
            self._source = await source_header(self._model.path)
            self._marked()
            async with QuantizeProcess() as process:
                for kind in self._types:
                    if kind.name in self._predictions:
                        continue
                    try:
                        forecast = await forecast_type(process, self._source, kind)
                    except QuantizeFailed as error:  # its rows have a length that this type cannot hold
                        self._forecast_done(kind, error.message)
                        continue
                    found = await asyncio.to_thread(
                        models.predict_type, self._source, forecast, machine, settings.load_options()
                    )
                    self._forecast_done(kind, found)
        except CpuchatError as error:
            self._say(error.message)
            self.notify(clean_line(str(error)), severity="error", timeout=10, markup=False)

    def _forecast_done(self, kind: QuantType, found: models.TypePrediction | str) -> None:
        self._predictions[kind.name] = found
        self._show_types()
        done, of = len(self._predictions), len(self._types)
        progress = models.forecast_progress(done, of) if done < of else models.requantizing(self._model)
        self._say(self._outcome or progress)

    @property
    def _types(self) -> list[QuantType]:
        """Return the listed types: those that make the file smaller."""
        return [kind for kind in smaller_types(self._model) if self._unfolded or kind.name in USUAL]

    def _show_types(self) -> None:
        listed, best = self.listed, self._recommended
        rows = [models.quantize_row(kind, self._predictions.get(kind.name)) for kind in self._types]
        rows = [replace(row, mark="★", name=f"{row.key} · recommended") if row.key == best else row for row in rows]
        if folded := len(smaller_types(self._model)) - len(self._types):
            rows.append(ListRow(_MORE, "▸", f"{folded} more types", note="Enter shows them"))
        listed.show(rows, listed.marked if listed.moved or not best else best)

    @property
    def _recommended(self) -> str:
        return models.recommended(self._predictions, USUAL, self._model.size)

    @property
    def _kind(self) -> QuantType | None:
        return _BY_NAME.get(self.marked_key)

    @on(ModelList.Marked)
    def _marked(self) -> None:
        if (kind := self._kind) is None:
            self.show_details([("types", "older, smaller and special-purpose types")], "More types")
            return
        prediction = self._predictions.get(kind.name)
        rows = models.quantize_details(kind, prediction, self._model.size)
        if kind.name == self._recommended and isinstance(prediction, models.TypePrediction):
            rows.insert(0, ("recommended", models.why_recommended(prediction)))
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
        """Disable quantizing while a job runs: one at a time."""
        busy = self._services.quantizing.job is not None
        return None if (action == "make" and busy) or (action == "stop" and not busy) else True

    @on(ModelList.Chosen)
    @work(exclusive=True, group="ask")
    async def action_make(self) -> None:
        """Ask the necessary questions, then start the job."""
        if (kind := self._kind) is None:
            self._unfold()
            return
        found, out = self._predictions.get(kind.name), self._out(kind)
        if isinstance(found, str):
            self.warn(found)
            return
        if found is None or out is None:
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

    def _unfold(self) -> None:
        """List all types, and stay where the selection was."""
        self._unfolded = True
        self._show_types()
        self.listed.mark(next(kind.name for kind in self._types if kind.name not in USUAL))
        self._forecast()

    def _work_changed(self, made: Path | None) -> None:
        """Handle the start, progress or end of the job."""
        now = self._services.quantizing
        before, self._working = self._working, now.job is not None
        if self._working != before:
            self._outcome = now.outcome
            self._say(self._outcome)
            self.query_one("#state").display = not self._working
            self.refresh_bindings()
        if made is not None:
            self._made = made
            self._leave_if_made()

    @work(exclusive=True, group="ask")
    async def action_stop(self) -> None:
        if await self.confirm("Stop", "The partial file will be deleted.", "Stop", "Continue"):
            self._services.quantizing.stop()

    def _say(self, text: str) -> None:
        line = Text(clean_line(text), no_wrap=True, overflow="ellipsis")
        self.query_one("#state", Static).update(line, layout=False)

    # Leaving

    def on_screen_resume(self) -> None:
        self._leave_if_made()

    def _leave_if_made(self) -> None:
        """Return the finished file, unless a dialog is open above."""
        if self._made is not None and self.is_active:
            self.dismiss(self._made)


_CLOCK_SECONDS = 1.0


class TuneScreen(Dialog[Path | None], keys="tune"):
    """Returns the model to load again, the one loaded before; None if there was none. `result`: None until done."""

    def __init__(self, services: Services, model: Path) -> None:
        super().__init__(f"Tune {model.stem}", "Starting…", "Esc stops (keeps what was adopted)")
        self._services, self._model = services, model
        self._loaded = services.loaded_path
        self._tuner: Tuner | None = None
        self._stopped = False
        self.result: TuneResult | None = None
        self.done = False

    def on_mount(self) -> None:
        self.set_interval(_CLOCK_SECONDS, self._show)
        self._services.session.measure(self._run(), self._leave)

    def _leave(self) -> None:
        self._stopped = True
        if self._tuner is not None:
            self._tuner.kill()

    async def _run(self) -> None:
        from cpuchat.chats.history import token_counts
        from cpuchat.tune.trial import DEFAULT_PROMPT_SHARE, prompt_share_of
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
            self.show_text(["Stopped; nothing was changed."])
        except (CpuchatError, OSError) as error:
            self.show_text([f"Not tuned. {clean_line(str(error))}"])
        finally:
            self._tuner, self.done = None, True
        if self.has_widgets:
            self._finish()

    def _require_running(self) -> None:
        if self._stopped:
            raise Interrupted("Stopped.")

    def _show(self) -> None:
        if self._tuner is None or not self.has_widgets:
            return
        progress = self._tuner.progress
        now = f"{self._tuner.seconds:.0f} of at most {progress.limit:.0f} s · {progress.what}"
        lines = self._table(progress.choices)
        self.show_text([*lines, "", now] if lines else [now])

    def _table(self, choices: Iterable[ChoiceResult]) -> list[str]:
        from cpuchat.tune import tuner as report

        rows = [report.tuning_row(one) for one in choices]
        width = self.query_one("#question").content_size.width
        return table([report.TUNING_HEADINGS, *rows], report.TUNING_RIGHT, width) if rows else []

    def _finish(self) -> None:
        from cpuchat.tune import tuner as report

        self.show_hint("Esc closes")
        if self.result is not None:
            summary = report.tuning_summary(self.result, undo="F8 in the settings (F2) reverts")
            self.show_text([*self._table(self.result.choices), "", *summary])

    async def interrupt(self) -> bool:
        """Stop on Ctrl+C; False when it is done."""
        if self.done:
            return False
        self._stopped = True
        self.show_hint("Stopping…")
        if self._tuner is not None:
            await self._tuner.stop()
        return True

    async def action_close(self) -> None:
        if not await self.interrupt():
            self.dismiss(self._loaded)
