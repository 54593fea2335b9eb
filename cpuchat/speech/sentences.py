"""Divides an answer that is being written into sentences to read aloud, and turns each into words.

Line by line: code and display formulas are announced and skipped; headings, list items and table rows are sentences of
their own. Other lines are divided by sentencex, and a sentence is handed out with the first word of the next one. Units
and the usual operators become words; numbers, ranges, dates and amounts of money stay, which a voice reads itself.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import cache

from markdown_it import MarkdownIt
from markdown_it.token import Token
from mdit_py_plugins.dollarmath import dollarmath_plugin
from sentencex import segment  # pyright: ignore[reportAttributeAccessIssue] (compiled)

from cpuchat.base.text import clean

_SCALES = {
    "": "", "k": "kilo", "K": "kilo", "M": "mega", "G": "giga", "T": "tera", "m": "milli", "µ": "micro", "n": "nano",
    "Ki": "kibi", "Mi": "mebi", "Gi": "gibi", "Ti": "tebi",
}  # fmt: skip
_BASES = {
    "B": "byte", "bit": "bit", "s": "second", "Hz": "hertz", "W": "watt", "Wh": "watt hour", "J": "joule", "V": "volt",
    "m": "meter", "g": "gram", "FLOPS": "flops",
}  # fmt: skip
_UNITS = {f"{scale}{base}": f"{_SCALES[scale]}{name}" for scale in _SCALES for base, name in _BASES.items()} | {
    "GT": "gigatransfer", "min": "minute", "h": "hour", "tok": "token", "token": "token", "tokens": "token",
    "%": "percent", "°C": "degree Celsius",
}  # fmt: skip
_WITH_UNIT = re.compile(
    r"(?<![\w.])(?:(\d+(?:,\d{3})*(?:\.\d+)?)([ \u00a0\u202f]?))?"
    rf"({'|'.join(sorted(_UNITS, key=len, reverse=True))})(?:/([a-z]{{1,5}}))?(?![\w/²³])"
)
_SYMBOLS = tuple((re.compile(pattern), words) for pattern, words in (
    (r"(?<=\d)\s?[–—]\s?(?=\d)", " to "), (r"(?<=[\w)])\s?[×·*]\s?(?=[\w(])", " times "),
    (r"(?<=\d)(?:\s?×|x(?!\w))", " times"), (r"\^2(?!\w)", " squared"), (r"(?<=[\w)])\^", " to the power of "),
    (r"(?<![\w)])[-−](?=\d)", " minus "), (r"(?<=[\w)\s])\+(?=[\s\d])", " plus "), (r"!=|≠", " is not "),
    (r"<=|≤", " at most "), (r">=|≥", " at least "), (r"[-=]>|→", " to "), (r"≈|~(?=\s?[$€£]?\d)", " about "),
    (r"&+", " and "), (r"=+", " equals "), (r"\|", ", "), (r"(?<=\s)<(?=[\s\d])", " less than "),
    (r"(?<!\w)([A-G])#(?!\w)", r"\1 sharp"), (r"(?<=\s)>(?=[\s\d])", " greater than "),
    (r"(?<=[A-Za-z])/(?=[A-Za-z])|(?<=\w)_(?=\w)|[~\\<>#*^]", " "), (r"[`\[\]{}]", ""),
))  # fmt: skip
_ADDRESS = re.compile(r"\b(?:https?|ftp)://(?:www\.)?([^\s/<>()\"'`:]+)[^\s<>\"'`]*?(?=[.,;:!?)]*(?:[\s<>\"'`]|$))")
_DATA = re.compile(r"(?:\bdata:[\w/+.-]+;base64,)?[A-Za-z0-9+/=_-]{80,}")  # an embedded image, a hash
_TAG_OR_FOOTNOTE = re.compile(r"</?[a-z]{1,10}\d?(?:\s[^<>=]*=[^<>]*|\sopen)?\s?/?>|\[\^[^\]]+\]:?", re.I)
# Variation selectors, ZWJ, the keycap, skin tones.
_OF_EMOJI = re.compile("[\ufe00-\ufe0f\u200d\u20e3\U0001f3fb-\U0001f3ff\U000e0100-\U000e01ef]")
_SPACES, _BEFORE_MARK = re.compile(r"\s+"), re.compile(r"\s+([,.;:!?])")


def _unit(match: re.Match[str]) -> str:
    number, gap, unit, per = match.groups()
    if (not gap and len(unit) == 1 and unit.isalpha()) or not (number or per):  # 7B, the 1990s
        return match[0]
    name = _UNITS[unit]
    if number != "1" and not name.endswith(("hertz", "flops", "percent")):
        name = name.replace("degree", "degrees") if name.startswith("degree") else f"{name}s"
    return f"{number or ''} {name}".lstrip() + (f" per {_UNITS.get(per, per)}" if per else "")


def _words(tokens: Sequence[Token]) -> str:
    """Return what is read of a line: links by their text, images by their description, no markup."""
    words: list[str] = []
    for token in tokens:
        match token.type:
            case "text":
                words.append(token.content)
            case "code_inline":
                code = re.sub(r"\(\)|[_/\\{}()|*]|\.(?=\s)", " ", token.content)
                words.append(re.sub(r"(?<=\w)\.(?=[A-Za-z])", " dot ", code))
            case "image":
                words.append(f"Image: {token.content}" if token.content.strip() else "Image")
            case "math_inline" if "\\" not in token.content:
                words.append(f" {token.content} ")
            case "math_inline" | "math_inline_double":
                words.append("Formula")
            case "softbreak" | "hardbreak":
                words.append(" ")
    return "".join(words)


def spoken_inline(text: str) -> str:
    """Return the words of a line of Markdown, without markup, emoji and other characters that have no sound; with
    units, operators and symbols as words: `63 GB/s` as "63 gigabytes per second"; addresses by their host."""
    dollars = re.sub(r"\\\( ?(.+?) ?\\\)", r"$\1$", text.replace("\\[", "$$").replace("\\]", "$$"))
    (token,) = _parser().parseInline(dollars)
    words = unicodedata.normalize("NFC", clean(_words(token.children or [])))
    words = _TAG_OR_FOOTNOTE.sub(" ", _ADDRESS.sub(lambda match: match[1].replace(".", " dot "), words))
    words = _WITH_UNIT.sub(_unit, _DATA.sub(" ", words).replace("μ", "µ"))
    for pattern, spoken in _SYMBOLS:
        words = pattern.sub(spoken, words)
    heard = "".join(
        one
        for one in words
        if ord(one) < 0x80 or not (unicodedata.category(one) in ("So", "Cn", "Co") or _OF_EMOJI.match(one))
    )
    return _BEFORE_MARK.sub(r"\1", _SPACES.sub(" ", heard)).strip()


@cache
def _parser() -> MarkdownIt:
    parser = MarkdownIt("gfm-like", {"html": False, "linkify": False}).disable(["linkify", "reference"])
    return parser.use(dollarmath_plugin, allow_labels=False, allow_space=False, allow_digits=False, double_inline=True)


MAX_CHARS = 280
"""A sentence that is longer is divided at a comma or a space: it would keep the listener waiting."""
_MAX_OPEN = 8_000
"""Characters of a paragraph after which what there is of it is read as if it were complete."""
_BREAKS = (re.compile(r"[;:—–,][\"'”’)\]]*\s"), re.compile(r"\s"))
_MAY_END = re.compile(r"[.!?…।॥؟۔][^\w\s]{0,8}\s{1,8}\S{1,80}\s|[。！？]\S")
_TAIL = 100  # characters: the longest match of it
_MARK = re.compile(r"\s*(?:>\s?)*\s*(?:[-*+]\s+(\[[ xX]\]\s)?|(\d{1,9})[.)]\s+|#{1,6}\s+)?")
_FENCE = re.compile(r"(`{3,}(?=[^`]*$)|~{3,}|\$\$(?!.*\$\$)|\\\[(?!.*\\\]))\s*(\S*)")
_WORD = re.compile(r"(?<![A-Za-z0-9.'’-])[A-Za-z0-9.'’-]*$")
_RULE = re.compile(r"[-*_=\s]+")
_WHOLE_LINES = ("|", "-", ":", "```", "~~~", "$$", "\\[", "#")
"""Beginnings of lines that are read when they are complete."""


class SentenceSplitter:
    """Takes text as it arrives and returns what can be read aloud."""

    def __init__(self) -> None:
        self._line = ""  # that is being written
        self._begun = False  # its beginning is part of the paragraph already
        self._paragraph = ""  # what was not read of it
        self._fence = ""  # the end of code or of a formula that is skipped
        self._in_table = self._in_list = self._in_code = False

    def feed(self, text: str) -> list[str]:
        """Return the sentences that `text` completes."""
        *lines, self._line = (self._line + text.replace("\r\n", "\n")).split("\n")
        found = [one for line in lines for one in self._take(line)]
        tail = f"{self._paragraph[-_TAIL:]} {self._line[-_TAIL - len(text) :]}"
        start = _MARK.sub("", self._line, count=1)
        is_heading = "#" in self._line[: len(self._line) - len(start)]
        is_held = is_heading or self._in_table or self._is_code(self._line) or start.startswith(_WHOLE_LINES)
        is_known = self._begun or (not is_held and len(start.strip()) > 3)
        is_long = len(self._line) + len(self._paragraph) > _MAX_OPEN
        if is_long or (not self._fence and is_known and _MAY_END.search(tail) is not None):
            line, self._line = self._line, ""
            found += self._take(line, is_whole=False)
        return found + self._end_paragraph() if is_long else found

    def flush(self) -> list[str]:
        """Return what is left at the end of the text."""
        found = self._take(self._line) + self._end_paragraph()
        self._line, self._fence, self._in_table, self._in_list, self._in_code = "", "", False, False, False
        return found

    def _take(self, line: str, *, is_whole: bool = True) -> list[str]:
        """Return the sentences that a line completes, or the beginning of one."""
        if self._fence:
            self._skip(line.strip(" \t>"))
            return []
        if self._begun:
            self._begun = not is_whole
            self._paragraph += line
            return self._read()
        if self._is_code(line):
            found, self._in_code = [] if self._in_code else ["Code block."], True
            return found
        self._in_code = self._in_code and not line.strip()
        mark = _MARK.match(line)
        assert mark is not None  # all of it may be missing
        rest, (task, number) = line[mark.end() :], mark.groups()
        is_item = mark[0].strip(" \t>")[:1] not in ("", "#")
        if is_item or (rest.strip() and not line[0].isspace()):
            self._in_list = is_item
        found = self._end_paragraph() if mark[0].strip(" \t>") else []
        is_row = rest.startswith("|") or (self._in_table and "|" in rest)
        self._in_table = self._in_table and is_row
        opened = _FENCE.match(rest)
        if opened and not (opened[1] == "$$" and self._paragraph.count("$$") % 2):  # no end of one in a paragraph
            self._fence = opened[1].replace("\\[", "\\]")
            code = f"Code block, {spoken_inline(opened[2])}." if opened[2] else "Code block."
            return [*found, *self._end_paragraph(), code if opened[1][0] in "`~" else "Formula."]
        if "|" in self._paragraph and {"|", "-"} <= set(rest) <= set("|-: \t"):  # below the head of a table
            head, self._paragraph = self._paragraph, ""
            return self._row(head)
        if is_row:
            return found + self._end_paragraph() + self._row(rest)
        if not rest.strip() or _RULE.fullmatch(rest):
            return found + self._end_paragraph()
        prefix = f"{number}: " if number else "" if not task else "To do: " if task == "[ ] " else "Done: "
        self._paragraph += f"{' ' if self._paragraph else ''}{prefix}{rest}"
        self._begun = not is_whole
        return found + (self._end_paragraph() if "#" in mark[0] else self._read())

    def _is_code(self, line: str) -> bool:
        """Return whether a line is code by its indentation; in a paragraph and in a list that means nothing."""
        return line.startswith(("    ", "\t")) and line.strip() != "" and not (self._paragraph or self._in_list)

    def _skip(self, line: str) -> None:
        """Look for the end of code or of a formula, behind which the line goes on; an empty line ends a formula too."""
        if self._fence[0] in "`~":
            is_end, rest = line.startswith(self._fence) and not line.strip(self._fence[0]), ""
        else:
            _, is_end, rest = line.partition(self._fence)
        if is_end or (self._fence[0] not in "`~" and not line):
            self._fence, self._paragraph = "", rest.lstrip(" ,.;:")

    def _row(self, line: str) -> list[str]:
        """Return a row of a table, cell by cell; nothing of the line below its head."""
        if not line.strip("|-: \t"):
            return []
        cells = [spoken_inline(cell) for cell in re.split(r"(?<!\\)\|", line.strip("| \t"))]
        head, self._in_table = "" if self._in_table else "Table: ", True
        return _pieces(f"{head}{', '.join(filter(None, cells))}", is_end=True)

    def _read(self) -> list[str]:
        """Return the sentences of the paragraph that are complete; a word that is being written tells nothing yet."""
        word = _WORD.findall(self._paragraph)[0] if self._begun else ""
        *whole, last = _divided(self._paragraph.removesuffix(word)) or [""]
        self._paragraph = last + word
        return [one for part in whole for one in _pieces(spoken_inline(part))]

    def _end_paragraph(self) -> list[str]:
        *whole, last = _divided(self._paragraph) or [""]
        self._paragraph, self._begun = "", False
        found = [one for part in whole for one in _pieces(spoken_inline(part))]
        return found + _pieces(spoken_inline(last), is_end=True)


def _divided(text: str) -> list[str]:
    """Return the sentences of a paragraph; one does not end within a code span, a formula or a link."""
    found, part = list[str](), ""
    for sentence in segment("en", text):
        part += sentence
        is_open = part.count("`") % 2 or part.count("$$") % 2 or part.count("[") > part.count("]")
        if len(part) > MAX_CHARS or not is_open:
            found.append(part)
            part = ""
    return [*found, part] if part else found


def _pieces(words: str, *, is_end: bool = False) -> list[str]:
    """Return the sentences of words, long ones in parts. `is_end`: the last one gets a mark."""
    found: list[str] = []
    for sentence in segment("en", words):  # again: "63 GB/s." is no end before its unit is a word
        while len(sentence) > MAX_CHARS:
            breaks = (list(one.finditer(sentence, MAX_CHARS // 3, MAX_CHARS)) for one in _BREAKS)
            cut = next((ends[-1].end() for ends in breaks if ends), MAX_CHARS)
            found.append(sentence[:cut])
            sentence = sentence[cut:]
        found.append(sentence)
    found = [one.strip() for one in found if any(character.isalnum() for character in one)]
    if is_end and found and found[-1].rstrip("\"'”’) ")[-1:] not in ".!?…:;,।॥؟۔。！？":
        found[-1] += "."
    return found
