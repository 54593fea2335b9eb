"""Divides an answer that is being written into sentences to read aloud, and turns each into words.

Markdown's blocks decide first: code and display formulas are announced and skipped, headings, list items and table rows
are lines of their own. Each line is divided by sentencex, and a sentence is handed out with the first character of the
next one. Units, operators and symbols that a voice would swallow or misread become words; plain numbers, ranges, dates
and amounts of money stay, which every engine reads.
"""

from __future__ import annotations

import contextlib
import re
import unicodedata
from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

from markdown_it import MarkdownIt
from markdown_it.token import Token
from mdit_py_plugins.dollarmath import dollarmath_plugin
from pygments.lexers import find_lexer_class_by_name
from pygments.util import ClassNotFound
from sentencex import segment  # pyright: ignore[reportAttributeAccessIssue] (compiled)

from cpuchat.base.text import clean

_SCALES = {
    "k": "kilo", "K": "kilo", "M": "mega", "G": "giga", "T": "tera", "P": "peta", "m": "milli", "c": "centi",
    "µ": "micro", "u": "micro", "n": "nano", "Ki": "kibi", "Mi": "mebi", "Gi": "gibi", "Ti": "tebi",
}  # fmt: skip
_UNITS = {
    f"{scale}{symbol}": f"{_SCALES.get(scale, '')}{name}"
    for symbol, name, scales in (
        ("B", "byte", "k K M G T P Ki Mi Gi Ti"), ("bit", "bit", "k M G"), ("s", "second", "m µ u n"),
        ("Hz", "hertz", "k M G T"), ("W", "watt", "m k M G"), ("Wh", "watt hour", "k"), ("J", "joule", "k"),
        ("V", "volt", "m k"), ("m", "meter", "k c m µ n"), ("g", "gram", "k m"), ("FLOPS", "flops", "G T"),
        ("FLOP", "flop", "G T"),
    )
    for scale in ("", *scales.split())
} | {
    "MT": "megatransfer", "GT": "gigatransfer", "min": "minute", "h": "hour", "tok": "token", "token": "token",
    "tokens": "token", "req": "request", "%": "percent", "°C": "degree Celsius", "°F": "degree Fahrenheit",
}  # fmt: skip
_PER = {
    "s": "second", "ms": "millisecond", "min": "minute", "h": "hour", "day": "day", "month": "month", "year": "year",
    "tok": "token", "token": "token", "pass": "pass", "core": "core", "W": "watt",
}  # fmt: skip


def _one_of(words: Sequence[str] | dict[str, str]) -> str:
    return "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))


