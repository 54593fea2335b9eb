"""Measures what a draft model gains for the loaded model, and asks whether to use it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from textual import work
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
    from cpuchat.bench.pair import PairResult
    from cpuchat.bench.run import Bench

_RIGHT = (1, 2, 3, 4, 5, 6)


class MeasurePairScreen(Dismissable[int | None], ModalScreen[int | None]):
    """Returns the draft depth to use (0: adaptive) if the draft model is to be used, else None.

    A separate worker process measures; the loaded model stays loaded.
    """

    CSS_PATH = "measure.tcss"
    BINDINGS: ClassVar[list[BindingType]] = keys.bindings("measure_pair")

    def __init__(self, services: Services, target: Path, draft: Path) -> None:
        super().__init__()
        self._services = services
        self._target, self._draft = target, draft
        self._bench: Bench | None = None
        self.result: PairResult | None = None

    def compose(self) -> ComposeResult:
        with Vertical(id="dialog") as dialog:
            dialog.border_title = Content(clean_line(f"{self._draft.stem} drafting for {self._target.stem}"))
            dialog.border_subtitle = "Esc stops"
            yield Label("Starting…", id="figures", markup=False)

    def on_mount(self) -> None:
        self._measure()

    @work(exclusive=True)
    async def _measure(self) -> None:
        from cpuchat.bench.pair import pair_bench

        running = self._bench = pair_bench(
            self._target, self._draft, self._services.settings, paths.bench_dir(), self._show
        )
        try:
            await running.run()
        except Interrupted:
            self.dismiss(None)
            return
        except (CpuchatError, OSError) as error:
            self._fail(str(error))
            return
        finally:
            self._bench = None
        self._finish(running)

    def _show(self) -> None:
        """Show the figures so far, and how far the measurement is."""
        from cpuchat.bench.pair import pair_result
        from cpuchat.bench.results import report_of
        from cpuchat.present import bench as words

        running = self._bench
        if running is None or not self.has_widgets:
            return
        rows = words.pair_rows(pair_result(report_of(running.journal, running.failed)))
        lines = table([words.PAIR_HEADINGS, *rows], right=_RIGHT) if rows else []
        progress = running.progress
        bar = words.progress_bar(progress.done, progress.total, progress.seconds_left, progress.what)
        self._write([*lines, "", bar] if lines else [bar])

    def _finish(self, running: Bench) -> None:
        from cpuchat.bench.pair import pair_result
        from cpuchat.bench.results import report_of
        from cpuchat.present import bench as words

        found = pair_result(report_of(running.journal, running.failed))
        if not found.kinds:
            self._fail(next(iter(running.failed.values()), words.pair_verdict(found)))
            return
        self.result = found
        lines = table([words.PAIR_HEADINGS, *words.pair_rows(found)], right=_RIGHT)
        self._write([*lines, "", words.pair_verdict(found)])
        self.query_one("#dialog").border_subtitle = "Enter uses it · Esc closes"

    def _fail(self, problem: str) -> None:
        self._write([f"Not measured. {clean_line(problem)}"])
        self.query_one("#dialog").border_subtitle = "Esc closes"

    def _write(self, lines: list[str]) -> None:
        if self.has_widgets:
            self.query_one("#figures", Label).update("\n".join(lines))

    def action_keep(self) -> None:
        if self.result is not None:
            self.dismiss(self.result.depth)

    async def action_cancel(self) -> None:
        if self._bench is not None:
            self.query_one("#dialog").border_subtitle = "Stopping…"
            await self._bench.stop()
        else:
            self.dismiss(None)
