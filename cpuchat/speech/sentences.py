"""Divides an answer that is being written into sentences to read aloud.

Markdown's blocks decide first: code and display formulas are announced and skipped, headings, list items and table rows
are sentences of their own. What is left is prose, divided where a sentence ends. Nothing waits for more text than it
needs: a sentence is handed out with the first character of the next one.
"""

from __future__ import annotations

import re
from functools import cache, partial

from cpuchat.speech.markdown import spoken_inline

MAX_CHARS = 280
"""A sentence that is longer is divided at a comma or a space: it would keep the listener waiting."""
_LONGEST = 4 * MAX_CHARS
"""Where even a text without spaces is divided."""
_SPAN_CHARS = 120
"""A backtick or bracket that is open for longer is none of a code span or link."""

# With a backtick after it, the line is a code span.
_FENCE = re.compile(r"[ \t]*(`{3,}+(?![^`]*`)|~{3,})\s*([\w+#.-]*)")
_HEADING = re.compile(r" {0,3}#{1,6}(?:[ \t]+|$)")
_RULE = re.compile(r" {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,}|=+[ \t]*)$")
_ITEM = re.compile(r"[ \t]*(?:[-*+•]|(\d{1,9})[.)])[ \t]+(?:\[([ xX])\][ \t]+)?")
_QUOTE = re.compile(r" {0,3}(?:>[ \t]?)+")
_TABLE_RULE = re.compile(r"[ \t]*\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-*:?[ \t]*)*$")
_FORMULA = {"$$": "$$", r"\[": r"\]"}
# What a line may still become as long as it is not complete: nothing is said before that is known.
_UNDECIDED = re.compile(r"[ \t`~$\\|>#=*_+•-]*+(?:\d{1,9}[.)]?[ \t]*)?(?:\[[ xX]?\]?[ \t]*)?[`~$\\]*+$")

# Not from the middle of a run of marks: with that, a long run took quadratic time.
_END = re.compile(r"(?:(?<![.!?…।॥؟۔])[.!?…।॥؟۔]++[\"'”’)\]*_~]*+\s++(?=\S)|[。！？]+[」』”’）]*)")
_ABBREVIATIONS = frozenset([
    "e.g", "i.e", "cf", "vs", "approx", "ca", "al", "dr", "mr", "mrs", "ms", "prof", "st", "gen", "jr", "sr", "eds",
    "resp",
])  # fmt: skip
_BEFORE_NUMBERS = frozenset([
    "no", "nos", "fig", "figs", "eq", "vol", "ch", "sec", "pp", "p", "jan", "feb", "mar", "apr", "jun", "jul", "aug",
    "sep", "sept", "oct", "nov", "dec",
])  # fmt: skip
_BREAKS = (re.compile(r"[;:—–,][\"'”’)\]]*\s"), re.compile(r"\s"))
_LANGUAGES = {
    "py": "Python", "js": "JavaScript", "ts": "TypeScript", "sh": "shell", "zsh": "shell", "console": "shell",
    "cpp": "C plus plus", "c++": "C plus plus", "cs": "C sharp", "c#": "C sharp", "rs": "Rust", "rb": "Ruby",
    "yml": "YAML", "md": "Markdown", "golang": "Go", "tex": "LaTeX", "ps1": "PowerShell",
    "text": "", "txt": "", "plaintext": "", "output": "",
}  # fmt: skip
_SPELLED = frozenset([
    "c", "r", "json", "yaml", "toml", "xml", "html", "css", "sql", "php", "csv", "ini", "asm", "vba",
])  # fmt: skip


