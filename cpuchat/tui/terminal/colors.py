"""Terminals that show all colors but do not say so over SSH, which forwards TERM and not COLORTERM."""

from __future__ import annotations

import os

_TRUECOLOR = frozenset({"alacritty", "contour", "foot", "foot-extra", "rio", "wezterm", "xterm-ghostty", "xterm-kitty"})


def set_colorterm() -> None:
    """Set `COLORTERM`, which Textual reads, if it is missing and `TERM` names such a terminal."""
    term = os.environ.get("TERM", "").lower()
    if not os.environ.get("COLORTERM") and (term in _TRUECOLOR or term.endswith("-direct")):
        os.environ["COLORTERM"] = "truecolor"
