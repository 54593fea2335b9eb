"""The settings and the keys: a form of all settings in tabs, and a list of all actions with their keys.

Fields of the form follow from `config.settings.DECLARED`: its types and bounds decide what a field accepts, and each is
checked as it is typed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import msgspec
from textual import events, on, work
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Checkbox, Input, Select, Static, TabbedContent, TabPane, TextArea

from cpuchat.base import paths
from cpuchat.base.decoding import prepared
from cpuchat.base.errors import CpuchatError
from cpuchat.base.text import clean_line
from cpuchat.config import settings as settings_file
from cpuchat.config.servers import ServerModel
from cpuchat.config.settings import DECLARED, DeclaredSetting, Settings, value_of, with_changes
from cpuchat.telemetry import units
from cpuchat.tui.services import Services
from cpuchat.tui.widgets.dialogs import Dismissable
from cpuchat.tui.widgets.key_footer import KeyFooter

Kind = Literal["switch", "choice", "theme", "whole", "number", "line", "text", "lines"]

TABS: dict[str, str] = {
    "Basics": "",
    "Sampling": "Empty: the model's recommendation.",
    "Speculation": "Takes effect with the next answer unless noted.",
    "Engine": "Takes effect on the next load.",
    "Speech": "Ctrl+S reads answers aloud.",
    "Appearance": "Keys: keymap.toml, your own themes: .toml files in themes, both beside config.toml.",
}
"""Tabs in order, each with a note ("" for none)."""
_TAB_OF_SECTION = {
    "sampling": "Sampling", "speculation": "Speculation", "engine": "Engine", "hardware": "Engine", "speech": "Speech",
    "ui": "Appearance",
}  # fmt: skip


@dataclass(frozen=True)
class Field(DeclaredSetting):
    """One setting in the form. `low`/`high` are inclusive; `choices` only for kind "choice". A setting whose `default`
    is None may be empty: then it is as the model has it.
    """

    kind: Kind = "line"
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, key: str) -> Field:
        """Return the field of a setting such as "engine.cores"."""
        declared = DECLARED[key]
        kind: Kind = "line"
        choices: tuple[str, ...] = ()
        low = high = None
        info = msgspec.inspect.type_info(declared.type)
        if isinstance(info, msgspec.inspect.UnionType):  # may be unset
            info = next(one for one in info.types if not isinstance(one, msgspec.inspect.NoneType))
        match info:
            case msgspec.inspect.BoolType():
                kind = "switch"
            case msgspec.inspect.LiteralType():
                kind, choices = "choice", get_args(get_args(declared.type)[0])  # as written: msgspec sorts them
            case msgspec.inspect.IntType(ge=low, le=high):
                kind = "whole"
            case msgspec.inspect.FloatType(ge=low, le=high):
                kind = "number"
            case msgspec.inspect.ListType():
                kind = "lines"
            case _:
                kind = "theme" if key == "ui.theme" else "text" if declared.name.endswith("prompt") else "line"
        return cls(**vars(declared), kind=kind, choices=choices, low=low, high=high)

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
    def limits(self) -> str:
        """`0 to 100` or `0 or more`; "" where there is no limit, or one that only keeps it inside 64 bits."""
        if self.low is None:
            return ""
        if self.high is None or self.high >= 1 << 53:
            return f"{self.low:g} or more"
        return f"{self.low:g} to {self.high:,.10g}"

    @property
    def default_shown(self) -> str:
        """Return the default as the form shows it; "empty" where nothing is shown."""
        if self.kind == "switch":
            return "on" if self.default else "off"
        return str(self.shown(self.default)) or "empty"


def fields(tab: str) -> list[Field]:
    """Return the settings of one of `TABS`, in the order of the form."""
    return [field for key, one in DECLARED.items() if one.words.label and (field := Field.of(key)).tab == tab]


_RECOMMENDED = {"header": "by the model's header", "catalog": "by the catalog", "demo": "for the demo model"}


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


_OF_THE_WORKER = ("Speculation", "Engine")
"""Tabs that have no effect on a model on a server."""
_SERVED_TAB = "The loaded model is on a server: these settings are for models on this machine."


class SettingsScreen(Dismissable[Settings | None], keys="settings"):
    """Returns the settings after saving, or None when nothing was saved."""

    CSS_PATH = "settings.tcss"
    AUTO_FOCUS = "SettingRow .editor"
    HORIZONTAL_BREAKPOINTS: ClassVar[list[tuple[int, str]] | None] = [
        (0, "-tiny"), (72, "-narrow"), (114, "-wide"),
    ]  # fmt: skip

    def __init__(self, services: Services, themes: Iterable[str]) -> None:
        super().__init__()
        self._services = services
        self._settings = services.settings
        self._themes = sorted(themes)
        self._saving = False
        self._sources: dict[str, str] = {}

    def compose(self) -> ComposeResult:
        self._sources = self._services.setting_sources.read()
        with Vertical(id="form") as form:
            form.border_title = "Settings"
            with TabbedContent():
                for tab in TABS:
                    with TabPane(tab, id=tab.lower()), VerticalScroll(can_focus=False):
                        for field in fields(tab):
                            value = value_of(self._settings, field.key)
                            yield SettingRow(field, value, self._themes, self._note(field), self._unset(field))
                        if note := _SERVED_TAB if self._is_served and tab in _OF_THE_WORKER else TABS[tab]:
                            yield Static(note, classes="note", markup=False)
        yield Static(id="hint", markup=False)
        yield KeyFooter()

    def on_mount(self) -> None:
        self.query_one("#form").border_subtitle = paths.shown(paths.settings_file())

    def on_unmount(self) -> None:
        # Textual lets a text area go only when the theme changes after it was closed.
        watchers = getattr(self.app, "__watchers", {}).get("theme", [])
        watchers[:] = [one for one in watchers if not (isinstance(one[0], TextArea) and not one[0].is_attached)]

    @property
    def _rows(self) -> list[SettingRow]:
        return list(self.query(SettingRow))

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        # A field at the lower edge brings its neighbors into view, so that the user sees where Tab leads.
        for row in self._rows:
            if row in event.widget.ancestors:
                row.scroll_visible(animate=False)
                self._show_hint(row)

    def _show_hint(self, row: SettingRow) -> None:
        """Show range, default and source at the bottom; the help too where it has no room beside the field."""
        hint, invalid = self.query_one("#hint", Static), row.has_class("-invalid")
        hint.set_class(invalid, "-invalid")
        if invalid:
            hint.update(row.text_beside)
            return
        field, facts = row.field, [] if self.has_class("-wide") else [row.text_beside]
        if field.limits:
            facts.append(field.limits)
        facts.append(row.unset if "default" in row.unset else f"default {row.unset or field.default_shown}")
        if source := self._sources.get(field.key):
            facts.append(source)
        used = value_of(self._services.conversation.options.applied_to(self._settings), field.key)
        if used != value_of(self._settings, field.key):
            facts.append(f"{clean_line(str(field.shown(used)))} in this chat")
        hint.update(" · ".join(facts))

    @on(Input.Changed)
    @on(TextArea.Changed)
    @on(Select.Changed)
    @on(Checkbox.Changed)
    def _edited(self, event: Input.Changed | TextArea.Changed | Select.Changed | Checkbox.Changed) -> None:
        row = next(node for node in event.control.ancestors if isinstance(node, SettingRow))
        row.check()
        self._show_hint(row)

    def show_row(self, row: SettingRow) -> None:
        pane = next(node for node in row.ancestors if isinstance(node, TabPane))
        self.query_one(TabbedContent).active = pane.id or ""
        row.editor.focus()

    def action_tab(self, step: int) -> None:
        tabs = self.query_one(TabbedContent)
        names = [tab.lower() for tab in TABS]
        tabs.active = names[(names.index(tabs.active) + step) % len(names)]
        # Not before the old tab is hidden, which takes the focus from what it holds.
        self.call_after_refresh(tabs.get_pane(tabs.active).query(".editor").first().focus)

    def action_defaults(self) -> None:
        focused = self.focused
        for row in self._rows:
            if focused is not None and row in focused.ancestors:
                row.put(row.field.default)

    @property
    def _is_served(self) -> bool:
        return isinstance(self._services.loaded, ServerModel)

    def _note(self, field: Field) -> str:
        """Return what tuning made of a setting of the loaded model, or what is recommended for it; "" if nothing."""
        conversation = self._services.conversation
        model, recommended, tuned = conversation.model, conversation.recommended, conversation.tuned
        if model is not None and field.section in ("sampling", "chat") and field.name in model.ignored:
            return "not supported by the server"
        if field.section == "sampling" and recommended is not None and field.name in recommended.sampling:
            return f"empty = {recommended.sampling[field.name]:g}, recommended {_RECOMMENDED[recommended.source]}"
        choice = tuned.choice_of(field.key) if tuned is not None else None
        if (
            tuned is None
            or choice is None
            or all(value_of(conversation.in_effect, key) == value_of(conversation.settings, key) for key in choice.keys)
        ):
            return ""
        both = (("decode", choice.decode), ("prefill", choice.prefill))
        gains = [f"{name} {units.change(gain)}" for name, gain in both if gain]
        how = "tuned with an earlier engine" if tuned.is_outdated else "tuned"
        return f"{', '.join((f'{how}: {choice.words}', *gains))} · `cpuchat tune --undo` reverts"

    def _unset(self, field: Field) -> str:
        if field.default is not None:
            return ""
        if self._is_served:
            return "server default"
        return f"{getattr(self._services.conversation.default_sampling, field.name):g}"

    def action_save(self) -> None:
        wrong = [row for row in self._rows if row.check()]
        if wrong:
            self.show_row(wrong[0])
            self.notify(f"{wrong[0].field.label} {wrong[0].check()}.", severity="warning", markup=False)
            return
        changes: dict[str, dict[str, Any]] = {}
        for row in self._rows:
            if row.changed:
                changes.setdefault(row.field.section, {})[row.field.name] = row.field.parse(row.content)
        if not changes:
            self.dismiss(None)
        elif not self._saving:
            self._saving = True
            self._save(changes)

    @work
    async def _save(self, changes: dict[str, dict[str, Any]]) -> None:
        try:
            await asyncio.to_thread(settings_file.update, changes)
            self._services.setting_sources.saved(changes)
            self.notify("Settings saved.")
            # Others may have changed while this form was open: only what was changed here is put into them.
            await self.dismiss_when_on_top(with_changes(self._services.settings, changes))
        except (CpuchatError, OSError) as error:
            self.notify(str(error), title="Not saved", severity="error", timeout=10, markup=False)
        finally:
            self._saving = False

    @work
    async def action_close(self) -> None:
        if self._saving:
            return
        changed = any(row.changed for row in self._rows)
        if changed and not await self.confirm("Settings", "There are unsaved changes.", "Discard", "Keep editing"):
            return
        self.dismiss(None)
