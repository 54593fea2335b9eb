"""Rows of settings, each with its editor and what is known of it, and forms of such rows.

A field follows from `config.settings.DECLARED`: its type and bounds decide what it accepts, and it is checked as it is
typed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import msgspec
from rich.cells import cell_len
from textual import events, on, work
from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.content import Content
from textual.screen import ScreenResultType
from textual.widget import Widget
from textual.widgets import Checkbox, Input, Select, Static, TextArea

from cpuchat.base.decoding import prepared
from cpuchat.base.errors import CpuchatError
from cpuchat.base.text import clean_line
from cpuchat.config.servers import ServerModel
from cpuchat.config.settings import DECLARED, DeclaredSetting
from cpuchat.tui.services import Services
from cpuchat.tui.widgets.dialogs import Dismissable

Kind = Literal["switch", "choice", "theme", "whole", "number", "line", "text", "lines"]

_TAB_OF_SECTION = {
    "sampling": "Sampling", "speculation": "Speculation", "engine": "Engine", "hardware": "Engine", "speech": "Speech",
    "ui": "Appearance",
}  # fmt: skip


@dataclass(frozen=True)
class Field(DeclaredSetting):
    """One setting in the form. `choices` only for kind "choice". A setting whose `default` is None may be empty: then
    it is as the model has it."""

    kind: Kind = "line"
    choices: tuple[str, ...] = ()

    @classmethod
    def of(cls, key: str) -> Field:
        """Return the field of a setting such as "engine.cores"."""
        declared = DECLARED[key]
        kind: Kind = "line"
        choices: tuple[str, ...] = ()
        info = msgspec.inspect.type_info(declared.type)
        if isinstance(info, msgspec.inspect.UnionType):  # may be unset
            info = next(one for one in info.types if not isinstance(one, msgspec.inspect.NoneType))
        match info:
            case msgspec.inspect.BoolType():
                kind = "switch"
            case msgspec.inspect.LiteralType():
                kind, choices = "choice", get_args(get_args(declared.type)[0])  # as written: msgspec sorts them
            case msgspec.inspect.IntType():
                kind = "whole"
            case msgspec.inspect.FloatType():
                kind = "number"
            case msgspec.inspect.ListType():
                kind = "lines"
            case _:
                kind = "theme" if key == "ui.theme" else "text" if declared.name.endswith("prompt") else "line"
        return cls(**vars(declared), kind=kind, choices=choices)

    @property
    def label(self) -> str:
        return self.words.label

    @property
    def tab(self) -> str:
        return "Basics" if self.words.is_basic else _TAB_OF_SECTION.get(self.section, "Basics")

    @property
    def about(self) -> str:
        """Return its line of help, with when it takes effect unless its tab says so."""
        when = "" if self.tab == "Engine" else self.takes_effect
        return self.words.about + (f" · from the next {when}" if when else "")

    def shown(self, value: Any) -> Any:
        """Convert a value to the content of its widget."""
        if value is None:
            return ""
        if self.kind == "lines":
            return "\n".join(value)
        if self.kind in ("switch", "choice", "theme", "line", "text"):
            return value
        return f"{value:g}" if self.kind == "number" else str(value)

    def parse(self, shown: Any) -> Any:
        """Convert a widget's content to a value. Raises ValueError: not acceptable; the message says what is."""
        if self.default is None and not str(shown).strip():
            return None
        value = shown
        if self.kind == "lines":
            value = [line.strip() for line in str(shown).splitlines() if line.strip()]
        elif self.kind in ("whole", "number"):
            value = str(shown).strip().replace(",", ".")
        try:
            return msgspec.convert(value, prepared(self.type), strict=False)  # numbers are read from texts
        except msgspec.ValidationError:
            raise ValueError(self.wants) from None

    @property
    def wants(self) -> str:
        """`needs a whole number from 0 to 100`."""
        if self.wanted:
            return f"needs {self.wanted}"
        if self.kind not in ("whole", "number"):
            return f"needs one of {', '.join(self.choices)}" if self.choices else "is not valid"
        noun = "a whole number" if self.kind == "whole" else "a number"
        limits = self.limits
        return f"needs {noun}" + (f" {'of' if limits.endswith('more') else 'from'} {limits}" if limits else "")

    @property
    def default_shown(self) -> str:
        """Return the default as the form shows it; "empty" where nothing is shown."""
        if self.kind == "switch":
            return "on" if self.default else "off"
        return str(self.shown(self.default)) or "empty"