class SentenceSplitter:
    """Takes text as it arrives and returns what can be read aloud: the same for any division into pieces."""

    def __init__(self) -> None:
        self._line = ""  # of which no end has come
        self._wait = 0  # characters that it must have before it is looked at again: long ones not for each piece
        self._inside = False  # the block that `_line` belongs to is known: it is prose
        self._prose = ""  # of lines before, without the end of a sentence
        self._fence = ""  # closes the code block
        self._in_quote = False  # that the code block is in
        self._formula = ""  # closes the display formula
        self._in_table = False

    def feed(self, text: str) -> list[str]:
        """Return the sentences that `text` completes."""
        found: list[str] = []
        *lines, rest = (self._line + text.replace("\r\n", "\n")).split("\n")
        for line in lines:
            found += self._complete(line)
        self._line = rest
        self._wait = 0 if lines else self._wait
        return _speakable(found + self._partial())

    def flush(self) -> list[str]:
        """Return what is left at the end of the text."""
        line, self._line = self._line, ""
        found = self._complete(line) + self._end_paragraph()
        self._fence = self._formula = ""
        return _speakable(found)

    def _partial(self) -> list[str]:
        """Return the sentences of a line that is not complete."""
        if self._fence or self._formula or len(self._line) < self._wait:
            return []
        if not self._inside:
            self._wait = 2 * len(self._line) if len(self._line) > _LONGEST else 0
            line = self._line
            body = line[_body_of(line) :]
            if _UNDECIDED.match(line.rstrip(" \t")) or line.lstrip().startswith("|") or _HEADING.match(line):
                return []
            if _FENCE.match(body) or _opens(body):
                return []
            before = self._begin_line(line)
            self._line, self._inside, self._wait = "", True, 0
            return before + self._take("")
        text, self._line = self._line, ""
        return self._take(text)

    def _take(self, text: str) -> list[str]:
        """Add prose and return the sentences that are complete now."""
        self._prose += text
        found, self._prose = split_sentences(self._prose)
        return found

    def _complete(self, line: str) -> list[str]:
        """Return the sentences that a complete line, or the rest of one, completes."""
        if self._inside:
            self._inside = False
            return self._take(line + " ") if line or self._prose else []
        if self._fence:
            return self._in_code(line)
        if self._formula:
            _, closed, after = line.partition(self._formula)
            if closed or not line.strip():  # none has an empty line: it was not closed
                self._formula = ""
            return self._after_formula(after)
        if not line.strip():
            return self._end_paragraph()
        if special := self._special(line):
            return special[0]
        return self._begin_line(line) + self._take(" ")

    def _in_code(self, line: str) -> list[str]:
        """Skip a line of code. A block in a quote ends with the quote."""
        quote = _QUOTE.match(line)
        if self._in_quote and quote is None:
            self._fence = ""
            return self._complete(line)
        code = (line[quote.end() :] if self._in_quote and quote is not None else line).strip()
        if code.startswith(self._fence) and not code.strip(self._fence[0]):
            self._fence = ""
        return []

    def _after_formula(self, text: str) -> list[str]:
        """Return the sentences of what follows a display formula in its line."""
        self._prose += text.lstrip(" \t.,;:")
        return self._take(" ") if self._prose else []

    def _special(self, line: str) -> tuple[list[str]] | None:
        """Return the sentences of a line that is no prose, in a tuple of one; None for prose."""
        body = line[_body_of(line) :]
        if match := _FENCE.match(body):
            before = self._end_paragraph()
            self._fence, self._in_quote = match[1], _QUOTE.match(line) is not None
            return ([*before, announce_code(match[2])],)
        if opening := _opens(body):
            _, closed, after = body.strip()[2:].partition(_FORMULA[opening])
            self._formula = "" if closed else _FORMULA[opening]
            return ([*self._end_paragraph(), "Formula.", *self._after_formula(after)],)
        table = self._in_table or line.lstrip().startswith("|")
        if _RULE.match(line) or (table and len(line) < _LONGEST and _TABLE_RULE.match(line)):
            return (self._end_paragraph(keep_table=True),)
        if match := _HEADING.match(line):
            return ([*self._end_paragraph(), _closed(line[match.end() :].rstrip(" \t#"))],)
        if line.lstrip().startswith("|"):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
            before = self._end_paragraph(keep_table=True)
            head = "" if self._in_table else "Table: "
            self._in_table = True
            return ([*before, head + _closed(", ".join(cell for cell in cells if cell))],)
        return None

    def _begin_line(self, line: str) -> list[str]:
        """Put the prose of a line that begins into the paragraph; returns what this completes."""
        self._in_table = False
        found: list[str] = []
        if match := _QUOTE.match(line):
            line = line[match.end() :]
        if match := _ITEM.match(line):
            found = self._end_paragraph()
            state = {None: "", " ": "To do: "}.get(match[2], "Done: ")
            line = (f"{match[1]}: " if match[1] else "") + state + line[match.end() :]
        self._prose += line.lstrip()
        return found

    def _end_paragraph(self, *, keep_table: bool = False) -> list[str]:
        self._in_table = self._in_table and keep_table
        text, self._prose = self._prose.strip(), ""
        if not text:
            return []
        found, rest = split_sentences(text)
        return [*found, _closed(rest)] if rest.strip() else found


