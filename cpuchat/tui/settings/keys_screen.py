"""Every action with its key. Enter waits for the new key, Del resets it."""

from __future__ import annotations

import asyncio
from typing import ClassVar

from textual import on, work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Label

from cpuchat import paths
from cpuchat.errors import CpuchatError
from cpuchat.present.rows import ListRow
from cpuchat.tui import keys
from cpuchat.tui.keymap import load_keymap, problem_with, save_keys
from cpuchat.tui.services import Services
from cpuchat.tui.widgets.dismissable import Dismissable
from cpuchat.tui.widgets.key_footer import KeyFooter
from cpuchat.tui.widgets.list_screen import ListScreen
from cpuchat.tui.widgets.model_list import ModelList


class PressKeyScreen(Dismissable[str], ModalScreen[str]):
    """Returns the next key that is pressed, "" for Esc."""

    CSS_PATH = "keys.tcss"

    def __init__(self, action: str) -> None:
        super().__init__()
        self._action = action

    def compose(self) -> ComposeResult:
        with Vertical(id="dialog") as dialog:
            dialog.border_title = "Press the new key"
            dialog.border_subtitle = "Esc cancels"
            yield Label(self._action, markup=False)

    def capture_key(self, key: str) -> None:
        """Take a key before any binding does."""
        self.dismiss("" if key == "escape" else key)


class KeysScreen(ListScreen[None]):
    """Changes `keymap.toml`."""

    CSS_PATH = "keys.tcss"
    AUTO_FOCUS = ""
    BINDINGS: ClassVar[list[BindingType]] = keys.bindings("keys")
    KEYS: ClassVar = "keys"

    def __init__(self, services: Services) -> None:
        super().__init__()
        self._services = services

    def compose(self) -> ComposeResult:
        with Vertical(id="list") as pane:
            pane.border_title = "Keys"
            pane.border_subtitle = paths.shown(paths.keymap_file())
            yield ModelList(id="rows")
        yield KeyFooter()

    def on_mount(self) -> None:
        self._show()
        self._services.keys_changed.subscribe(self, lambda _: self._show())

    def _show(self) -> None:
        listed = self.query_one(ModelList)
        listed.show(rows(self._services.keymap), listed.marked)

    @property
    def _selected(self) -> keys.Key:
        key = keys.find(self.query_one(ModelList).marked)
        assert key is not None  # every line that can be selected is one
        return key

    @on(ModelList.Chosen)
    @work(exclusive=True, group="change")
    async def action_change(self) -> None:
        key = self._selected
        if pressed := await self.app.push_screen_wait(PressKeyScreen(key.help)):
            await self._save(key, pressed)

    @work(exclusive=True, group="change")
    async def action_reset(self) -> None:
        await self._save(self._selected, None)

    @work(exclusive=True, group="change")
    async def action_none(self) -> None:
        await self._save(self._selected, "")

    async def _save(self, key: keys.Key, wanted: str | None) -> None:
        others = {id: moved for id, moved in self._services.keymap.items() if id != key.id}
        if problem := problem_with(key, key.keys if wanted is None else wanted, others):
            self.notify(f"{problem}.", title="Not changed", severity="warning", timeout=10, markup=False)
            return
        try:
            await asyncio.to_thread(save_keys, key, None if wanted == key.keys else wanted)
            self._services.use_keymap((await asyncio.to_thread(load_keymap)).moved)
        except (CpuchatError, OSError) as error:
            self.notify(str(error), title="Not saved", severity="error", timeout=10, markup=False)
            return
        self.refresh_bindings()


def rows(keymap: dict[str, str]) -> list[ListRow]:
    """Return all actions under the headings of the help screen; those that were moved are marked."""
    table = keys.moved(keymap)
    listed: list[ListRow] = []
    for group in dict.fromkeys(map(keys.heading, table)):
        listed.append(ListRow(name=group))
        listed += [
            ListRow(
                key=key.id,
                mark="●" if key.id in keymap else " ",
                name=key.help,
                note=keys.display_all(key.keys) or "none",
                strong=key.id in keymap,
            )
            for key in table
            if keys.heading(key) == group
        ]
    return listed
