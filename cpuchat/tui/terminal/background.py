"""The background color of a terminal, asked for with OSC 11 and never waited for. And terminals that show all colors
but do not say so over SSH, which forwards TERM alone.
"""

from __future__ import annotations

import contextlib
import os
import re

from textual.message import Message

from cpuchat.config.settings import read_state, update_state

QUERY = "\x1b]11;?\x1b\\"
_PART = r"([0-9a-fA-F]{1,4})"
_REPLY = re.compile(rf"\x1b\]11;rgba?:{_PART}/{_PART}/{_PART}(?:/{_PART})?(?:\x07|\x1b\\)")
_MAX_KEPT = 16  # names of terminals


class BackgroundReported(Message):
    """The terminal has replied."""

    def __init__(self, is_light: bool) -> None:
        super().__init__()
        self.is_light = is_light


def is_light_at_start() -> bool:
    """Return whether the background is light by `COLORFGBG`, which some terminals set, or else by what the terminal
    reported last time: the first paint does not wait for its reply."""
    if colors := os.environ.get("COLORFGBG", ""):
        return colors.rpartition(";")[2] in ("7", "15")
    return _terminal() in read_state().light_terminals


def remember(is_light: bool) -> None:
    """Keep what the terminal reported for the next start; blocks."""
    name, known = _terminal(), read_state().light_terminals
    if is_light != (name in known):
        others = tuple(one for one in known if one != name)
        with contextlib.suppress(OSError):  # then it is not remembered
            update_state({"light_terminals": (name, *others)[:_MAX_KEPT] if is_light else others})


def _terminal() -> str:
    return os.environ.get("TERM_PROGRAM", "") or os.environ.get("TERM", "")


def background_reported(sequence: str) -> BackgroundReported | None:
    if (reply := _REPLY.fullmatch(sequence)) is None:
        return None
    red, green, blue = (int(part, 16) / (16 ** len(part) - 1) for part in reply.groups()[:3])
    return BackgroundReported(0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.5)


_TRUECOLOR = frozenset({"alacritty", "contour", "foot", "foot-extra", "rio", "wezterm", "xterm-ghostty", "xterm-kitty"})


def set_colorterm() -> None:
    """Set `COLORTERM`, which Textual reads, if it is missing and `TERM` names such a terminal."""
    term = os.environ.get("TERM", "").lower()
    if not os.environ.get("COLORTERM") and (term in _TRUECOLOR or term.endswith("-direct")):
        os.environ["COLORTERM"] = "truecolor"