class OnOff(Checkbox):
    """Checkbox that shows its state as a word."""

    def __init__(self, value: bool, *, classes: str) -> None:
        super().__init__("on" if value else "off", value, compact=True, classes=classes)

    def watch_value(self) -> None:
        super().watch_value()
        self.label = "on" if self.value else "off"

    @property
    def BUTTON_INNER(self) -> str:  # type: ignore[override]
        return "●" if self.value else "○"


class SettingRow(Horizontal):
    """Label, editor, and help or the problem beside it."""

    def __init__(self, field: Field, value: Any, themes: list[str], note: str = "", unset: str = "") -> None:
        """`note` replaces the help; `unset` is shown while the field is empty."""
        super().__init__(id=f"row-{field.section}-{field.name}", classes=f"-{field.kind}")
        self.field = field
        self._saved = value
        self._themes = themes
        self.note = note
        self.unset = unset
        self.text_beside = self._about

    def compose(self) -> ComposeResult:
        yield Static(self.field.label, classes="label", markup=False)
        field, shown = self.field, self.field.shown(self._saved)
        match field.kind:
            case "switch":
                yield OnOff(bool(shown), classes="editor")
            case "choice" | "theme":
                # Not as markup: config.toml may name a theme of any characters.
                known = field.choices or sorted({*self._themes, shown, field.default})
                options = [(Content(clean_line(name)), name) for name in known]
                yield Select(options, value=shown, allow_blank=False, compact=True, classes="editor")
            case "text" | "lines":
                yield TextArea(str(shown), compact=True, tab_behavior="focus", classes="editor")
            case _:
                yield Input(str(shown), placeholder=self.unset, compact=True, classes="editor", select_on_focus=True)
        yield Static(self._about, classes="about", markup=False)

    @property
    def _about(self) -> str:
        return self.note or self.field.about

    @property
    def is_cut(self) -> bool:
        """Return whether the text beside it is longer than the room there."""
        room = self.query_one(".about").content_size.width
        return 0 < room < cell_len(self.text_beside)

    @property
    def editor(self) -> Widget:
        return self.query_one(".editor")

    @property
    def content(self) -> Any:
        editor = self.editor
        return editor.text if isinstance(editor, TextArea) else editor.value  # type: ignore[attr-defined]

    def put(self, value: Any) -> None:
        editor, shown = self.editor, self.field.shown(value)
        if isinstance(editor, TextArea):
            editor.load_text(shown)
        else:
            editor.value = shown  # type: ignore[attr-defined]

    @property
    def changed(self) -> bool:
        """Return whether it differs from the saved value (also when invalid)."""
        try:
            return self.field.parse(self.content) != self._saved
        except ValueError:
            return True

    def check(self) -> str:
        """Show and return the problem with the content, "" for none."""
        problem = ""
        try:
            self.field.parse(self.content)
        except ValueError as error:
            problem = str(error)
        self.text_beside = f"! {problem}" if problem else self._about
        self.query_one(".about", Static).update(self.text_beside)
        self.set_class(bool(problem), "-invalid")
        self.set_class(self.changed, "-changed")
        return problem


_RECOMMENDED = {"header": "by the model's header", "catalog": "by the catalog", "demo": "for the demo model"}


