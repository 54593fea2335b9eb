"""What a terminal sends besides keys: its background color, asked for with OSC 11 and never waited for, and pastes,
taken out as a whole. And terminals that show all colors but do not say so over SSH, which forwards TERM alone.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable
from time import monotonic

from textual._xterm_parser import XTermParser
from textual.events import Paste
from textual.message import Message

from cpuchat.base.processes import run_in_daemon_thread
from cpuchat.config.settings import read_state, update_state

QUERY = "\x1b]11;?\x1b\\"
_PART = r"([0-9a-fA-F]{1,4})"
_REPLY = re.compile(rf"\x1b\]11;rgba?:{_PART}/{_PART}/{_PART}(?:/{_PART})?(?:\x07|\x1b\\)")
_BEGUN = re.compile(r"\x1b(?:\](?:1(?:1(?:;[^\x07\x1b]{0,40}\x1b?)?)?)?|\[(?:2(?:00?)?)?)\Z")
_PASTE, _PASTED = "\x1b[200~", "\x1b[201~"  # around a pasted text
_ESCAPE = re.compile(r"\x1b\Z")
_HOLD_SECONDS = 0.1  # for the rest of a reply; as Textual waits for that of a key
_MOST_KEPT = 16  # names of terminals
_SOON_SECONDS = 3.0  # an Esc alone may be the beginning of a reply for so long


class BackgroundReported(Message):
    """The terminal has replied."""

    def __init__(self, is_light: bool) -> None:
        super().__init__()
        self.is_light = is_light


def is_light_at_start() -> bool:
    """Return whether the background is light by `COLORFGBG`, which some terminals set, or else by what the terminal
    reported last time: the first paint does not wait for its reply.
    """
    if colors := os.environ.get("COLORFGBG", ""):
        return colors.rpartition(";")[2] in ("7", "15")
    return _terminal() in read_state().light_terminals


async def remember(is_light: bool) -> None:
    """Keep what the terminal reported for the next start."""
    await run_in_daemon_thread(lambda: _remember(is_light))


def _remember(is_light: bool) -> None:
    name, known = _terminal(), read_state().light_terminals
    if is_light != (name in known):
        others = tuple(one for one in known if one != name)
        with contextlib.suppress(OSError):  # then it is not remembered
            update_state({"light_terminals": (name, *others)[:_MOST_KEPT] if is_light else others})


def _terminal() -> str:
    return os.environ.get("TERM_PROGRAM", "") or os.environ.get("TERM", "")


class BackgroundParser(XTermParser):
    """As Textual's, which takes the reply for keys, and looks at each character of a paste: seconds for megabytes."""

    def __init__(self, debug: bool = False, clock: Callable[[], float] = monotonic) -> None:
        super().__init__(debug)
        self._clock = clock
        self._started = clock()
        self._held = ""
        self._held_at = 0.0
        self._paste: list[str] | None = None  # its parts, while one comes in

    def feed(self, data: str) -> Iterable[Message]:
        if not data:  # the end
            yield from super().feed(data)
            return
        if self._paste is not None:
            yield from self._feed_paste(data)
            return
        data, self._held = self._held + data, ""
        before, begins, pasted = data.partition(_PASTE)
        if begins:
            data, self._paste = before, []
        if reply := _REPLY.search(data):
            yield BackgroundReported(_is_light(*reply.groups()[:3]))
            data = data[: reply.start()] + data[reply.end() :]
            self._started = float("-inf")  # there will be no other one soon
        begun = _BEGUN.search(data)
        if begun is None and self._clock() - self._started < _SOON_SECONDS:
            begun = _ESCAPE.search(data)
        if begun is not None:
            data, self._held, self._held_at = data[: begun.start()], begun[0], self._clock()
        if data:
            yield from super().feed(data)
        if begins:
            yield from self._feed_paste(pasted)

    def _feed_paste(self, data: str) -> Iterable[Message]:
        assert self._paste is not None
        end = "".join(self._paste[-len(_PASTED) :])[1 - len(_PASTED) :]  # the mark may come in two parts
        self._paste.append(data)
        if _PASTED in end + data:
            text, _, after = "".join(self._paste).partition(_PASTED)
            self._paste = None
            yield Paste(text.replace("\0", ""))
            if after:
                yield from self.feed(after)

    def tick(self) -> Iterable[Message]:
        if self._held and self._clock() - self._held_at > _HOLD_SECONDS:
            data, self._held = self._held, ""
            yield from super().feed(data)
        yield from super().tick()


def _is_light(*parts: str) -> bool:
    red, green, blue = (int(part, 16) / (16 ** len(part) - 1) for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.5


_TRUECOLOR = frozenset({"alacritty", "contour", "foot", "foot-extra", "rio", "wezterm", "xterm-ghostty", "xterm-kitty"})


def set_colorterm() -> None:
    """Set `COLORTERM`, which Textual reads, if it is missing and `TERM` names such a terminal."""
    term = os.environ.get("TERM", "").lower()
    if not os.environ.get("COLORTERM") and (term in _TRUECOLOR or term.endswith("-direct")):
        os.environ["COLORTERM"] = "truecolor"
