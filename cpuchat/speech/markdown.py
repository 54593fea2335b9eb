"""Turns the Markdown of one sentence into words."""

from __future__ import annotations

import html
import re
import unicodedata

from cpuchat.speech.symbols import spoken_symbols
from cpuchat.text import clean

_ESCAPED = re.compile(r"\\([!-/:-@\[-`{-~])")
_CODE = re.compile(r"(`+)(.+?)\1")
_IMAGE = re.compile(r"!\[([^\]]*)\](?:\([^)]*\)|\[[^\]]*\])")
_LINK = re.compile(r"\[([^\]]+)\](?:\((?:[^()]|\([^)]*\))*\)|\[[^\]]*\])")
_FOOTNOTE = re.compile(r"\[\^[^\]]+\]:?")
_ADDRESS = re.compile(
    r"<?\b(?:https?|ftp)://(?:www\.)?([^\s/<>()\"'`:]+)[^\s<>\"'`]*?(?=>?[.,;:!?)]*(?:[\s<>\"'`]|$))>?"
)
_TAG = re.compile(
    r"</?(?:a|abbr|b|br|center|code|dd|del|details|div|dl|dt|em|font|h[1-6]|hr|i|img|ins|kbd|li|mark|ol|p|pre|q|s|samp|"
    r"small|span|strong|sub|summary|sup|table|tbody|td|th|thead|tr|u|ul)(?:\s[^<>]*)?/?>",
    re.IGNORECASE,
)
_STRONG = re.compile(r"\*\*+|~~|(?<!\w)__+(?=\S)|(?<=\S)__+(?!\w)")
_EMPHASIS = re.compile(r"(?<![\w*])\*(?=[^\s*])|(?<=[^\s*])\*(?![\w*])|(?<!\w)_(?=\S)|(?<=\S)_(?!\w)")
_FORMULA = re.compile(r"\\\((.+?)\\\)|(?<![\w$])\$(?=[^\s$\d]|\d[^\s$]*[\\^_=+])([^$\n]*?[^\s$\\])\$(?![\w$])")
_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")
_TEX_TEXT = re.compile(r"\\(?:text|mathrm|mathbf|operatorname)\{([^{}]*)\}")
_TEX = {
    "times": "times", "cdot": "times", "le": "at most", "leq": "at most", "ge": "at least", "geq": "at least",
    "neq": "is not", "ne": "is not", "approx": "about", "pm": "plus or minus", "sqrt": "square root of", "to": "to",
    "rightarrow": "to", "infty": "infinity", "sum": "sum of", "int": "integral of", "in": "in", "left": "", "right": "",
    "quad": "", "qquad": "",
}  # fmt: skip
_TEX_WORD = re.compile(r"\\([A-Za-z]+)")
# Variation selectors, ZWJ, the keycap, skin tones.
_OF_EMOJI = re.compile("[\ufe00-\ufe0f\u200d\u20e3\U0001f3fb-\U0001f3ff\U000e0100-\U000e01ef]")
_SPACES = re.compile(r"\s+")
_BEFORE_MARK = re.compile(r"\s+([,.;:!?])")


def spoken_inline(text: str) -> str:
    """Return the words of a sentence: links by their text, addresses by their host, no markup and no emoji."""
    text = unicodedata.normalize("NFC", clean(text)).replace("\n", " ")
    text = _FORMULA.sub(lambda match: f" {_formula(match[1] or match[2])} ", text)
    text = _CODE.sub(lambda match: _code(match[2]), text)
    text = _IMAGE.sub(lambda match: f"Image: {match[1]}" if match[1].strip() else "Image", text)
    text = _FOOTNOTE.sub("", _LINK.sub(r"\1", text))
    text = _ADDRESS.sub(lambda match: match[1].replace(".", " dot "), text)
    text = html.unescape(_TAG.sub(" ", text))
    text = _EMPHASIS.sub("", _STRONG.sub("", text))
    text = spoken_symbols(_ESCAPED.sub(r"\1", text))
    text = "".join(character for character in text if not _is_picture(character))
    return _BEFORE_MARK.sub(r"\1", _SPACES.sub(" ", text)).strip()


def _code(text: str) -> str:
    """Return a code span as words: `read_file()` as "read file"."""
    text = re.sub(r"\(\s*\)", "", text)
    text = re.sub(r"(?<=\w)[_/\\](?=\w)", " ", text)
    text = re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", " ", text)  # camelCase
    text = re.sub(r"(?<=[A-Za-z])\.(?=[A-Za-z])", " dot ", text)
    text = re.sub(r"(?<![\w-])--?(?=[A-Za-z])", "", text)
    return re.sub(r"[{}\[\]();\"'|*_`]", " ", text)


def _formula(text: str) -> str:
    """Return an inline formula as words, as far as they are known."""
    text = _TEX_TEXT.sub(r" \1 ", text)
    text = _FRACTION.sub(r" \1 over \2 ", text)
    text = _TEX_WORD.sub(lambda match: f" {_TEX.get(match[1], match[1])} ", text)
    text = re.sub(r"\^\{?2\}?", " squared ", text)
    text = re.sub(r"\^\{?3\}?", " cubed ", text)
    text = re.sub(r"\^\{?([^{}\s]+)\}?", r" to the power of \1 ", text)
    return re.sub(r"[{}_\\*]", " ", text)


def _is_picture(character: str) -> bool:
    """Return whether a character has no sound: emoji and what selects or joins them, dingbats, arrows, box drawing."""
    return ord(character) > 0x7F and (
        unicodedata.category(character) in ("So", "Cn", "Co") or _OF_EMOJI.match(character) is not None
    )
