"""The proofs of the hardware screen: each setting of the loaded model, and whether it works."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final

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
    from cpuchat.bench.why import SettingProof
    from cpuchat.protocol.model_info import ModelInfo

_MARKS: Final = {"works": "✓", "fails": "✗", "unknown": "?"}
_MEDIUM = 72  # cells; below these the proof stands under the setting


class ProofTable(Static):
    """A setting after the other: mark, name, value, proof."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"proof--works", "proof--fails", "proof--dim"}
    DEFAULT_CSS = """
    ProofTable {
        & > .proof--works { color: $accent; }
        & > .proof--fails { color: $problem; text-style: bold; }
        & > .proof--dim { color: $hint; }
    }
    """

    def show(self, rows: list[SettingProof]) -> None:
        works, fails, dim = (
            self.get_component_rich_style(f"proof--{name}", partial=True) for name in ("works", "fails", "dim")
        )
        styles = {"works": works, "fails": fails}
        beside = self.size.width >= _MEDIUM
        table = Table.grid(padding=(0, 2, 0, 0), expand=True)
        for ratio in (None, None, None, 1) if beside else (None, None, 1):
            table.add_column(ratio=ratio, overflow="fold", no_wrap=ratio is None)
        for row in rows:
            style = styles.get(row.state, dim)
            cells = Text(_MARKS.get(row.state, "·"), style), Text(row.name, dim), Text(row.value)
            proof = Text(row.proof, style)
            if beside:
                table.add_row(*cells, proof)
            else:
                table.add_row(*cells)
                table.add_row("", "", proof)
        self.update(table)


class WhyScreen(Dismissable[None], keys="why"):
    """Lets the loaded model answer a few tokens, and shows what its worker's process tells of each setting."""

    CSS_PATH = "hardware.tcss"

    def __init__(self, services: Services, model: ModelInfo) -> None:
        super().__init__()
        self._services, self._model = services, model
        self._rows: list[SettingProof] = []

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
            self.query_one(ProofTable).show(self._rows)

    async def _prove(self) -> None:
        from cpuchat.bench.why import prove

        try:
            facts = await prove(self._services.conversation)
        except Interrupted:
            return
        except (CpuchatError, OSError) as error:
            self._tell(f"No proofs: {error}")
            return
        self._rows = why.rows(facts)
        self._show()
        n_failed = sum(row.state == "fails" for row in self._rows)
        self._tell("Every setting in use works" if not n_failed else f"{n_failed} of {len(self._rows)} settings fail")

    def action_close(self) -> None:
        self.dismiss(None)