_WITH_UNIT = re.compile(
    rf"(?<![\w.])(\d+(?:,\d{{3}})*(?:\.\d+)?)([ \u00a0\u202f\u2009-]?)({_one_of(_UNITS)})(?:/({_one_of(_PER)}))?"
    r"(?![\w/²³])"
)
_UNIT_ALONE = re.compile(rf"(?<![\w.])({_one_of([unit for unit in _UNITS if len(unit) > 1])})/({_one_of(_PER)})(?!\w)")
_BEFORE_UNITS = tuple((re.compile(pattern), words) for pattern, words in (
    (r"(?<=\d)[\u00a0\u202f\u2009'’](?=\d{3}(?!\d))", ""), (r"(?<=\d)\s?[–—]\s?(?=\d)", " to "),
    (r"(?<=[\d)]) ?[-−–] ?(?=[\d(][\d.,)]*\s?=)|(?<=\)) [-−–] (?=[\d(])", " minus "),
    (r"(?<=\d) / (?=\d)|(?<=\d)/(?=\d[\d.,]*\s?=)|(?<== \d)/(?=\d)", " over "),
))  # fmt: skip
_SYMBOLS = tuple((re.compile(pattern), words) for pattern, words in (
    (r"(?<![\w.])(\d+(?:\.\d+)?)[eE]-0*(\d{1,3})(?!\w)", r"\1 times 10 to the minus \2"),
    (r"(?<![\w.])(\d+(?:\.\d+)?)[eE]\+?0*(\d{1,3})(?!\w)", r"\1 times 10 to the \2"),
    (r"(?<=[\w)])\s?[×✕·⋅*]\s?(?=[\w(])", " times "), (r"(?<=\d)(?:\s?[×✕]|x(?!\w))", " times"),
    (r"(?<=\d)k(?!\w)", " thousand"), (r"\s?\^\s?\{?2\}?(?!\w)", " squared "),
    (r"(?<=[\w)])\s?\^\s?[({]?(\w+)[)}]?", r" to the power of \1 "),
    (r"(?<![\w-])--(?=[A-Za-z])", ""), (r"(?<![\w)])[-−](?=\d)|−", " minus "), (r"(?<=\w)\s?–\s?(?=\d)", " to "),
    (r"(?<!\w)([A-G])#(?!\w)", r"\1 sharp"), (r"(?<=[A-Za-z])\+\+(?!\w)", " plus plus"),
    (r"(?<=[\w)\s])\+(?=[\s\d])", " plus "), (r"(?<![\w&])#(?=\d)", "number "),
    (r"[!≠]==?|≠", " is not "), (r"<=>", " "), (r"<=|≤", " at most "), (r">=|≥", " at least "), (r"[-=]>|→", " to "),
    (r"⇒", ", so "), (r"≈|~(?=\s?[$€£]?\d)", " about "), (r"±", " plus or minus "), (r"÷", " divided by "),
    (r"√", " square root of "), (r"∞", " infinity "), (r"&+", " and "), (r"=+", " equals "), (r"\|", ", "),
    (r"(?<=[\w\s])\s?<\s?(?=[\d\s])", " less than "), (r"(?<=[\w\s])\s?>\s?(?=[\d\s])", " greater than "),
    (r"…", "..."), (r"(?<=\w)_(?=\w)|(?<=[A-Za-z])/(?=[A-Za-z])|[~\\<>#*^]", " "), (r"\$\$|[`\[\]{}]", ""),
))  # fmt: skip
_GREEK = re.compile(r"(?<![\u0370-\u03ff])[\u0391-\u03a1\u03a3-\u03c9](?![\u0370-\u03ff])")
_ADDRESS = re.compile(r"\b(?:https?|ftp)://(?:www\.)?([^\s/<>()\"'`:]+)[^\s<>\"'`]*?(?=[.,;:!?)]*(?:[\s<>\"'`]|$))")
_DATA = re.compile(r"(?:\bdata:[\w/+.-]+;base64,)?[A-Za-z0-9+/=_-]{80,}")  # an embedded image, a hash
_TAG = re.compile(
    r"</?(?:a|b|br|code|details|div|em|i|img|kbd|p|s|span|strong|sub|summary|sup|u)(?:\s[^<>]*)?/?>", re.I
)
_FOOTNOTE = re.compile(r"\[\^[^\]]+\]:?")
# Variation selectors, ZWJ, the keycap, skin tones.
_OF_EMOJI = re.compile("[\ufe00-\ufe0f\u200d\u20e3\U0001f3fb-\U0001f3ff\U000e0100-\U000e01ef]")
_SPACES, _BEFORE_MARK = re.compile(r"\s+"), re.compile(r"\s+([,.;:!?])")


def spoken_text(text: str) -> str:
    """Return `text` without markup that is left in it, with units, operators and symbols as words: `63 GB/s` as
    "63 gigabytes per second"; addresses by their host, no emoji.
    """
    text = _FOOTNOTE.sub("", _TAG.sub(" ", _ADDRESS.sub(lambda match: match[1].replace(".", " dot "), text)))
    text = _DATA.sub(" ", text).replace("μ", "µ")
    for pattern, words in _BEFORE_UNITS:
        text = pattern.sub(words, text)
    text = _UNIT_ALONE.sub(
        lambda match: f"{_plural(_UNITS[match[1]])} per {_PER[match[2]]}", _WITH_UNIT.sub(_unit, text)
    )
    for pattern, words in _SYMBOLS:
        text = pattern.sub(words, text)
    return _GREEK.sub(lambda match: f" {unicodedata.name(match[0]).split()[3].lower()} ", text)


def _unit(match: re.Match[str]) -> str:
    number, gap, unit, per = match.groups()
    is_name = len(unit) == 1 and unit.isalpha() and (gap == "-" or (not gap and number.endswith("0")) or unit == "B")
    if (is_name and gap != " ") or (unit == "MT" and not per):  # 7B, the 1990s
        return match[0]
    name = _UNITS[unit] if number == "1" or gap == "-" else _plural(_UNITS[unit])
    return f"{number} {name}" + (f" per {_PER[per]}" if per else "")


def _plural(unit: str) -> str:
    if unit.endswith(("hertz", "flops", "percent")):
        return unit
    return unit.replace("degree", "degrees") if unit.startswith("degree") else f"{unit}s"


def _code(text: str) -> str:
    """Return a code span as words: `read_file()` as "read file"."""
    text = re.sub(r"\(\s*\)|(?<![\w-])--?(?=[A-Za-z])|\.(?=\s)", "", text)
    text = re.sub(r"(?<=\w)[_/\\](?=\w)|(?<=[a-z])(?=[A-Z][a-z])", " ", text)
    return re.sub(r"[{}\[\]();\"'|*_]", " ", re.sub(r"(?<=[A-Za-z])\.(?=[A-Za-z])", " dot ", text))


