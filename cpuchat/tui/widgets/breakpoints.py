"""Sets the classes of a screen's breakpoints before its first layout.

Textual sets them after it: the first picture would be another one, and everything is styled twice.
"""

from __future__ import annotations

from textual.screen import Screen


def set_size_classes(screen: Screen) -> None:
    """Set the classes for the size of the app; call it from `on_compose`."""
    size = screen.app.size
    for length, breakpoints in (
        (size.width, screen.HORIZONTAL_BREAKPOINTS),
        (size.height, screen.VERTICAL_BREAKPOINTS),
    ):
        if names := [name for least, name in breakpoints or () if length >= least]:
            screen.set_class(True, names[-1], update=False)
