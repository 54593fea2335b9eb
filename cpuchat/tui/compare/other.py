"""Chooses what to compare the loaded model with: another quantization, other settings, another model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.content import Content

from cpuchat.compare.side import Side
from cpuchat.daemon_thread import run_in_daemon_thread
from cpuchat.errors import CpuchatError
from cpuchat.models.catalog import load_catalog, match_local
from cpuchat.models.file_names import without_prefix
from cpuchat.models.library.model import LocalModel
from cpuchat.present.rows import ListRow
from cpuchat.telemetry import units
from cpuchat.text import clean_line
from cpuchat.tui import keys
from cpuchat.tui.services import Services
from cpuchat.tui.widgets.download_line import DownloadLine
from cpuchat.tui.widgets.key_footer import KeyFooter
from cpuchat.tui.widgets.list_screen import ListScreen
from cpuchat.tui.widgets.model_list import ModelList
from cpuchat.tui.widgets.quantize_line import QuantizeLine

_SETTINGS: tuple[tuple[str, dict[str, str]], ...] = (
    ("with drafters", {"drafters": "auto"}),
    ("KV cache q8_0", {"kv": "q8_0"}),
    ("flash attention off", {"flash-attn": "off"}),
)
_DOWNLOAD, _QUANTIZE = "download", "quantize"


@dataclass(frozen=True)
class Found:
    """Lists what `model` can be compared with. `repo` has its other quantizations, "" where none is known."""

    model: LocalModel | None
    repo: str
    quantizations: list[LocalModel]
    others: list[LocalModel]


def find(services: Services, path: Path) -> Found:
    """Read the library: in a thread."""
    models = [one for one in services.library.local_models() if not one.damaged and one.kind == "model"]
    model = next((one for one in models if one.path == path), None) or services.library.at(path)
    rest = [one for one in models if one.path != path]
    same = [one for one in rest if model is not None and is_same_model(model, one)]
    listed = match_local(load_catalog(), model) if model is not None and model.source != "demo" else None
    repo = model.repo if model is not None else ""
    return Found(
        model, repo or (listed.repos[0] if listed is not None else ""), same, [one for one in rest if one not in same]
    )


def is_same_model(one: LocalModel, other: LocalModel) -> bool:
    """Return whether two files are quantizations of the same model, as far as their headers tell."""
    if (one.architecture, one.n_params) != (other.architecture, other.n_params):
        return False
    return one.name == other.name or _base(one) == _base(other)


def _base(model: LocalModel) -> str:
    stem = model.path.stem.lower()
    for quantization in (model.quantization.lower(), without_prefix(model.quantization).lower()):
        stem = stem.replace(quantization, "") if quantization else stem
    return stem.strip("-._")


class OtherSideScreen(ListScreen[Side | None]):
    """Returns the other side, or None."""

    CSS_PATH = "other.tcss"
    AUTO_FOCUS = ""
    BINDINGS: ClassVar[list[BindingType]] = keys.bindings("other_side")
    KEYS: ClassVar = "other_side"

    def __init__(self, services: Services, model: Path) -> None:
        super().__init__()
        self._services = services
        self._path = model
        self._found: Found | None = None

    def compose(self) -> ComposeResult:
        with Vertical(id="list") as pane:
            pane.border_title = Content(clean_line(f"Compare {self._path.stem} with"))
            yield ModelList(id="rows")
        yield DownloadLine(self._services.downloading)
        yield QuantizeLine(self._services.quantizing)
        yield KeyFooter()

    def on_mount(self) -> None:
        self.query_one(ModelList).show([ListRow(note="Reading…")])
        self._read()

    @work(exclusive=True, group="read")
    async def _read(self) -> None:
        try:
            self._found = await run_in_daemon_thread(lambda: find(self._services, self._path))
        except (CpuchatError, OSError) as error:
            self.warn(str(error))
            self._found = Found(None, "", [], [])
        if self.has_widgets:
            self.query_one(ModelList).show(rows(self._found, self._path))

    @on(ModelList.Chosen)
    @work(exclusive=True, group="choose")
    async def action_choose(self) -> None:
        key, found = self.query_one(ModelList).marked, self._found
        if found is None or not key:
            return
        path: Path | None = None
        if key == _DOWNLOAD:
            path = await self._services.navigation.repository(found.repo)
        elif key == _QUANTIZE and found.model is not None:
            path = await self._services.navigation.quantize(found.model)
        elif key.startswith("settings "):
            changes = _SETTINGS[int(key.removeprefix("settings "))][1]
            side = await run_in_daemon_thread(lambda: Side.of(self._path, changes))
            await self.dismiss_when_on_top(side)
            return
        else:
            path = Path(key)
        if path is not None:
            chosen = path
            await self.dismiss_when_on_top(await run_in_daemon_thread(lambda: Side.of(chosen)))
        else:
            self._read()


def rows(found: Found, path: Path) -> list[ListRow]:
    """Return the list: quantizations on this machine, download and quantize, settings, other models."""
    listed: list[ListRow] = []
    if found.quantizations:
        listed += [ListRow(name="other quantizations"), *map(_row, found.quantizations)]
    listed.append(ListRow(name="download or quantize"))
    if found.repo:
        listed.append(ListRow(key=_DOWNLOAD, name="Download another quantization", note=found.repo))
    listed.append(ListRow(key=_QUANTIZE, name="Quantize it now", note="writes a smaller file"))
    listed.append(ListRow(name="same file, other settings"))
    listed += [
        ListRow(key=f"settings {number}", name=name, note=path.stem) for number, (name, _) in enumerate(_SETTINGS)
    ]
    if found.others:
        listed += [ListRow(name="other models"), *map(_row, found.others)]
    return listed


def _row(model: LocalModel) -> ListRow:
    speed = f"{units.rate(model.measured_tok_s)} tok/s" if model.measured_tok_s else ""
    return ListRow(
        key=str(model.path), name=model.name, columns=(model.quantization, units.size(model.size), "here", speed)
    )
