"""Progress in one line: the style of its bar, and the base of the lines at the bottom of screens."""

from __future__ import annotations

from typing import ClassVar

from rich.style import Style
from textual.widget import Widget

CLASSES = {f"progress--{part}" for part in ("fill", "track", "dim", "failed")}
CSS = """
        & > .progress--fill { color: $accent; }
        & > .progress--track { color: $foreground 25%; }
        & > .progress--dim { color: $hint; }
        & > .progress--failed { color: $limit; text-style: bold; }
        &:ansi > .progress--track, &:ansi > .progress--dim { color: ansi_default; text-style: dim; }
"""


def style_of(widget: Widget, part: str) -> Style:
    """Return the style of a part; "" is plain text. `widget` has `CLASSES` and `CSS`."""
    return widget.get_component_rich_style(f"progress--{part}", partial=True) if part else Style()


class ProgressLine(Widget):
    """Hidden (class `-idle`) while there is nothing to show; progress never causes a layout."""

    ALLOW_SELECT = False
    COMPONENT_CLASSES: ClassVar[set[str]] = CLASSES
    DEFAULT_CSS = f"ProgressLine {{ width: 100%; height: 1; &.-idle {{ display: none; }} {CSS} }}"

    def __init__(self) -> None:
        super().__init__(classes="-idle")

    def style_of(self, part: str) -> Style:
        return style_of(self, part)
