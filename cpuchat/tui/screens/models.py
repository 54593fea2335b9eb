"""What can be loaded: the models on this machine, or any GGUF file by its path."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from urllib.parse import unquote, urlparse

from rich.table import Table
from rich.text import Text
from textual import events, on, work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Footer, Input, OptionList, Static
from textual.widgets.option_list import Option

from cpuchat import paths as places
from cpuchat.errors import CpuchatError
from cpuchat.models.library import Library, LocalModel
from cpuchat.protocol import ModelInfo
from cpuchat.tui import keys, wording
from cpuchat.tui.widgets.status import tokens

_SOURCES = {"demo": "with cpuchat", "huggingface": "Hugging Face", "folder": "your folder"}


def typed_path(text: str) -> Path | None:
    """The file that a typed or pasted text names, or None when it looks like a search.

    Takes what terminals paste when a file is dropped on them: quotes, `file://`, backslash before a space.
    """
    text = text.strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    if text.startswith("file://"):
        text = unquote(urlparse(text).path)
    if not text.startswith(("/", "~", "./", "../")) and not (text.lower().endswith(".gguf") and os.sep in text):
        return None
    path = Path(text.replace("\\ ", " ")).expanduser()
    return path


@dataclass(frozen=True)
class Row:
    """One line of the list: a model, or a typed path (`model` None)."""

    path: Path
    model: LocalModel | None = None
    problem: str = ""


class ModelList(OptionList, can_focus=False):
    """Moves under the keys of the screen: the search box keeps the focus."""


class ModelsScreen(Screen[Path | None]):
    """Returns the file to load, or None."""

    CSS_PATH = "models.tcss"
    AUTO_FOCUS = "#filter"
    HORIZONTAL_BREAKPOINTS: ClassVar[list[tuple[int, str]] | None] = [(0, "-narrow"), (100, "-wide")]
    BINDINGS: ClassVar[list[BindingType]] = keys.bindings("models")

    class Found(Message):
        """The scan is done."""

        def __init__(self, models: list[LocalModel], problem: str = "") -> None:
            super().__init__()
            self.models = models
            self.problem = problem

    def __init__(self, library: Library, current: ModelInfo | None) -> None:
        super().__init__()
        self._library = library
        self._current = Path(current.path) if current else None
        self._models: list[LocalModel] | None = None
        self._problem = ""
        self._rows: list[Row] = []

    def compose(self) -> ComposeResult:
        with Horizontal(id="panes"):
            with Vertical(id="list") as pane:
                pane.border_title = "Models on this machine"
                yield Input(placeholder="type to search, or paste the path of a GGUF file", id="filter", compact=True)
                yield ModelList(id="rows", compact=True)
            with Vertical(id="about") as about:
                about.border_title = "About"
                yield Static(id="details")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self._show()
        self._scan()

    # Scan

    @work(thread=True, exclusive=True, group="scan")
    def _scan(self) -> None:
        try:
            self.post_message(self.Found(list(self._library.local_models())))
        except (CpuchatError, OSError) as error:
            self.post_message(self.Found([], str(error)))

    @on(Found)
    def _found(self, event: Found) -> None:
        self._models = event.models
        self._problem = event.problem
        self._show()

    def action_rescan(self) -> None:
        self._models = None
        self._show()
        self._scan()

    # List

    @on(Input.Changed, "#filter")
    def _filter_changed(self) -> None:
        self._show()

    def on_resize(self, event: events.Resize) -> None:
        self.call_after_refresh(self._show)

    def _matching(self) -> list[Row]:
        text = self.query_one("#filter", Input).value
        path = typed_path(text)
        if path is not None:
            return [Row(path, problem="" if path.is_file() else "no such file")]
        words = text.lower().split()
        rows: list[Row] = []
        for model in self._models or []:
            haystack = f"{model.name} {model.quantization} {model.repo or ''} {model.architecture} {model.path}".lower()
            if all(word in haystack for word in words):
                rows.append(Row(model.path, model, model.damaged or ""))
        return rows

    def _show(self) -> None:
        if not self.is_mounted:
            return
        options = self.query_one(ModelList)
        marked = self._marked
        self._rows = self._matching()
        options.clear_options()
        if self._rows:
            width = options.content_size.width or self.size.width - 6
            options.add_options([Option(self._line(row, width)) for row in self._rows])
            wanted = marked.path if marked else self._current
            paths = [row.path for row in self._rows]
            options.highlighted = paths.index(wanted) if wanted in paths else 0
        else:
            options.add_option(Option(Text(self._empty_text(), style="dim italic"), disabled=True))
        self._show_details()

    def _empty_text(self) -> str:
        if self._problem:
            return self._problem
        if self._models is None:
            return "looking …"
        if self._models:
            return "nothing found; a path needs / or ~ at its start"
        return "no models yet: paste the path of a GGUF file above"

    def _line(self, row: Row, width: int) -> Text:
        """`● name   Q8_0   1.6 GB   32k   where`, the name taking what is left."""
        model = row.model
        if model is None:
            return Text.assemble("○ ", (str(row.path), ""), ("  " + row.problem, "dim italic"), no_wrap=True)
        mark = "!" if row.problem else "●" if row.path == self._current else "○"
        if row.problem:
            return Text.assemble(
                f"{mark} ", (model.name, "dim"), ("  " + row.problem, "dim italic"), no_wrap=True,
                overflow="ellipsis",
            )  # fmt: skip
        columns = [f"{model.quantization:<8}", f"{wording.size(model.size):>8}", f"{tokens(model.n_ctx_train or 0):>6}"]
        where = _SOURCES.get(model.source, model.source)
        right = "  " + "  ".join(columns) + (f"  {where:<12}" if width >= 68 else "")
        room = max(8, width - len(right) - 2)
        name = Text(model.name, no_wrap=True, overflow="ellipsis")
        name.truncate(room, overflow="ellipsis", pad=True)
        bold = "bold" if row.path == self._current else ""
        return Text.assemble((f"{mark} ", bold), name, (right, "dim"), no_wrap=True)

    @property
    def _marked(self) -> Row | None:
        index = self.query_one(ModelList).highlighted
        return self._rows[index] if index is not None and index < len(self._rows) else None

    @on(OptionList.OptionHighlighted)
    def _show_details(self) -> None:
        row = self._marked
        details = self.query_one("#details", Static)
        if row is None:
            details.update("")
            return
        model = row.model
        lines: list[tuple[str, str]] = []
        if model is not None:
            if model.n_params:
                lines.append(("parameters", f"{model.n_params / 1e9:.2f} B" if model.n_params >= 1e8 else
                              f"{model.n_params / 1e6:.1f} M"))  # fmt: skip
            lines += [
                ("architecture", model.architecture),
                ("quantization", model.quantization),
                ("file", wording.size(model.size)),
                ("context", f"{model.n_ctx_train:,} tokens" if model.n_ctx_train else ""),
                ("from", _SOURCES.get(model.source, model.source)),
                ("repository", model.repo or ""),
            ]
        if row.problem:
            lines.append(("problem", row.problem))
        lines.append(("path", places.shown(row.path)))
        table = Table.grid(padding=(0, 2, 0, 0), expand=True)
        table.add_column(no_wrap=True, style="dim")
        table.add_column(ratio=1, overflow="fold")
        for label, value in lines:
            if value:
                table.add_row(Text(label), Text(value))
        details.update(table)

    # Keys

    def action_move(self, rows: int) -> None:
        options = self.query_one(ModelList)
        if self._rows:
            here = options.highlighted or 0
            options.highlighted = max(0, min(len(self._rows) - 1, here + rows))

    def action_load(self) -> None:
        row = self._marked
        if row is None:
            return
        if row.problem:
            text = row.problem if row.model else f"{row.path}: {row.problem}."
            self.notify(text, severity="warning", markup=False)
            return
        self.dismiss(row.path)

    @on(OptionList.OptionSelected)
    def _clicked(self) -> None:
        self.action_load()

    def action_close(self) -> None:
        box = self.query_one("#filter", Input)
        if box.value:
            box.value = ""
        else:
            self.dismiss(None)