def _spoken_inline(tokens: Sequence[Token]) -> str:
    """Return the words of a line: links by their text, images by their description, no markup."""
    words: list[str] = []
    for token in tokens:
        match token.type:
            case "text":
                words.append(token.content)
            case "code_inline":
                words.append(_code(token.content))
            case "image":
                words.append(f"Image: {token.content}" if token.content.strip() else "Image")
            case "math_inline" if "\\" not in token.content:
                words.append(f" {token.content} ")
            case "math_inline" | "math_inline_double":
                words.append("Formula")
            case "softbreak" | "hardbreak":
                words.append(" ")
    text = spoken_text(unicodedata.normalize("NFC", clean("".join(words))))
    text = "".join(character for character in text if not _is_picture(character))
    return _BEFORE_MARK.sub(r"\1", _SPACES.sub(" ", text)).strip()


def _is_picture(character: str) -> bool:
    """Return whether a character has no sound: emoji and what selects or joins them, dingbats, arrows, box drawing."""
    return ord(character) > 0x7F and (
        unicodedata.category(character) in ("So", "Cn", "Co") or _OF_EMOJI.match(character) is not None
    )


def spoken_inline(text: str) -> str:
    """Return the words of a line of Markdown."""
    (token,) = _parser().parseInline(_with_dollars(text))
    return _spoken_inline(token.children or [])


@cache
def _parser() -> MarkdownIt:
    parser = MarkdownIt("gfm-like", {"html": False, "linkify": False}).disable(["linkify", "reference"])
    return parser.use(dollarmath_plugin, allow_labels=False, allow_space=False, allow_digits=False, double_inline=True)


def _with_dollars(text: str) -> str:
    """Return `text` with dollars around its formulas, line by line as before."""
    return re.sub(r"\\\( ?(.+?) ?\\\)", r"$\1$", text.replace("\\[", "$$").replace("\\]", "$$"))


def announce_code(info: str) -> str:
    """Return what is said in place of a code block."""
    language = info.split()[0] if info.strip() else ""
    with contextlib.suppress(ClassNotFound):
        language = find_lexer_class_by_name(language).name if language else ""
    named = language and language != "Text only"
    return f"Code block, {spoken_text(language[0].upper() + language[1:]).strip()}." if named else "Code block."


class _Line(NamedTuple):
    """Words of a line. `kind`: prose can be read while it is written, a row only when it is complete, and a notice when
    it is known."""

    words: str
    kind: str = "prose"


def _lines(tokens: Sequence[Token], n_complete: int) -> Iterator[_Line]:
    """Yield the lines of a document, of whose source as many lines are complete."""
    prefix, head, cells = "", "", None
    for token in tokens:
        match token.type:
            case "fence" if token.map and token.map[0] < n_complete:
                prefix = ""
                yield _Line(announce_code(token.info), "notice")
            case "code_block":
                yield _Line(announce_code(""), "row")
            case "math_block":
                is_known = token.content.startswith("\n") and token.map is not None and token.map[0] < n_complete
                yield _Line("Formula.", "notice" if is_known else "row")
            case "list_item_open":
                prefix = f"{token.info}: " if token.info else ""
            case "thead_open":
                head = "Table: "
            case "tr_open":
                cells = list[str]()
            case "tr_close":
                yield _Line(f"{head}{', '.join(filter(None, cells or []))}", "row")
                head, cells = "", None
            case "inline" if cells is not None:
                cells.append(_spoken_inline(token.children or []))
            case "inline":
                words = _spoken_inline(token.children or [])
                for mark, said in (("x ", "Done: "), ("X ", "Done: "), ("  ", "To do: ")):
                    if token.content.startswith(f"[{mark[0]}] "):
                        words = said + words.removeprefix(mark.strip()).strip()
                yield _Line(prefix + words, "row" if token.content.startswith("|") else "prose")
                prefix = ""


MAX_CHARS = 280
"""A sentence that is longer is divided at a comma or a space: it would keep the listener waiting."""
_MAX_OPEN = 8_000
"""Characters of a block after which what there is of it is read as if it were complete."""
_MAY_END = re.compile(r"\n|[.!?…।॥؟۔][^\w\s]{0,8}\s{1,8}\S{1,80}\s|[。！？]\S")
_WORD = re.compile(r"[A-Za-z0-9.'’-]*$")
_BREAKS = (re.compile(r"[;:—–,][\"'”’)\]]*\s"), re.compile(r"\s"))


