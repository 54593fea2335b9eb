"""Shows the keys of a screen, and sets the classes of a screen's breakpoints before its first layout.

Textual's footer makes all its widgets anew whenever a key is enabled or disabled: opening a chat and sending a message
took 1.6 times the CPU time with it. Its breakpoints are set after the layout: the first picture would be another one,
and everything is styled twice.
"""

from __future__ import annotations

from typing import NamedTuple

from textual.app import ComposeResult
from textual.reactive import reactive
from textual.screen import Screen
from textual.widgets import Footer
from textual.widgets._footer import FooterKey


class _Shown(NamedTuple):
    """What the widget of a key shows and does."""

    key: str
    display: str
    description: str
    action: str
    enabled: bool
    tooltip: str


class _Key(FooterKey):
    """A key, which can become another one."""

    compact = reactive(False)
    """Never changes; with Textual's default, each key would be styled once more."""

    def __init__(self, shown: _Shown) -> None:
        self.shown = shown
        super().__init__(shown.key, shown.display, shown.description, shown.action, not shown.enabled, shown.tooltip)

    def show(self, shown: _Shown) -> None:
        """Become that key, if it is not yet."""
        if shown == self.shown:
            return
        self.shown = shown
        self.key, self.key_display, self.description, self.action = shown[:4]
        self._disabled = not shown.enabled
        self.tooltip = shown.tooltip or None
        self.set_class(self._disabled, "-disabled")
        self.refresh(layout=True)


class KeyFooter(Footer):
    """A footer that changes only the keys that changed."""

    def compose(self) -> ComposeResult:
        """Begin without keys: they are known when the screen is shown."""
        yield from ()

    def bindings_changed(self, screen: Screen) -> None:
        if screen.app.app_focus and self.is_attached and screen is self.screen:
            self.call_after_refresh(self._show_keys)

    async def _show_keys(self) -> None:
        if not self.is_attached or self._pruning:
            return
        keys, widgets = self._keys(), list(self.query_children(_Key))
        with self.app.batch_update():
            for widget, shown in zip(widgets, keys, strict=False):
                widget.show(shown)
            if surplus := widgets[len(keys) :]:
                await self.remove_children(surplus)
            if missing := keys[len(widgets) :]:
                await self.mount_all(map(_Key, missing))

    def _keys(self) -> list[_Shown]:
        """Return what to show, each action once; what does not fit is left out before the last, the palette."""
        shown: dict[str, _Shown] = {}
        for _, binding, enabled, tooltip in self.screen.active_bindings.values():
            if binding.show and binding.action not in shown:
                display = self.app.get_key_display(binding)
                shown[binding.action] = _Shown(
                    binding.key, display, binding.description, binding.action, enabled, tooltip
                )
        found = list(shown.values())
        while (
            len(found) > 2 and sum(len(one.display) + len(one.description) + 3 for one in found) > self.size.width + 1
        ):
            del found[-2]
        return found

    def on_resize(self) -> None:
        self.bindings_changed(self.screen)
