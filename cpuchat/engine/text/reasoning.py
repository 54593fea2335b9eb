"""Separates a model's reasoning from its answer while it streams, and finds stop strings in it.

The markers of the formats in use are in reasoning_formats.json (sources: the templates in llama.cpp's models/templates
and the vendors' model cards):
`<think>` (DeepSeek, Qwen, GLM, ...), `[THINK]` (Magistral, Ministral), `<seed:think>` (Seed-OSS),
`<mm:think>` (MiniMax M3), `◁think▷` (Kimi-VL, Kimi-Dev), `<|START_THINKING|>` (Command), `<|channel>thought`
(Gemma 4), harmony channels (gpt-oss), `to=self` (Muse Glimmer), `<|think|>` (Solar Open), `<|inner_prefix|>`
(Apertus), XTML (Kimi K3), `<think:opensource>` (Hy3), `[BEGIN FINAL RESPONSE]` (Apriel), and the tags that fine-tunes
are taught. Functionary names the recipient of its answer, "all".

What counts as a marker, so that text about markers stays text:

- An opening marker counts at the start of the answer (nothing but white space before it), right after a closing
  one, and, once the answer has used its kind, at the start of a line outside a code fence.
- Inside reasoning the first closing marker of the same kind ends it, wherever it stands.
- A closing marker at the start of the answer (its opening one was part of the prompt, or thinking is off) is dropped.
- Marks around the answer itself (`<|START_RESPONSE|>` ... `<|END_RESPONSE|>`) count before its first text and after
  its last.
"""

from __future__ import annotations

import re
from math import inf
from pathlib import Path
from time import perf_counter

import msgspec

from cpuchat.base.decoding import prepared
from cpuchat.protocol.messages import Channel, FillIn


def held_back(text: str, markers: tuple[str, ...]) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of one of `markers`."""
    longest = 0
    for marker in markers:
        for length in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:length]):
                longest = length
                break
    return longest


class StopMatcher:
    """Finds the first complete stop string, of several at its end the longest, however the text is split into pieces.
    What could be the beginning of one is held back; it and what follows is never returned."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = tuple(dict.fromkeys(stop for stop in stops if stop))
        self._held = ""
        self.hit = ""
        """The stop string that was found."""

    def feed(self, text: str) -> tuple[str, bool]:
        """Return text that is safe to show, and whether a stop string was found (now or before)."""
        if self.hit or not self._stops:
            return ("" if self.hit else text), bool(self.hit)
        text = self._held + text
        ends = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            _, at, self.hit = min(ends)
            self._held = ""
            return text[:at], True
        cut = len(text) - held_back(text, self._stops)
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        rest, self._held = self._held, ""
        return rest


_LINE_BREAK = re.compile(r"\n\s*")
_MIN_REPEATED = 12  # characters


class LineMatcher(StopMatcher):
    """Finds stop strings and the line at which a text that is filled in ends: as `n_indent` and `t_max_predict_ms` of
    llama-server, but that blank lines have any indentation, and that something is written before time is over, by the
    clock from the first text; and the next line of what follows, unless it is short, written again."""

    def __init__(self, stops: tuple[str, ...], fill: FillIn) -> None:
        following = next((line for line in fill.suffix.split("\n")[1:] if line.strip()), "")
        super().__init__((*stops, f"\n{following}\n") if len(following.strip()) >= _MIN_REPEATED else stops)
        self._fill = fill
        self._time_over = inf
        self._space = ""
        self._has_said = False

    def feed(self, text: str) -> tuple[str, bool]:
        if self._time_over == inf and self._fill.max_ms:
            self._time_over = perf_counter() + self._fill.max_ms / 1e3
        text, is_over = super().feed(text)
        text, self._space = self._space + text, ""
        is_late = perf_counter() > self._time_over
        for found in _LINE_BREAK.finditer(text):
            before, indent = text[: found.start()], len(found[0].rpartition("\n")[2])
            is_open = found.end() == len(text)  # more white space may follow
            is_less = not is_open and indent < self._fill.n_indent
            if is_less or (is_late and (self._has_said or before.strip())):
                self.hit = self.hit or "\n"
                return before, True
            if is_open and not is_over:
                text, self._space = before, found[0]
        self._has_said = self._has_said or bool(text.strip())
        return text, is_over

    def flush(self) -> str:
        rest, self._space = self._space + super().flush(), ""
        return rest


