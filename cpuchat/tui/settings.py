"""The settings: a form of all of them in tabs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from textual.app import ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.widgets import Static, TabbedContent, TabPane

from cpuchat.base import paths
from cpuchat.base.text import clean_line
from cpuchat.config.settings import DECLARED, Settings, value_of
from cpuchat.telemetry import units
from cpuchat.tui.services import Services
from cpuchat.tui.widgets.key_footer import KeyFooter
from cpuchat.tui.widgets.setting_rows import Field, FormScreen, SettingRow

TABS: dict[str, str] = {
    "Basics": "",
    "Sampling": "Empty: the model's recommendation.",
    "Speculation": "Takes effect with the next answer unless noted.",
    "Engine": "Takes effect on the next load.",
    "Speech": "Ctrl+S in the chat reads answers aloud.",
    "Appearance": "Keys: keymap.toml, your own themes: .toml files in themes, both beside config.toml.",
}
"""Tabs in order, each with a note ("" for none)."""


def fields(tab: str) -> list[Field]:
    """Return the settings of one of `TABS`, in the order of the form."""
    return [field for key, one in DECLARED.items() if one.words.label and (field := Field.of(key)).tab == tab]


_OF_THE_WORKER = ("Speculation", "Engine")
"""Tabs that have no effect on a model on a server."""
_SERVED_TAB = "The loaded model is on a server: these settings are for models on this machine."


class SettingsScreen(FormScreen[Settings | None], keys="settings"):
    """Returns the settings after saving, or None when nothing was saved."""

    def __init__(self, services: Services, themes: Iterable[str], first: str = "") -> None:
        super().__init__(services)
        self._first = first
        self._settings = services.settings
        self._themes = sorted(themes)

    def compose(self) -> ComposeResult:
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
        if self._first:
            row = next(row for row in self.rows if row.field.key == self._first)
            self.call_after_refresh(self.show_row, row)

    def facts(self, row: SettingRow) -> list[str]:
        """Return range, default and source; the help too where it has no room beside the field, or is cut there."""
        field, facts = row.field, [row.text_beside] if row.is_cut or not self.has_class("-wide") else []
        if field.limits:
            facts.append(field.limits)
        facts.append(row.unset if "default" in row.unset else f"default {row.unset or field.default_shown}")
        if source := self._sources.get(field.key):
            facts.append(source)
        used = value_of(self._services.conversation.options.applied_to(self._settings), field.key)
        if used != value_of(self._settings, field.key):
            facts.append(f"{clean_line(str(field.shown(used)))} in this chat (Alt+S)")
        return facts

    def show_row(self, row: SettingRow) -> None:
        pane = next(node for node in row.ancestors if isinstance(node, TabPane))
        self.query_one(TabbedContent).active = pane.id or ""
        super().show_row(row)

    def action_tab(self, step: int) -> None:
        tabs = self.query_one(TabbedContent)
        names = [tab.lower() for tab in TABS]
        tabs.active = names[(names.index(tabs.active) + step) % len(names)]
        # Not before the old tab is hidden, which takes the focus from what it holds.
        self.call_after_refresh(tabs.get_pane(tabs.active).query(".editor").first().focus)

    def _note(self, field: Field) -> str:
        """Return what tuning made of a setting of the loaded model, or what is recommended for it; "" if nothing."""
        if said := self._of_model(field):
            return f"empty = {self._unset(field)}, {said}" if said.startswith("recommended") else said
        conversation, tuned = self._services.conversation, self._services.conversation.tuned
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

    async def save(self) -> Settings:
        changes: dict[str, dict[str, Any]] = {}
        for row in self.rows:
            if row.changed:
                changes.setdefault(row.field.section, {})[row.field.name] = row.field.parse(row.content)
        # Others may have changed while this form was open: only what was changed here is put into them.
        return await self._services.write_settings(changes, saved="Settings saved.")