def split_sentences(text: str) -> list[str]:
    """Return the sentences of a line, and parts of long ones; together they are the line."""
    found: list[str] = []
    for sentence in segment("en", text):
        while len(sentence) > MAX_CHARS:
            breaks = (list(one.finditer(sentence, MAX_CHARS // 3, MAX_CHARS)) for one in _BREAKS)
            cut = next((ends[-1].end() for ends in breaks if ends), MAX_CHARS)
            found.append(sentence[:cut])
            sentence = sentence[cut:]
        found.append(sentence)
    return found


class SentenceSplitter:
    """Takes text as it arrives and returns what can be read aloud."""

    def __init__(self) -> None:
        self._text = ""  # from the start of the block, or the item of a list, that is being written
        self._parsed = 0  # characters of it that were looked at
        self._n_read = 0  # of its lines
        self._at = 0  # characters of the next line that were read

    def feed(self, text: str) -> list[str]:
        """Return the sentences that `text` completes."""
        before = len(self._text)
        self._text += text.replace("\r\n", "\n")
        ends = (match.end() > before for match in _MAY_END.finditer(self._text, max(0, before - MAX_CHARS // 4)))
        if not any(ends) and len(self._text) - self._parsed < 4 * MAX_CHARS:
            return []
        found = self._take()
        self._parsed = len(self._text)
        return found + self.flush() if len(self._text) > _MAX_OPEN else found

    def flush(self) -> list[str]:
        """Return what is left at the end of the text."""
        found = self._take(at_end=True)
        self._text, self._parsed, self._n_read, self._at = "", 0, 0, 0
        return found

    def _take(self, *, at_end: bool = False) -> list[str]:
        text = self._text if at_end else _settled(self._text)
        tokens = _parser().parse(_with_dollars(text))
        n_complete = text.count("\n") + at_end
        start = next((at for at in range(len(tokens) - 1, -1, -1) if _is_start(tokens[at])), 0)
        lines = list(_lines(tokens, n_complete))
        n_before = len(lines) if at_end else sum(1 for _ in _lines(tokens[:start], n_complete))
        found: list[str] = []
        for number, line in enumerate(lines[self._n_read :], self._n_read):
            words = line.words[self._at :]
            if number >= n_before and number == len(lines) - 1 and line.kind != "notice":  # it may go on
                known = words if text[-1:].isspace() else _WORD.sub("", words)
                whole = split_sentences(known)[:-1] if line.kind == "prose" else []
                found += whole
                self._at += sum(map(len, whole))
                break
            *sentences, last = split_sentences(words) or [""]
            found += [*sentences, _closed(last)]
            self._n_read, self._at = number + 1, 0
        if tokens and not at_end:
            self._n_read -= n_before
            self._drop(tokens[start])
        return [one.strip() for one in found if any(character.isalnum() for character in one)]

    def _drop(self, last: Token) -> None:
        """Forget what is before the last block, or the last item of a list, and the code of one."""
        start = last.map[0] if last.map else 0
        lines = self._text.split("\n")[start:]
        if last.type == "fence" and len(lines) > 1 and not _is_closed(last, lines):
            lines = [lines[0], lines[-1]]
        self._text = "\n".join(lines)


def _is_start(token: Token) -> bool:
    is_block = not token.level and token.nesting >= 0
    return token.map is not None and (is_block or (token.level, token.type) == (1, "list_item_open"))


def _is_closed(fence: Token, lines: Sequence[str]) -> bool:
    """Return whether a fence is closed, of whose source these are the lines, and what follows it."""
    start, end = fence.map or (0, 0)
    last = lines[end - start - 1].strip()
    return end - start > 1 and last.startswith(fence.markup) and not last.strip(fence.markup[0])


def _settled(text: str) -> str:
    """Return `text` up to a code span, link or formula that is not closed yet, unless it is open for long."""
    paragraph = text[text.rfind("\n\n") + 1 :]
    for opening, closing in (("`", "`"), ("$$", "$$"), ("[", "]"), ("](", ")"), ("\\(", "\\)")):
        at = paragraph.rfind(opening)
        is_open = paragraph.count(opening) % 2 > 0 if opening == closing else paragraph.rfind(closing) < at
        if at >= 0 and is_open and len(paragraph) - at < MAX_CHARS // 2 and "```" not in paragraph:
            return text[: len(text) - len(paragraph) + at]
    return text


def _closed(text: str) -> str:
    """Return a heading or an item with an end, so that the voice falls."""
    text = text.strip()
    return text if not text or text.rstrip("\"'”’) ")[-1:] in ".!?…:;,।॥؟۔。！？" else f"{text}."
