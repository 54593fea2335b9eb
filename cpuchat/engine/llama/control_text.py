"""Keeps message content from becoming control tokens: only the chat template's own text may.

llama.cpp tokenizes a whole prompt with or without control tokens. So content is marked before it is rendered
(`ControlText.mark`): a noncharacter after the first character of everything that is the text of a control token, or
could become one with what a template puts beside it. Templates see opaque text there, which they can trim, join, or
write as JSON, but neither find nor build a control token in it. The prompt is then split as llama.cpp does it
(llama_vocab::impl::tokenizer_st_partition), except for control texts with a marked character (`ControlText.split`).

Text without a mark is tokenized by one call of llama.cpp for each block (`ControlText.blocks`).
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

from cpuchat.models.gguf.arrays import LazyArray
from cpuchat.models.gguf.header import GGUFHeader

MARK: Final = "\ufdd0"
"""Mark after a character that is content. Unicode reserves it for internal use; template_process.py knows it too."""
MARK_BYTES: Final = MARK.encode()

_TYPE_NORMAL, _TYPE_UNKNOWN, _TYPE_CONTROL, _TYPE_USER_DEFINED = 1, 2, 3, 4  # llama_token_type
_ATTR_UNKNOWN, _ATTR_CONTROL, _ATTR_USER_DEFINED = 1, 8, 16  # llama_token_attr
_ATTR_LSTRIP, _ATTR_RSTRIP = 128, 256
_SPACES: Final = b" \t\n\r\v\f"
_BLOCK: Final = 8192
"""Bytes of a block, or more."""
# Names that llama.cpp treats as control tokens even if the file says otherwise (llama_vocab::impl::load).
CONTROL_NAMES: Final = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>",
    "<eos>", "<｜end▁of▁sentence｜>", "<turn|>", "<|tool_response>",
)  # fmt: skip


class SpecialToken(msgspec.Struct, frozen=True):
    """A token that is matched as a whole. `is_control`: only a template may write it."""

    id: int
    text: bytes
    attr: int
    is_control: bool

    @property
    def is_always_parsed(self) -> bool:
        """llama.cpp matches this token even where control tokens are not parsed."""
        return bool(self.attr & _ATTR_USER_DEFINED)

    @classmethod
    def of(cls, token: int, text: bytes, attr: int, file_type: int) -> SpecialToken | None:
        """Return None for a word. llama.cpp treats some of gpt-oss' control tokens as user-defined: the file counts."""
        if not text or not attr & (_ATTR_UNKNOWN | _ATTR_CONTROL | _ATTR_USER_DEFINED):
            return None
        by_attr = bool(attr & (_ATTR_UNKNOWN | _ATTR_CONTROL))
        return cls(token, text, attr, by_attr or file_type in (_TYPE_UNKNOWN, _TYPE_CONTROL))


def special_types(header: GGUFHeader) -> dict[int, int]:
    """Return token -> type in the file (llama_token_type) of those that are not plain words."""
    types = header.metadata.get("tokenizer.ggml.token_type")
    if not isinstance(types, LazyArray) or types.is_text:
        return {}
    kinds = (_TYPE_UNKNOWN, _TYPE_CONTROL, _TYPE_USER_DEFINED)
    return {token: kind for token, kind in enumerate(types) if kind != _TYPE_NORMAL and kind in kinds}