class Format(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One way to mark reasoning. `reopening` leads from the answer back to where an opening marker may stand. `hint`:
    the markers are ordinary prose, so they count only for a model whose chat template has this text, or when the prompt
    ends with an opening."""

    openings: tuple[str, ...] = ()
    closings: tuple[str, ...] = ()
    before_answer: tuple[str, ...] = ()
    after_answer: tuple[str, ...] = ()
    reopening: tuple[str, ...] = ()
    hint: str = ""


FORMATS = msgspec.json.decode(
    Path(__file__).with_name("reasoning_formats.json").read_bytes(), type=prepared(tuple[Format, ...])
)

_CONTROL = re.compile(r"<\|?/?[\w:]+\|?>|\[/?[A-Z ]+\]|◁/?think▷")
_ALL = [m for f in FORMATS for m in (*f.openings, *f.closings, *f.before_answer, *f.after_answer, *f.reopening)]

MARKER_TOKENS = frozenset(token for marker in _ALL for token in _CONTROL.findall(marker))
"""Texts of tokens that markers consist of. In many vocabularies they are control tokens, which have no visible text;
those in this set must be detokenized all the same, or the splitter cannot see them."""

_START, _REASONING, _ANSWER = range(3)
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")


class Unsplit:
    """Passes everything on as the answer, markers included; in the place of `ReasoningSplitter`."""

    def feed(self, text: str) -> list[tuple[Channel, str]]:
        return [("answer", text)] if text else []

    def flush(self) -> list[tuple[Channel, str]]:
        return []


class ReasoningSplitter:
    """Splits streamed text into ("reasoning" | "answer", text); markers are in neither.

    The result does not depend on how the text is split into pieces. Only markers, the blank lines next to them, and
    white space on a marker's own line are removed. `prompt_tail`: the end of the rendered prompt. When it ends with an
    opening marker the answer starts inside reasoning. `template`: source of the model's chat template."""

    def __init__(self, prompt_tail: str = "", template: str = "") -> None:
        self._template = template
        self._formats = tuple(kind for kind in FORMATS if kind.hint in template)
        self._held = ""
        self._state = _START
        self._format: Format | None = None
        self._after_marker = False  # white space here belongs to a marker, not to the text
        self._line = ""  # the beginning of the current line of the answer
        self._line_start = True
        self._fence = ""
        tail = prompt_tail.rstrip()
        for kind in FORMATS:
            if tail.endswith(kind.openings):
                self._state, self._format, self._after_marker = _REASONING, kind, True
            elif not kind.hint and tail.endswith(kind.closings) and kind.closings != ("<|end|>",):
                self._format, self._after_marker = kind, True

    def written(self, reasoning: str, content: str) -> str:
        """Return these parts of an answer as the model writes them, with markers; reasoning without content is open."""
        if not (reasoning or self.in_reasoning):
            return content
        opening = ""
        if not self.in_reasoning:
            known = [kind for kind in self._formats if kind.openings and kind.openings[0] in self._template]
            self._format = (known or self._formats)[0]
            opening = f"{self._format.openings[0]}\n"
        return f"{opening}{reasoning}{self.transition + content if content else ''}"

    def resume(self, written: str) -> None:
        """Go on after the part of an answer that is `written` already, which is not given again."""
        self.feed(written)
        self._held = ""

    @property
    def in_reasoning(self) -> bool:
        return self._state == _REASONING

    @property
    def transition(self) -> str:
        """Return the text that leads from the reasoning that is open to the answer."""
        assert self._format is not None
        ahead = self._format.before_answer
        # After the name of a role all of them come, otherwise one of them does.
        lead = "".join(ahead if "assistant" in "".join(ahead[:1]) else ahead[:1])
        return self._format.closings[0] + (lead or "\n\n")

    @property
    def in_answer(self) -> bool:
        return self._state == _ANSWER

    def awaits(self, text: str, *, is_marker: bool) -> bool:
        """Return whether `text`, coming next, still precedes the answer: part of a marker, or white space after one.
        `is_marker`: `text` is a token of its own for markers; text that only looks like one begins no marker."""
        ahead = (self._held + text).lstrip()
        if self._state != _START or not ahead:
            return self._state == _START and self._after_marker
        begun = is_marker or bool(self._held.strip())
        return begun and any(marker.startswith(ahead) or ahead.startswith(marker) for marker in self._start_markers())

    def feed(self, text: str) -> list[tuple[Channel, str]]:
        """Return the pieces that are decided; text that could still become a marker waits."""
        self._held += text
        pieces: list[tuple[Channel, str]] = []
        decide = {_START: self._step_start, _REASONING: self._step_reasoning, _ANSWER: self._step_answer}
        while self._held and decide[self._state](pieces):  # what is held begins with something that is decided
            pass
        return pieces

    def flush(self) -> list[tuple[Channel, str]]:
        """Return what was held back, when nothing more comes."""
        rest, self._held = self._held, ""
        if self._state == _REASONING:
            rest = _after_marker(rest) if self._after_marker else rest
            return [("reasoning", rest)] if rest else []
        if self._state == _ANSWER:
            rest = self._without_end_marks(rest)
        elif self._after_marker or rest.strip() in self._start_markers():
            rest = _after_marker(rest)
            rest = "" if rest.strip() in self._start_markers() else rest
        return [("answer", rest)] if rest else []

    def _start_markers(self) -> dict[str, tuple[Format, int]]:
        """Return marker -> its format and the state after it."""
        markers: dict[str, tuple[Format, int]] = {}
        for kind in self._formats:
            for marker in kind.before_answer:
                markers.setdefault(marker, (kind, _START))
            for marker in kind.closings:
                if marker != "<|end|>" or kind is self._format:
                    markers.setdefault(marker, (kind, _START))
            for marker in kind.openings:
                markers[marker] = (kind, _REASONING)
        return markers

    def _step_start(self, _pieces: list[tuple[Channel, str]]) -> bool:
        text = self._held.lstrip()
        if not text:
            return False
        markers = self._start_markers()
        for marker, (kind, state) in markers.items():
            if text.startswith(marker):
                self._held, self._format, self._state = text[len(marker) :], kind, state
                self._after_marker = True
                return True
        if any(marker.startswith(text) for marker in markers):
            return False
        if self._after_marker:
            self._held = _after_marker(self._held)
            self._after_marker = False
        self._state = _ANSWER
        return True

    def _step_reasoning(self, pieces: list[tuple[Channel, str]]) -> bool:
        assert self._format is not None
        text = self._held
        if self._after_marker:
            stripped = text.lstrip()
            # Some models repeat the opening marker that their prompt already ended with.
            for marker in self._format.openings:
                if stripped.startswith(marker):
                    self._held = stripped[len(marker) :]
                    return True
            if not stripped or any(marker.startswith(stripped) for marker in self._format.openings):
                return False
            self._held = text = _after_marker(text)
            self._after_marker = False
        found = [(at, -len(m), m) for m in self._format.closings if (at := text.find(m)) >= 0]
        if found:
            at, _, marker = min(found)
            _add(pieces, "reasoning", text[:at])
            self._held, self._state, self._after_marker = text[at + len(marker) :], _START, True
            return True
        cut = len(text) - held_back(text, self._format.closings)
        _add(pieces, "reasoning", text[:cut])
        self._held = text[cut:]
        return False

    def _step_answer(self, pieces: list[tuple[Channel, str]]) -> bool:
        kind = self._format
        if kind is None:
            _add(pieces, "answer", self._held)
            self._held = ""
            return False
        text = self._held
        for marker in kind.reopening:
            at = text.find(marker)
            if at >= 0:
                self._add_answer(pieces, text[:at])
                self._held, self._state, self._after_marker = text[at + len(marker) :], _START, True
                return True
        if self._line_start and not self._fence:
            for marker in kind.openings:
                if text.startswith(marker):
                    self._held, self._state, self._after_marker = text[len(marker) :], _REASONING, True
                    return True
            if any(marker.startswith(text) for marker in kind.openings):
                return False
        safe = self._safe_length(text, kind)
        newline = text.find("\n", 0, safe)
        if newline >= 0:  # line by line, because an opening marker may start the next one
            safe = newline + 1
        self._add_answer(pieces, text[:safe])
        self._held = text[safe:]
        return newline >= 0

    def _safe_length(self, text: str, kind: Format) -> int:
        """Return how much of `text` cannot be part of a marker that ends the answer or leads back from it."""
        safe = len(text) - held_back(text, (*kind.reopening, *kind.after_answer))
        body = self._without_end_marks(text)
        if body != text:  # complete end marks, with white space between them, wait for the flush
            safe = min(safe, len(body.rstrip()))
        # an unfinished mark after finished ones: "<|END_RESPONSE|><|END_"
        if safe < len(text):
            inner = text[:safe].rstrip()
            if inner.endswith(kind.after_answer or ("\0",)):
                return min(safe, self._safe_length(inner, kind))
        return safe

    def _add_answer(self, pieces: list[tuple[Channel, str]], text: str) -> None:
        """Add answer text (at most one line end, at its end) and follow code fences."""
        if not text:
            return
        _add(pieces, "answer", text)
        self._line = (self._line + text)[:80]
        self._line_start = text.endswith("\n")
        if self._line_start:
            if (mark := _FENCE.match(self._line)) is not None:
                if not self._fence:
                    self._fence = mark[1]
                elif mark[1].startswith(self._fence) and not self._line[mark.end() :].strip():
                    self._fence = ""
            self._line = ""

    def _without_end_marks(self, text: str) -> str:
        marks = self._format.after_answer if self._format else ()
        while mark := next((mark for mark in marks if text.rstrip().endswith(mark)), ""):
            text = text.rstrip().removesuffix(mark)
        return text


def _after_marker(text: str) -> str:
    """Return the text without blank lines after a marker; the first line of text keeps its indentation."""
    body = text.lstrip()
    space = text[: len(text) - len(body)]
    return space[space.rfind("\n") + 1 :] + body if "\n" in space and body else body


def _add(pieces: list[tuple[Channel, str]], channel: Channel, text: str) -> None:
    if not text:
        return
    if pieces and pieces[-1][0] == channel:
        pieces[-1] = (channel, pieces[-1][1] + text)
    else:
        pieces.append((channel, text))