def split_sentences(text: str) -> tuple[list[str], str]:
    """Return the sentences of `text` that are complete, because another one follows, and the rest.

    Not inside of a code span or of the text of a link, not after abbreviations, initials and before a lowercase letter.
    """
    found: list[str] = []
    start = 0
    clause = cache(partial(_clause, text))

    def divide(end: int) -> int:
        """Return the start of what is left up to `end` when long clauses are off."""
        at = start
        while end - at > MAX_CHARS and (cut := clause(at) or (at + MAX_CHARS if end - at >= _LONGEST else 0)):
            found.append(text[at:cut].strip())
            at = cut
        return at

    for match in _END.finditer(text):
        start = divide(match.end())
        if _is_end(text, start, match):
            found.append(text[start : match.end()].strip())
            start = match.end()
    return found, text[divide(len(text)) :]


def _is_end(text: str, start: int, match: re.Match[str]) -> bool:
    before = text[start : match.start()]
    opened = max(
        before.rfind("`") if before.count("`") % 2 else -1,
        before.rfind("[") if before.count("[") > (before + match[0]).count("]") else -1,
    )
    if opened >= 0 and len(before) - opened < _SPAN_CHARS:
        return False
    if match[0][0] != ".":
        return True
    following = text[match.end()]
    if following.islower():
        return False
    word = before.rsplit(None, 1)[-1].lstrip("([{\"'“‘*_") if before.strip() else ""
    if word.lower() in _ABBREVIATIONS or (word.lower() in _BEFORE_NUMBERS and following.isdigit()):
        return False
    return not (len(word) == 1 and word.isupper() and word != "I")  # an initial


def _clause(text: str, start: int) -> int:
    """Return where to divide a long sentence from `start` on: after the last comma or the like before the limit, or at
    a space; 0: nowhere.
    """
    for pattern in _BREAKS:
        ends = [match.end() for match in pattern.finditer(text, start + MAX_CHARS // 3, start + MAX_CHARS)]
        for at in reversed(ends):
            if text.count("`", start, at) % 2 == 0 and text.count("[", start, at) <= text.count("]", start, at):
                return at
    return 0


def announce_code(language: str) -> str:
    """Return what is said in place of a code block."""
    key = language.lower()
    name = _LANGUAGES.get(key, language)
    if key in _SPELLED:
        name = language.upper()
    elif name == language:
        name = language.capitalize()
    return f"Code block, {name}." if name else "Code block."


def _body_of(line: str) -> int:
    """Return where a line begins behind the marks of a quote and of a list item."""
    quote = _QUOTE.match(line)
    start = quote.end() if quote else 0
    item = _ITEM.match(line, start)
    return item.end() if item else start


def _opens(line: str) -> str:
    """Return how a line opens a display formula, "" if it does not."""
    head = line.strip()[:2]
    return head if head in _FORMULA else ""


def _closed(text: str) -> str:
    """Return a heading or an item with an end, so that the voice falls."""
    text = text.strip()
    return text if not text or text.rstrip("*_`)\"'”’ ")[-1:] in ".!?…:;,।॥؟۔。！？" else f"{text}."


def _speakable(raw: list[str]) -> list[str]:
    pieces = [one[at : at + _LONGEST] for one in raw for at in range(0, len(one), _LONGEST)]
    said = [spoken_inline(one) for one in pieces]
    return [one for one in said if any(character.isalnum() for character in one)]