class ControlText:
    """The special tokens of one vocabulary."""

    def __init__(self, tokens: Iterable[SpecialToken]) -> None:
        self._tokens = {token.text: token for token in tokens}
        controls = [text for text, token in self._tokens.items() if token.is_control]
        self._controls = frozenset(controls)
        self._control_starts = _starts(controls)
        self._all_starts = _starts(self._tokens)
        self._lengths = sorted({len(text) for text in self._tokens}, reverse=True)
        cuts = (one for one in self._tokens.values() if one.is_control and not one.attr & _ATTR_LSTRIP)
        cuts = sorted((one.text for one in cuts if one.text[:1] not in _SPACES), key=len, reverse=True)
        self._cuts = re.compile(b"|".join(map(re.escape, cuts))) if cuts else None
        self._longest = max(map(len, controls), default=0)
        self._sorted = sorted(controls)
        self._reversed = sorted(text[::-1] for text in controls)

    def mark(self, text: str) -> str:
        """Return `text` with marks in, or at the edge of, control texts."""
        content = text.replace(MARK, "\ufffd").encode("utf-8", "replace")
        marked = {start for start, _ in self._occurrences(content, self._control_starts, self._controls)}
        body = content.rstrip()
        end, start = len(body), len(body) - len(body.lstrip())  # templates trim
        if any(_is_inner_prefix(self._sorted, body[-n:]) for n in range(1, min(self._longest, end - start + 1))):
            marked.add(end - 1)
        body = body[start : start + self._longest][::-1]
        if any(_is_inner_prefix(self._reversed, body[-n:]) for n in range(1, len(body) + 1)):
            marked.add(start)
        if not marked:
            return content.decode()
        parts: list[bytes] = []
        at = 0
        for place in sorted(marked):
            behind = place + 1
            while behind < len(content) and content[behind] & 0xC0 == 0x80:  # within a character
                behind += 1
            parts += (content[at:behind], MARK_BYTES)
            at = behind
        return b"".join((*parts, content[at:])).decode()

    def blocks(self, prompt: bytes) -> Iterator[bytes]:
        """Yield a prompt in parts whose tokens are those of the whole: each but the first begins with a control token.

        In one call, llama.cpp's time grows with the square of the number of control tokens: from each, it searches the
        rest of the text for every other.
        """
        at = 0
        while self._cuts is not None and len(prompt) - at > _BLOCK:
            found = self._cuts.finditer(prompt, at + _BLOCK)
            end = next((one.start() for one in found if self._is_token(prompt, *one.span())), None)
            if end is None:
                break
            yield prompt[at:end]
            at = end
        yield prompt[at:]

    def _is_token(self, prompt: bytes, start: int, end: int) -> bool:
        """Return whether the control text there becomes a token: it is not content, and no longer one overlaps it."""
        word, reach = prompt[start:end], 5 * self._lengths[0]  # a mark has 3 bytes, and follows a character
        left = prompt[max(0, start - reach) : start].replace(MARK_BYTES, b"")
        right = prompt[end : end + reach].replace(MARK_BYTES, b"")
        others = ((one, len(one) - 1) for one in self._tokens if len(one) >= len(word) and one != word)
        return not prompt.startswith(MARK_BYTES, end) and not any(
            one in left[max(0, len(left) - n) :] + word + right[:n] for one, n in others
        )

    def split(self, prompt: bytes) -> Iterator[int | bytes]:
        """Yield control tokens that the template wrote, and the text between them, which has none."""
        text, marks = _without_marks(prompt)
        known = frozenset(self._tokens)
        found = [(start, self._tokens[word]) for start, word in self._occurrences(text, self._all_starts, known)]
        taken: list[tuple[int, SpecialToken]] = []  # not overlapping, by place
        cuts: list[int] = []
        for start, token in sorted(found, key=lambda one: (-len(one[1].text), one[0])):
            end = start + len(token.text)
            if token.is_control and (mark := _first_within(marks, start, end)):
                if token.is_always_parsed:
                    cuts.append(mark)
                continue
            i = bisect_left(taken, start, key=lambda one: one[0])
            is_free = (i == 0 or taken[i - 1][0] + len(taken[i - 1][1].text) <= start) and (
                i == len(taken) or end <= taken[i][0]
            )
            if is_free:
                taken.insert(i, (start, token))
        at = 0
        for start, token in taken:
            if not token.is_control:
                continue  # llama.cpp finds it in the text
            left = text[at:start]
            yield from _pieces(left.rstrip(_SPACES) if token.attr & _ATTR_LSTRIP else left, at, cuts)
            yield token.id
            at = start + len(token.text)
            while token.attr & _ATTR_RSTRIP and text[at : at + 1] in _SPACES and at < len(text):
                at += 1
        yield from _pieces(text[at:], at, cuts)

    def _occurrences(
        self, text: bytes, starts: re.Pattern[bytes] | None, wanted: frozenset[bytes]
    ) -> Iterator[tuple[int, bytes]]:
        """Yield every place where one of `wanted` begins, overlapping or not."""
        if starts is None:
            return
        for found in starts.finditer(text):
            at = found.start()
            for length in self._lengths:
                word = text[at : at + length]
                if word in wanted and len(word) == length:
                    yield at, word


def _starts(texts: Iterable[bytes]) -> re.Pattern[bytes] | None:
    """Return a pattern that finds where one of `texts` may begin."""
    starts = sorted({text[:2] for text in texts})
    return re.compile(b"(?=" + b"|".join(map(re.escape, starts)) + b")") if starts else None


def _is_inner_prefix(texts: Sequence[bytes], beginning: bytes) -> bool:
    """Return whether one of the sorted `texts` begins with `beginning` and is longer."""
    i = bisect_right(texts, beginning)
    return i < len(texts) and texts[i].startswith(beginning)


def _without_marks(prompt: bytes) -> tuple[bytes, list[int]]:
    """Return the text, and the places in it where marks were."""
    parts = prompt.split(MARK_BYTES)
    marks: list[int] = []
    at = 0
    for part in parts[:-1]:
        at += len(part)
        marks.append(at)
    return b"".join(parts), marks


def _first_within(marks: list[int], start: int, end: int) -> int:
    """Return the first mark after one of the characters from `start` to `end`; 0 if there is none."""
    i = bisect_right(marks, start)
    return marks[i] if i < len(marks) and marks[i] <= end else 0


def _pieces(text: bytes, offset: int, cuts: list[int]) -> Iterator[bytes]:
    """Yield `text` in parts that end at `cuts`."""
    at = 0
    for cut in sorted(cut - offset for cut in cuts if 0 < cut - offset < len(text)):
        yield text[at:cut]
        at = cut
    if text[at:]:
        yield text[at:]
