"""Shows what runs on this machine: models of usual sizes with fit and speed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rich.table import Table
from rich.text import Text
from textual import work
from textual.widgets import Static

from cpuchat.daemon_thread import run_in_daemon_thread
from cpuchat.models.machine import Machine, this_machine
from cpuchat.present import prediction, typical
from cpuchat.telemetry import units

if TYPE_CHECKING:
    from cpuchat.model_info import ModelInfo
    from cpuchat.models.prediction import Prediction
    from cpuchat.present.typical import TypicalModel
    from cpuchat.settings import Settings

_RUNS = ("fits", "tight")
_LEAST_HEIGHT, _BEFORE_BAR, _LONGEST_BAR = 2, 56, 48


class TypicalModels(Static):
    """Draws a line per size. If there is no room for all, those around the largest that runs."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"typical--fill", "typical--dim"}
    DEFAULT_CSS = """
    TypicalModels {
        width: 100%;
        & > .typical--fill { color: $accent; }
        & > .typical--dim { color: $hint; }
    }
    """

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id)
        self._machine: Machine | None = None

    @work(exclusive=True)
    async def read(self, settings: Settings, loaded: ModelInfo | None, root: Path) -> None:
        """Predict for the machine below `root`, with the memory of the loaded model given back."""
        self._machine = await run_in_daemon_thread(lambda: this_machine(settings, loaded=loaded, root=root))
        self._draw()

    def on_resize(self) -> None:
        self.visible = self.size.height >= _LEAST_HEIGHT
        self._draw()

    def _draw(self) -> None:
        machine = self._machine
        if machine is None:
            return
        fill, dim = (self.get_component_rich_style(f"typical--{part}", partial=True) for part in ("fill", "dim"))
        self.border_title = f"What runs here · {typical.QUANTIZATION}"
        self.border_subtitle = prediction.doubt(machine, "m")
        found = [(model, model.on(machine)) for model in typical.SIZES]
        width = max(min(self.size.width - _BEFORE_BAR, _LONGEST_BAR), 0)
        top = max((one.tok_s or 0.0 for _, one in found), default=0.0)
        table = Table.grid(padding=(0, 2, 0, 0))
        for justify in ("left", "right", "left", "right", "left"):
            table.add_column(justify=justify, no_wrap=True)
        for model, one in self._around_the_largest(found):
            verdict = prediction.verdict(one)
            style = "" if verdict in _RUNS else dim
            bar = "━" * max(round((one.tok_s or 0.0) / top * width), 1) if one.tok_s and width else ""
            table.add_row(
                Text(model.name, style), Text(units.size(model.size), style), Text(verdict, style),
                Text(prediction.speed(one), style), Text(bar, fill),
            )  # fmt: skip
        self.update(table)

    def _around_the_largest(
        self, found: list[tuple[TypicalModel, Prediction]]
    ) -> list[tuple[TypicalModel, Prediction]]:
        room = max(self.size.height, 1)
        runs = [place for place, (_, one) in enumerate(found, 1) if prediction.verdict(one) in _RUNS]
        end = min(max(runs[-1] + 1 if runs else 1, room), len(found))
        return found[max(end - room, 0) : end]
