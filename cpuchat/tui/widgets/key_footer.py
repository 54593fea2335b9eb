"""Shows the keys of a screen in one line.

Textual's footer has a widget for each key, and makes all of them anew whenever one is enabled or disabled.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from rich.style import Style
from rich.text import Text
from textual import events
from textual.screen import Screen
from textual.widget import Widget

from cpuchat.tui.keys import unbound


class ShownKey(NamedTuple):
    """A key, and what the footer says about it."""

    key: str
    display: str
    description: str
    enabled: bool

    @property
    def width(self) -> int:
        return len(self.display) + len(self.description) + 3


class KeyFooter(Widget):
    """The keys that can be pressed now, each action once; a click presses one."""

    ALLOW_SELECT = False
    COMPONENT_CLASSES: ClassVar[set[str]] = {"footer--key", "footer--description"}
    DEFAULT_CSS = """
    KeyFooter {
        dock: bottom;
        width: 100%;
        height: 1;
        & > .footer--key { color: $footer-key-foreground; text-style: bold; }
        & > .footer--description { color: $footer-description-foreground; }
    }
    """

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[ShownKey] = []

    def on_mount(self) -> None:
        self.screen.bindings_updated_signal.subscribe(self, self._bindings_changed)
        self._bindings_changed(self.screen)

    def _bindings_changed(self, screen: Screen[Any]) -> None:
        if screen.app.app_focus and self.is_attached and screen is self.screen:
            self.call_after_refresh(self._show_keys)

    def _show_keys(self) -> None:
        """Show the keys that fit: what does not is left out before the last, the palette, and what cannot be pressed
        now before what can; the first that can and Esc stay."""
        if not self.is_attached:
            return
        shown: dict[str, ShownKey] = {}
        for _, binding, enabled, _ in self.screen.active_bindings.values():
            if binding.show and binding.action not in shown and not binding.key.startswith(unbound("")):
                display = self.app.get_key_display(binding)
                shown[binding.action] = ShownKey(binding.key, display, binding.description, enabled)
        found = list(shown.values())
        first = next((one for one in found if one.enabled), None)
        kept = [first, *(one for one in found if one.key == "escape" and one.enabled)]
        less = sorted((one for one in found[:-1] if one not in kept), key=lambda one: not one.enabled)
        while less and sum(one.width for one in found) > self.size.width + 1:
            found.remove(less.pop())
        if found != self.keys:
            self.keys = found
            self.refresh()

    def render(self) -> Text:
        key_style = self.get_component_rich_style("footer--key", partial=True)
        about_style = self.get_component_rich_style("footer--description", partial=True)
        line = Text(no_wrap=True)
        for one in self.keys:
            look = Style(dim=not one.enabled)
            line.append(f" {one.display} ", key_style + look).append(f"{one.description} ", about_style + look)
        return line

    def on_mouse_down(self, event: events.MouseDown) -> None:
        left = event.x
        for one in self.keys:
            if 0 <= left < one.width and one.enabled:
                self.app.simulate_key(one.key)
            left -= one.width

    def on_resize(self) -> None:
        self._bindings_changed(self.screen)
