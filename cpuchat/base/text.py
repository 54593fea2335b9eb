"""Makes untrusted text safe to display: it cannot control the terminal or reorder what is read.

Two gates stand before the terminal, and everything passes one of them: `tui.terminal.driver` for what the app draws,
`cli.output` for text that a command prints. Names and messages also go through `clean_line` and `clean` before layout,
so that replaced characters stay visible (an escape character becomes ␛) and have the right width.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

TAB_SIZE = 4

# Controls (but not \n and \t), DEL, C1 · surrogates · what can reorder, hide or annotate text · line separators.
_SET = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f"
    "\ud800-\udfff"
    "\u00ad\u061c\u180e\u200b\u200e\u200f\u2028\u2029\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f"
)
# ZWJ and the emoji selector change the width of their neighbors, so they are kept only where they can have a meaning:
# between, or after, characters beyond ASCII.
_JOINED = rf"[^\x00-\x7f\s\u200d\ufe0f{_SET}]"
_UNSAFE = re.compile(rf"[{_SET}]|(?<!{_JOINED})(?<!{_JOINED}\ufe0f)\u200d|\u200d(?!{_JOINED})|(?<!{_JOINED})\ufe0f")
# Format characters without a form of their own, about whose width terminals disagree: left out.
_INVISIBLE = {0xAD, 0x61C, 0x180E, 0x200B, 0x200D, 0x200E, 0x200F, *range(0x2060, 0x2066), 0xFE0F, 0xFEFF}
_INVISIBLE.update(range(0xE0000, 0xE0080))


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


def folded(text: str) -> str:
    """Return `text` for comparing names: in lower case, and composed, as macOS and some disks spell `ä` with two
    characters."""
    return unicodedata.normalize("NFC", text).lower()


def clean(text: str) -> str:
    """Return `text` without anything that a terminal acts on.

    Kept: newlines, tabs (see `expand_tabs`), ZWJ and ZWNJ (emoji, Indic and Persian script), variation selectors.
    `\\r\\n` becomes `\\n`. Every control character is replaced separately, so an escape sequence split by streaming
    does no harm; `Cleaner` handles pairs that belong together."""
    if _UNSAFE.search(text) is None:
        return text
    return _UNSAFE.sub(_shown, text.replace("\r\n", "\n"))


def clean_line(text: str) -> str:
    """Clean a one-line text such as a title: line breaks and tabs become spaces."""
    return " ".join(clean(text).split())


def cut(text: str, max_length: int) -> str:
    """Return the text in at most so many characters, with … in the place of the rest."""
    return text if len(text) <= max_length else f"{text[: max_length - 1]}…"


class Cleaner:
    """Cleans a stream: any division into chunks gives the same text."""

    def __init__(self) -> None:
        self._before = ""
        self._held = ""

    def feed(self, chunk: str) -> str:
        text = self._held + chunk
        # These depend on what follows.
        self._held = text[-1] if text.endswith(("\r", "\u200d")) else ""
        return self._clean(text[:-1] if self._held else text)

    def flush(self) -> str:
        text, self._held = self._held, ""
        return self._clean(text)

    def _clean(self, text: str) -> str:
        known = clean(self._before)
        shown = clean(self._before + text)[len(known) :]
        self._before = (self._before + text)[-2:]
        return shown


def is_safe(texts: Iterable[str]) -> bool:
    """Return whether no character of `texts` needs cleaning; tabs and newlines are safe."""
    return all(_UNSAFE.search(text) is None for text in texts)


def replace_unsafe(text: str, shown: Callable[[str], str]) -> str:
    """Replace each character that `clean` would replace by `shown(character)`."""
    return _UNSAFE.sub(lambda match: shown(match[0]), text)


def expand_tabs(line: str) -> str:
    """Expand tabs to spaces, with stops every `TAB_SIZE` characters."""
    return line.expandtabs(TAB_SIZE) if "\t" in line else line


class _Kinds(dict[int, str]):
    """For `str.translate`: what each character is to its neighbors, a letter for each property of UAX #29."""

    def __missing__(self, code: int) -> str:
        kind = next((kind for kind, first, last in _RANGES if first <= code <= last), "")
        if 0xAC00 <= code <= 0xD7A3:  # Korean syllables, which an ending may follow if they have none
            kind = "T" if (code - 0xAC00) % 28 else "V"
        category = unicodedata.category(chr(code))
        if not kind and category == "Lo" and 0x900 <= code <= 0x17FF:
            kind = "c"
        self[code] = kind = kind or _CATEGORIES.get(category, ".")
        return kind


_CATEGORIES = dict(Mn="x", Me="x", Mc="s", So="e", Sm="e", Cn="e", Cc="n", Cf="n", Cs="n", Zl="n", Zp="n")
_RANGES = (
    *(("k", one, one) for one in (0x94D, 0x9CD, 0xACD, 0xB4D, 0xC4D, 0xD4D, 0x1039, 0x17D2)),  # joins consonants
    ("x", 0x200C, 0x200C), ("x", 0xFF9E, 0xFF9F), ("x", 0x1F3FB, 0x1F3FF), ("x", 0xE0020, 0xE007F),  # skin tones, tags
    ("z", 0x200D, 0x200D), ("r", 0x1F1E6, 0x1F1FF), ("s", 0xE33, 0xE33), ("s", 0xEB3, 0xEB3),  # r: two are a flag
    ("l", 0x1100, 0x115F), ("v", 0x1160, 0x11A7), ("t", 0x11A8, 0x11FF),  # Hangul: initials, vowels, finals
    ("l", 0xA960, 0xA97C), ("v", 0xD7B0, 0xD7C6), ("t", 0xD7CB, 0xD7FB), (".", 0x102B, 0x102C), (".", 0x1038, 0x1038),
)  # fmt: skip
_KINDS = _Kinds()
_CLUSTER = re.compile("n|(?:rr|l*(?:v+|Vv*|T)t*|l+|t+|e(?:[xk]*ze)*|c(?:[xz]*k[xkz]*c)*|.)[xskz]*")


@lru_cache(16)
def clusters(line: str) -> tuple[int, ...]:
    """Return where the grapheme clusters of `line` begin, what a reader takes for one character, and where it ends.

    The rules are those of https://unicode.org/reports/tr29/ but for some rare signs."""
    return *(match.start() for match in _CLUSTER.finditer(line.translate(_KINDS))), len(line)


def cluster_edge(line: str, at: int, forward: bool = False) -> int:
    """Return `at`, or if it is inside of a grapheme cluster, where that begins; where it ends if `forward`."""
    if line.isascii():
        return at
    starts, at = clusters(line), min(at, len(line))
    return starts[bisect_left(starts, at)] if forward else starts[bisect_right(starts, at) - 1]


def common_prefix(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Return the length of the longest common prefix of two lists, arrays or byte strings (both of one kind)."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    # Comparing whole slices is far faster than a loop.
    while low < high:  # a[:low] is common, a[:high] is not
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def without_password(address: str) -> str:
    """Return an address for messages, valid or not."""
    scheme, separator, rest = address.rpartition("://")
    return clean_line(f"{scheme}{separator}{rest.rpartition('@')[2]}")[:80]
