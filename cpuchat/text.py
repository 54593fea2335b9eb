"""Makes untrusted text safe to show: nothing in it can steer the terminal or reorder what is read.

Model output, file names and chat titles all pass through `clean` before they reach a terminal. What is replaced stays
visible (an escape character becomes ␛), so that nothing disappears unseen.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

# Controls (but not \n and \t), DEL, C1 · surrogates · what can reorder, hide or annotate text · line separators.
_UNSAFE = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"
    "\ud800-\udfff"
    "\u00ad\u061c\u180e\u200b\u200e\u200f\u2028\u2029\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f"
    "]"
)
# Format characters without a form of their own, about whose width terminals disagree: left out.
_INVISIBLE = frozenset(
    [0xAD, 0x061C, 0x180E, 0x200B, 0x200E, 0x200F, *range(0x2060, 0x2066), 0xFEFF, *range(0xE0000, 0xE0080)]
)


def _shown(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)  # the "control pictures" block: ␀ … ␛ … ␟
    if code == 0x7F:
        return "␡"
    if 0xD800 <= code <= 0xDFFF:
        return "\ufffd"
    if code in (0x2028, 0x2029):
        return "\n"
    if code in _INVISIBLE:
        return ""
    return f"‹U+{code:04X}›"  # C1 controls, bidirectional embeddings, overrides and isolates, annotations


def clean(text: str) -> str:
    """`text` without anything that a terminal acts on.

    Kept: newlines, tabs, ZWJ and ZWNJ (emoji, Indic and Persian script), variation selectors.
    `\\r\\n` becomes `\\n`. A sequence cut in two by streaming needs no state, since every control character is
    replaced by itself; only a `\\r\\n` cut in two does, for which there is `Cleaner`.
    """
    if _UNSAFE.search(text) is None:
        return text
    return _UNSAFE.sub(_shown, text.replace("\r\n", "\n"))


def clean_line(text: str) -> str:
    """`clean` for titles and other one-line texts: line breaks and tabs become spaces."""
    return " ".join(clean(text).split())


class Cleaner:
    """`clean` over a stream: any cutting into chunks gives the same text."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, chunk: str) -> str:
        chunk = self._held + chunk
        self._held = "\r" if chunk.endswith("\r") else ""
        return clean(chunk[:-1] if self._held else chunk)

    def flush(self) -> str:
        held, self._held = self._held, ""
        return clean(held)


def is_safe(texts: Iterable[str]) -> bool:
    """True if no character of `texts` needs cleaning; tabs and newlines do not count as unsafe."""
    return all(_UNSAFE.search(text) is None for text in texts)
