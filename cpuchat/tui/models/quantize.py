"""Quantizes a model: choose a type, see size and speed, watch the progress."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual import on, work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.widgets import Input, Static

from cpuchat import paths
from cpuchat.errors import CpuchatError, QuantizeFailed
from cpuchat.models.library.model import LocalModel
from cpuchat.models.quantize.make import Job
from cpuchat.models.quantize.place import suggested_folder, suggested_path
from cpuchat.models.quantize.types import TYPES, QuantType, smaller_types
from cpuchat.present import quantize
from cpuchat.present.rows import ListRow
from cpuchat.text import clean_line
from cpuchat.tui import keys
from cpuchat.tui.services import Services
from cpuchat.tui.widgets.dialogs import ConfirmScreen
from cpuchat.tui.widgets.key_footer import KeyFooter
from cpuchat.tui.widgets.labelled import Labelled
from cpuchat.tui.widgets.list_screen import ListScreen
from cpuchat.tui.widgets.model_list import ModelList
from cpuchat.tui.widgets.quantize_line import QuantizeLine

if TYPE_CHECKING:
    from cpuchat.models.gguf.header import GGUFHeader

USUAL = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "IQ4_XS", "Q3_K_M")
"""Types that most people want, best quality first; the others are folded."""
_MORE, _ORIGINAL = "more", "original"
_BY_NAME = {kind.name: kind for kind in TYPES}


class QuantizeScreen(ListScreen[Path | None]):
    """Returns the new file if it is finished while the screen is open, else None: the job continues when the screen is
    closed.

    The box with the file's name keeps the focus; the keys of the list work beside it.
    """

    CSS_PATH = "quantize.tcss"
    AUTO_FOCUS = "#out"
    BINDINGS: ClassVar[list[BindingType]] = keys.bindings("quantize")

    def __init__(self, services: Services, model: LocalModel) -> None:
        super().__init__()
        self._services = services
        self._model = model
        self._source: GGUFHeader | None = None
        self._predictions: dict[str, quantize.TypePrediction | str] = {}
        self._suggested = ""
        self._unfolded = False
        self._repo = model.repo
        self._working = False
        self._outcome = ""
        self._made: Path | None = None

    def compose(self) -> ComposeResult:
        with Horizontal(id="panes"):
            with Vertical(id="list") as pane:
                pane.border_title = Content(quantize.title(self._model))
                yield ModelList(id="types")
            with Vertical(id="about"):
                yield Labelled(id="details")
        with Vertical(id="target") as target:
            target.border_title = "Write to"
            yield Input(id="out", compact=True)
        yield Static(id="state", markup=False)
        yield QuantizeLine(self._services.quantizing)
        yield KeyFooter()

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
        from cpuchat.models.quantize.forecast import forecast_type, source_header
        from cpuchat.models.quantize.process import QuantizeProcess

        settings, loaded = self._services.settings, self._services.conversation.model
        machine = await asyncio.to_thread(this_machine, settings, loaded=loaded)
        self._repo = self._repo or await asyncio.to_thread(_repository, self._model)
        self._show_types()
        try:
            self._source = await source_header(self._model.path)
            self._suggest()
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
                        quantize.predict_type, self._source, forecast, machine, settings.load_options()
                    )
                    self._forecast_done(kind, found)
        except CpuchatError as error:
            self._say(error.message)
            self._warn(error)

    def _forecast_done(self, kind: QuantType, found: quantize.TypePrediction | str) -> None:
        self._predictions[kind.name] = found
        self._show_types()
        done, of = len(self._predictions), len(self._types)
        self._say(
            self._outcome or (quantize.forecast_progress(done, of) if done < of else quantize.requantizing(self._model))
        )

    @property
    def _types(self) -> list[QuantType]:
        """Return the listed types: those that make the file smaller."""
        smaller = smaller_types(self._model)
        return [kind for kind in smaller if self._unfolded or kind.name in USUAL]

    def _show_types(self) -> None:
        listed = self.query_one(ModelList)
        best = self._recommended
        rows = [quantize.row(kind, self._predictions.get(kind.name)) for kind in self._types]
        rows = [replace(row, mark="★", name=f"{row.key} · recommended") if row.key == best else row for row in rows]
        if self._leads_to_original:
            rows.insert(0, quantize.original_row(_ORIGINAL, self._repo))
        folded = len(smaller_types(self._model)) - len(self._types)
        if folded:
            rows.append(ListRow(_MORE, "▸", f"{folded} more types", note="Enter shows them"))
        listed.show(rows, listed.marked if listed.moved or not best else best)

    @property
    def _recommended(self) -> str:
        return quantize.recommended(self._predictions, USUAL, self._model.size)

    @property
    def _leads_to_original(self) -> bool:
        return bool(self._repo and quantize.requantizing(self._model))

    @property
    def _kind(self) -> QuantType | None:
        """Return the selected type."""
        return _BY_NAME.get(self.query_one(ModelList).marked)

    @on(ModelList.Marked)
    def _marked(self) -> None:
        kind = self._kind
        more = self.query_one(ModelList).marked == _MORE
        self.query_one("#about").border_title = kind.name if kind else "More types" if more else "The original"
        if kind is None and not more:
            advice = [("advice", quantize.requantizing(self._model)), ("repository", clean_line(self._repo))]
            self.query_one(Labelled).show([*advice, ("Enter", "shows its files")])
            return
        if kind is None:
            self.query_one(Labelled).show([("types", "older, smaller and special-purpose types")])
            return
        found = self._predictions.get(kind.name)
        rows = quantize.details(kind, found, self._model.size)
        if kind.name == self._recommended and isinstance(found, quantize.TypePrediction):
            rows.insert(0, ("recommended", quantize.why_recommended(found)))
        self.query_one(Labelled).show(rows)
        self._suggest()

    def _suggest(self) -> None:
        """Name the file after the marked type, unless the user has named it."""
        box = self.query_one("#out", Input)
        if self._source is None or self._kind is None or box.value != self._suggested:
            return
        folder = suggested_folder(self._model.path, self._services.library)
        self._suggested = paths.shown(suggested_path(self._source, self._kind, folder))
        box.value = self._suggested

    # Making it

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Disable quantizing while a job runs: one at a time."""
        busy = self._services.quantizing.job is not None
        return None if (action == "make" and busy) or (action == "stop" and not busy) else True

    @on(ModelList.Chosen)
    @work(exclusive=True, group="ask")
    async def action_make(self) -> None:
        """Ask the necessary questions, then start the job."""
        kind = self._kind
        if self.query_one(ModelList).marked == _ORIGINAL:
            await self._services.navigation.repository(self._repo)
            self.dismiss(None)
            return
        if kind is None:
            self._unfold()
            return
        found, out = self._predictions.get(kind.name), self._out()
        if isinstance(found, str):
            self.notify(clean_line(found), severity="warning", markup=False)
            return
        if found is None or out is None:
            return
        forecast = found.forecast
        if forecast.needs_imatrix:
            self.notify(f"{kind.name} needs an importance matrix: use `cpuchat models quantize --imatrix FILE`.",
                        severity="warning", markup=False)  # fmt: skip
            return
        again = f"Already quantized ({', '.join(forecast.lossy)}). Requantizing loses quality a second time."
        if forecast.lossy and not await self._sure("Requantize", again, "Requantize"):
            return
        exists = out.exists()
        if exists and not await self._sure("Replace file", f"{out} exists.", "Replace"):
            return
        if self._services.quantizing.job is None:
            self._services.quantizing.start(
                Job(source=self._model.path, out=out, type=kind, requantize=bool(forecast.lossy), force=exists)
            )

    def _unfold(self) -> None:
        """List all types, and stay where the selection was."""
        self._unfolded = True
        self._show_types()
        self.query_one(ModelList).mark(next(kind.name for kind in self._types if kind.name not in USUAL))
        self._forecast()

    async def _sure(self, title: str, question: str, yes: str, no: str = "Cancel") -> bool:
        return await self.app.push_screen_wait(ConfirmScreen(title, clean_line(question), yes, no))

    def _out(self) -> Path | None:
        """Return the named file; None, with a message to the user, if it is not valid."""
        text, problem = self.query_one("#out", Input).value.strip(), ""
        try:
            named = paths.expanded(text)
            out = named.absolute()
            out.exists()
            if str(named).startswith("~"):
                problem = f"Cannot write there: no home folder for {named.parts[0]}."
            elif out.suffix.lower() != ".gguf":
                problem = "The name must end in .gguf."
            elif clean_line(text) != text:
                problem = "The name contains unprintable characters."
        except OSError as error:  # too long
            problem = f"Cannot write there: {error.strerror}."
        if problem:
            self.notify(clean_line(problem), severity="warning", markup=False)
        return None if problem else out

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
        if await self._sure("Stop", "The partial file will be deleted.", "Stop", "Continue"):
            self._services.quantizing.stop()

    def _say(self, text: str) -> None:
        line = Text(clean_line(text), no_wrap=True, overflow="ellipsis")
        for state in self.query("#state").results(Static):  # none when the screen was closed while it forecast
            state.update(line, layout=False)

    def _warn(self, error: CpuchatError) -> None:
        self.notify(clean_line(str(error)), severity="error", timeout=10, markup=False)

    # Leaving

    def on_screen_resume(self) -> None:
        self._leave_if_made()

    def _leave_if_made(self) -> None:
        """Return the finished file, unless a dialog is open above."""
        if self._made is not None and self.is_active:
            self.dismiss(self._made)


def _repository(model: LocalModel) -> str:
    """Return the repository that the catalog has for a model; "" for none."""
    from cpuchat.models.catalog import load_catalog, match_local

    entry = match_local(load_catalog(), model)
    return entry.repos[0] if entry is not None else ""
