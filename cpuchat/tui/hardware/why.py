"""The proofs of the hardware screen: each setting of the loaded model, whether it works, and what it is worth."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

from rich.console import Group
from rich.table import Table
from rich.text import Text
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import Static

from cpuchat.base.errors import CpuchatError, Interrupted
from cpuchat.base.text import clean_line
from cpuchat.present import why
from cpuchat.tui.services import Services
from cpuchat.tui.widgets.dialogs import Dismissable
from cpuchat.tui.widgets.key_footer import KeyFooter

if TYPE_CHECKING:
    from cpuchat.bench.why import Environment, SettingFacts, SettingProof, Worth
    from cpuchat.protocol.model_info import ModelInfo
    from cpuchat.tune.worth import WorthMeasurer

_MARKS: Final = {"works": "✓", "fails": "✗", "unknown": "?"}
_WIDE, _MEDIUM = 110, 72  # cells; below these the worth, then also the proof stands under the setting


class ProofTable(Static):
    """A setting after the other: mark, name, value, proof, worth."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"proof--works", "proof--fails", "proof--dim"}
    DEFAULT_CSS = """
    ProofTable {
        & > .proof--works { color: $accent; }
        & > .proof--fails { color: $problem; text-style: bold; }
        & > .proof--dim { color: $hint; }
    }
    """

    def show(self, rows: list[SettingProof], worths: dict[str, Worth]) -> None:
        works, fails, dim = (
            self.get_component_rich_style(f"proof--{name}", partial=True) for name in ("works", "fails", "dim")
        )
        styles = {"works": works, "fails": fails}
        width = self.size.width
        beside = 0 if width < _MEDIUM else 1 if width < _WIDE or not worths else 2  # of proof and worth
        table = Table.grid(padding=(0, 2, 0, 0), expand=True)
        for ratio in (None, None, *(((None, 3, 2)[: 1 + beside]) if beside else (1,))):
            table.add_column(ratio=ratio, overflow="fold", no_wrap=ratio is None)
        for row in rows:
            style = styles.get(row.state, dim)
            texts = Text(row.proof, style), Text(why.worth_words(worths.get(row.name)), dim)
            table.add_row(
                Text(_MARKS.get(row.state, "·"), style), Text(row.name, dim), Text(row.value), *texts[:beside]
            )
            for below in filter(None, texts[beside:]):
                table.add_row("", "", *([""] if beside else []), below)
        self.update(Group(table, Text(f"\n{why.NOTE}", dim)) if worths else table)


class WhyScreen(Dismissable[None], keys="why"):
    """Lets the loaded model answer a few tokens, and shows what its worker's process tells of each setting.

    Measuring takes the place of the loaded model, which is loaded again when this screen closes.
    """

    CSS_PATH = "hardware.tcss"

    def __init__(self, services: Services, model: ModelInfo) -> None:
        super().__init__()
        self._services, self._model = services, model
        self._found: tuple[SettingFacts, Environment] | None = None
        self._rows: list[SettingProof] = []
        self._worths: dict[str, Worth] = {}
        self._measurer: WorthMeasurer | None = None
        self._unloaded = False

    def compose(self) -> ComposeResult:
        with VerticalScroll(id="proofs") as pane:
            pane.border_title = f"Proofs · {clean_line(self._model.name or Path(self._model.path).stem)}"
            pane.border_subtitle = "Letting the model answer a few tokens…"
            yield ProofTable()
        yield KeyFooter()

    def on_mount(self) -> None:
        self._services.session.measure(self._prove(), lambda: None)

    def on_resize(self) -> None:
        self.call_after_refresh(self._show)

    def _tell(self, words: str) -> None:
        if self.has_widgets:
            self.query_one("#proofs").border_subtitle = clean_line(words)

    def _show(self) -> None:
        if self.has_widgets:
            self.query_one(ProofTable).show(self._rows, self._worths)

    async def _prove(self) -> None:
        from cpuchat.bench.why import prove, worth_cache, worth_key

        try:
            facts, environment = self._found = await prove(self._services.conversation)
        except Interrupted:
            return
        except (CpuchatError, OSError) as error:
            self._tell(f"No proofs: {error}")
            return
        self._rows = why.rows(facts)
        self._worths = worth_cache().read().get(worth_key(facts, environment), {})
        self._show()
        n_failed = sum(row.state == "fails" for row in self._rows)
        self._tell("Every setting in use works" if not n_failed else f"{n_failed} of {len(self._rows)} settings fail")
        self.refresh_bindings()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        return True if action != "measure" or (self._found is not None and self._measurer is None) else None

    def action_measure(self) -> None:
        """Measure what each setting is worth; what was measured before is kept."""
        if self._services.session.busy or self._found is None:
            return
        from cpuchat.bench.why import without_effect, worth_key
        from cpuchat.tune.worth import WorthMeasurer

        facts, environment = self._found
        self._measurer = measurer = WorthMeasurer(
            facts, worth_key(facts, environment), without=without_effect(self._rows), tell=self._measured,
        )  # fmt: skip
        self._services.session.measure(self._measure(measurer), measurer.kill)
        self.refresh_bindings()

    def _measured(self, words: str) -> None:
        if self._measurer is not None:
            self._worths = self._measurer.worths
            self._show()
            self._tell(f"{words} · Esc stops")

    async def _measure(self, measurer: WorthMeasurer) -> None:
        said = "Measured"
        try:
            self._unloaded = True
            await self._services.conversation.backend.unload()  # it would take memory, and time now and then
            self._worths = await measurer.run()
            self._show()
            said = "Stopped; m resumes" if measurer.stopped else said
        except Interrupted:
            said = "Stopped; m resumes"
        except (CpuchatError, OSError) as error:
            said = f"Not measured: {error}"
        finally:
            self._measurer = None
        self._tell(said)
        self.refresh_bindings()

    async def action_close(self) -> None:
        if self._measurer is not None:
            self._tell("Stopping…")
            await self._measurer.stop()
            return
        self.dismiss(None)
        if self._unloaded:
            self._services.session.load(Path(self._model.path))