class FormScreen(Dismissable[ScreenResultType]):
    """A form of setting rows in `#form`; in `#hint` below stands what is known of the focused one."""

    CSS_PATH = Path(__file__).with_name("setting_rows.tcss")
    AUTO_FOCUS = "SettingRow .editor"
    HORIZONTAL_BREAKPOINTS: ClassVar[list[tuple[int, str]] | None] = [(0, "-tiny"), (72, "-narrow"), (114, "-wide")]
    saving = False
    """What was changed is being saved: the form stays open."""

    def __init__(self, services: Services) -> None:
        super().__init__()
        self._services = services
        self._sources = services.setting_sources.read()

    @property
    def _is_served(self) -> bool:
        return isinstance(self._services.loaded, ServerModel)

    def _unset(self, field: Field) -> str:
        """Return what an empty field means, "" for one that has a value."""
        if field.default is not None:
            return ""
        if self._is_served:
            return "server default"
        return f"{getattr(self._services.conversation.default_sampling, field.name):g}"

    def _of_model(self, field: Field) -> str:
        """Return what the loaded model says to a setting: that it does not take it, or who recommends a value."""
        model, recommended = self._services.conversation.model, self._services.conversation.recommended
        if model is not None and field.section in ("sampling", "chat") and field.name in model.ignored:
            return "not supported by the server"
        if field.section == "sampling" and recommended is not None and field.name in recommended.sampling:
            return f"recommended {_RECOMMENDED[recommended.source]}"
        return ""

    def facts(self, row: SettingRow) -> list[str]:
        """Return what is known of a row, for the hint."""
        raise NotImplementedError

    def reset_value(self, row: SettingRow) -> Any:
        """Return the value that a row is reset to."""
        return row.field.default

    def may_save(self) -> bool:
        """Return whether the form can be saved now; tells the user if not."""
        return True

    async def save(self) -> ScreenResultType:
        """Save what was changed, every row being valid, and return the form's result."""
        raise NotImplementedError

    def on_unmount(self) -> None:
        # Textual lets a text area go only when the theme changes after it was closed.
        watchers = getattr(self.app, "__watchers", {}).get("theme", [])
        watchers[:] = [one for one in watchers if not (isinstance(one[0], TextArea) and not one[0].is_attached)]

    @property
    def rows(self) -> list[SettingRow]:
        return list(self.query(SettingRow))

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        # A field at the lower edge brings its neighbors into view, so that the user sees where Tab leads.
        for row in self.rows:
            if row in event.widget.ancestors:
                row.scroll_visible(animate=False)
                self._show_hint(row)

    def _show_hint(self, row: SettingRow) -> None:
        hint, invalid = self.query_one("#hint", Static), row.has_class("-invalid")
        hint.set_class(invalid, "-invalid")
        hint.update(row.text_beside if invalid else " · ".join(self.facts(row)))

    @on(Input.Changed)
    @on(TextArea.Changed)
    @on(Select.Changed)
    @on(Checkbox.Changed)
    def _edited(self, event: Input.Changed | TextArea.Changed | Select.Changed | Checkbox.Changed) -> None:
        row = next(node for node in event.control.ancestors if isinstance(node, SettingRow))
        self.edited(row)
        row.check()
        self._show_hint(row)

    def edited(self, row: SettingRow) -> None:
        """Follow a change of a row, before it is checked."""

    def show_row(self, row: SettingRow) -> None:
        row.editor.focus()

    def action_defaults(self) -> None:
        focused = self.focused
        for row in self.rows:
            if focused is not None and row in focused.ancestors:
                row.put(self.reset_value(row))

    def action_save(self) -> None:
        if wrong := [row for row in self.rows if row.check()]:
            self.show_row(wrong[0])
            self.warn(f"{wrong[0].field.label} {wrong[0].check()}.")
        elif not any(row.changed for row in self.rows):
            self.dismiss(None)
        elif not self.saving and self.may_save():
            self.saving = True
            self._save()

    @work
    async def _save(self) -> None:
        try:
            await self.dismiss_when_on_top(await self.save())
        except (CpuchatError, OSError) as error:
            self.notify(str(error), title="Not saved", severity="error", timeout=10, markup=False)
        finally:
            self.saving = False

    @work
    async def action_close(self) -> None:
        if self.saving:
            return
        changed = any(row.changed for row in self.rows)
        if changed and not await self.confirm(
            str(self.query_one("#form").border_title), "There are unsaved changes.", "Discard", "Keep editing"
        ):
            return
        self.dismiss(None)
