"""Tokenizing and detokenizing for one model. Only the chat template's own text may become control tokens.

llama.cpp tokenizes a whole prompt with or without control tokens. So content is marked before it is rendered
(`ControlText.mark`): a noncharacter after the first character of all that is the text of a control token, or could
become one with what a template puts beside it. Templates can trim, join or write it as JSON, but neither find nor build
a control token in it. The prompt is then split as by llama.cpp (llama_vocab::impl::tokenizer_st_partition), except for
control texts with a marked character (`ControlText.split`), or block by block where it has no mark.
"""

from __future__ import annotations

import ctypes
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from cpuchat.base.errors import GenerationFailed, ModelUnsupported
from cpuchat.engine.llama.bindings import llama
from cpuchat.models.gguf.header import GGUFHeader, vocabulary
from cpuchat.models.gguf.parse import LazyArray
from cpuchat.models.ollama import file_name
from cpuchat.protocol.messages import Message, Tool, ToolCall

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MARK: Final = "\ufdd0"
"""Mark after a character that is content. Unicode reserves it for internal use; template_process.py knows it too."""
MARK_BYTES: Final = MARK.encode()

_TYPE_NORMAL, _TYPE_UNKNOWN = llama.LLAMA_TOKEN_TYPE_NORMAL, llama.LLAMA_TOKEN_TYPE_UNKNOWN
_TYPE_CONTROL, _TYPE_USER_DEFINED = llama.LLAMA_TOKEN_TYPE_CONTROL, llama.LLAMA_TOKEN_TYPE_USER_DEFINED
_ATTR_UNKNOWN, _ATTR_CONTROL = llama.LLAMA_TOKEN_ATTR_UNKNOWN, llama.LLAMA_TOKEN_ATTR_CONTROL
_ATTR_USER_DEFINED = llama.LLAMA_TOKEN_ATTR_USER_DEFINED
_ATTR_LSTRIP, _ATTR_RSTRIP = llama.LLAMA_TOKEN_ATTR_LSTRIP, llama.LLAMA_TOKEN_ATTR_RSTRIP
_SPACES: Final = b" \t\n\r\v\f"
BLOCK: Final = 8192
"""Bytes of a block, or more."""
# Names that llama.cpp treats as control tokens even if the file says otherwise (llama_vocab::impl::load).
CONTROL_NAMES: Final = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>",
    "<eos>", "<｜end▁of▁sentence｜>", "<turn|>", "<|tool_response>",
)  # fmt: skip


class FillTokens(msgspec.Struct, frozen=True):
    """The texts of the tokens between which a text is filled in (FIM): before it, after it, and at its place; and of
    those before the name of a repository and of a file, "" where there is none."""

    prefix: str
    suffix: str
    middle: str
    repository: str = ""
    file: str = ""


class SpecialToken(msgspec.Struct, frozen=True):
    """A token that is matched as a whole. `is_control`: only a template may write it."""

    id: int
    text: bytes
    attr: int
    is_control: bool

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
        In one call, llama.cpp's time grows with the square of their number: from each, it searches the rest for every
        other."""
        at = 0
        while self._cuts is not None and len(prompt) - at > BLOCK:
            found = self._cuts.finditer(prompt, at + BLOCK)
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
        *before, _ = parts = prompt.split(MARK_BYTES)
        text, marks = b"".join(parts), list(accumulate(map(len, before)))
        known = frozenset(self._tokens)
        found = [(start, self._tokens[word]) for start, word in self._occurrences(text, self._all_starts, known)]
        taken: list[tuple[int, SpecialToken]] = []  # not overlapping, by place
        cuts: list[int] = []
        for start, token in sorted(found, key=lambda one: (-len(one[1].text), one[0])):
            end = start + len(token.text)
            i = bisect_right(marks, start)
            if token.is_control and i < len(marks) and marks[i] <= end:  # content: a character of it is marked
                if token.attr & _ATTR_USER_DEFINED:  # matched by llama.cpp even where control tokens are not
                    cuts.append(marks[i])
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


def _pieces(text: bytes, offset: int, cuts: list[int]) -> Iterator[bytes]:
    """Yield `text` in parts that end at `cuts`."""
    at = 0
    for cut in sorted(cut - offset for cut in cuts if 0 < cut - offset < len(text)):
        yield text[at:cut]
        at = cut
    if text[at:]:
        yield text[at:]


def check_bytes(header: GGUFHeader) -> None:
    """Refuse a SentencePiece vocabulary without a token for each byte: at the first character that is no token either,
    llama.cpp ends the process (llama_vocab::byte_to_token throws, and nothing catches it). Raises ModelUnsupported."""
    found = vocabulary(header)
    if found.kind == "SPM" and found.tokens is not None:
        words = frozenset(word for word in found.tokens.raw_strings() if len(word) <= len("<0x00>"))
        if any(b"<0x%02X>" % b not in words and bytes([b]) not in words for b in range(256)):
            raise ModelUnsupported(
                f"{file_name(header.path)} cannot run here: its vocabulary cannot write every text.",
                "Choose another model.",
            )


_Marked = TypeVar("_Marked", Message, Tool, ToolCall)
Check = Callable[[int, int], None]


class Vocab:
    """The vocabulary of a loaded model; valid as long as the model is. `visible_markers`: control tokens that are shown
    as text, such as `<think>`; `markers` are their tokens. `handle`: llama.cpp's own pointer to the vocabulary."""

    def __init__(
        self,
        model: Any,
        visible_markers: tuple[str, ...] = (),
        special_types: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self.handle = llama.llama_model_get_vocab(model)
        self.n_tokens = int(llama.llama_vocab_n_tokens(self.handle))
        self._visible: dict[int, bytes] = {}
        self._raw: dict[int, bytes] = {}
        self._eog: dict[int, bool] = {}
        self.bos = int(llama.llama_vocab_bos(self.handle))
        self.eos = int(llama.llama_vocab_eos(self.handle))
        self.bos_text = self._text(self.bos)
        self.eos_text = self._text(self.eos)
        self._adds_eos = bool(llama.llama_vocab_get_add_eos(self.handle))
        self._control_text = ControlText(())  # of a name there is one block
        for marker in visible_markers:
            token = self._token_of(marker)
            if token is not None:
                self._visible[token] = self.raw_piece(token)
        self.markers = frozenset(self._visible)
        self._special: list[SpecialToken] = []
        by_name = {token: 0 for name in CONTROL_NAMES if (token := self._token_of(name)) is not None}
        by_name |= {token: 0 for token in self._fill_ids.values() if token >= 0}
        for token, kind in (by_name | dict(special_types)).items():
            if token < self.n_tokens:
                text = llama.llama_vocab_get_text(self.handle, token) or b""
                one = SpecialToken.of(token, text, llama.llama_vocab_get_attr(self.handle, token), kind)
                self._special += (one,) if one else ()
        self._control_text = ControlText(self._special)

    @cached_property
    def _fill_ids(self) -> dict[str, int]:
        names = ("pre", "suf", "mid", "rep", "sep")
        return {name: int(getattr(llama, f"llama_vocab_fim_{name}")(self.handle)) for name in names}  # -1: none

    @cached_property
    def fill_tokens(self) -> FillTokens | None:
        """The tokens with which llama.cpp would fill in; None for a model that cannot."""
        found = FillTokens(*(self._text(token) for token in self._fill_ids.values()))
        return found if found.prefix and found.suffix and found.middle else None

    @cached_property
    def silent_tokens(self) -> frozenset[int]:
        """The tokens that have no text and do not end an answer."""
        return frozenset(t.id for t in self._special if not self.piece(t.id) and not self.is_eog(t.id))

    @cached_property
    def guidance(self) -> LLTokenizer:
        """The vocabulary for llguidance, with one token more, which ends a text. Takes 0.6 s for 150,000."""
        from llguidance import LLTokenizer

        tokens = [self._piece(token, special=True) for token in range(self.n_tokens)]
        wrapper: Any = _GuidanceTokens([*tokens, b"\xffend"], self.spell)
        found = LLTokenizer(wrapper, slices=[])
        wrapper.tokens = ()  # some 10 MB, of which it has its own copy
        return found

    def _token_of(self, text: str) -> int | None:
        """Return the token that `text` is; None if it is several."""
        tokens = self.tokenize(text.encode(), add_special=False)
        return tokens[0] if len(tokens) == 1 else None

    def _text(self, token: int) -> str:
        if not 0 <= token < self.n_tokens:
            return ""
        return (llama.llama_vocab_get_text(self.handle, token) or b"").decode("utf-8", "replace")

    def mark_text(self, text: str) -> str:
        """Return a text for a prompt, marked so that nothing in it becomes a control token."""
        return self._control_text.mark(text)

    def mark_content(self, message: Message) -> Message:
        """Return the message for a chat template, marked so that nothing in it becomes a control token."""
        fields = ("content", "reasoning", "call_id", "tool")
        calls = tuple(self._with_marks(call, "name", "id", "arguments") for call in message.calls)
        return msgspec.structs.replace(self._with_marks(message, *fields), calls=calls)

    def mark_tool(self, tool: Tool) -> Tool:
        """Return a tool for a chat template, marked as `mark_content` does: a server wrote its texts."""
        return self._with_marks(tool, "name", "description", "parameters")

    def _with_marks(self, one: _Marked, *fields: str) -> _Marked:
        return msgspec.structs.replace(one, **{field: self._marked(getattr(one, field)) for field in fields})

    def _marked(self, value: Any) -> Any:
        match value:
            case str():
                return self._control_text.mark(value)
            case dict():
                return {self._control_text.mark(key): self._marked(one) for key, one in value.items()}
            case list():
                return [self._marked(one) for one in value]
        return value

    def tokenize(self, text: bytes, *, add_special: bool, check: Check = lambda n_tokens, n_bytes: None) -> list[int]:
        """Return token ids; markers become control tokens, except in marked content. `add_special`: prepends the begin
        token if the model wants one; an end token is never appended. `check` gets the tokens and bytes so far."""
        tokens: list[int] = []
        at = 0
        for block in self._control_text.blocks(text):
            is_marked, is_first = MARK_BYTES in block, at == 0
            tokens += self._tokenize(b"" if is_marked else block, add_special and is_first, True)
            for part in self._control_text.split(block) if is_marked else ():
                tokens += (part,) if isinstance(part, int) else self._tokenize(part, False, False)
            at += len(block)
            check(len(tokens), at)
        return tokens

    def _tokenize(self, text: bytes, add_special: bool, parse_special: bool) -> list[int]:
        room = len(text) + 8
        while True:
            out = (ctypes.c_int32 * room)()
            n = llama.llama_tokenize(self.handle, text, len(text), out, room, add_special, parse_special)
            if n >= 0:
                break
            room = -n
        tokens = out[:n]
        if add_special and self._adds_eos and tokens and tokens[-1] == self.eos:
            tokens.pop()
        return tokens

    def spell(self, text: bytes) -> list[int]:
        """Return tokens whose texts together are `text`, which goes on from another one: no space is put before it, as
        SentencePiece does (llm_tokenizer_spm). Raises GenerationFailed: the vocabulary does not cover the text."""
        for ahead in (b"", b"\n", b"|"):
            tokens = self.tokenize(ahead + text, add_special=False)
            while (extra := sum(map(len, map(self.raw_piece, tokens))) - len(text)) > 0:
                tokens.pop(0)
            if not extra:
                return tokens
        raise GenerationFailed(f"This model's vocabulary cannot write {text!r}.", "Choose another model.")

    def tokenize_prompt(self, text: bytes, check: Check = lambda n_tokens, n_bytes: None) -> list[int]:
        """Return the tokens of a whole prompt, with a begin token unless the template has written it already."""
        written = bool(self.bos_text) and text.startswith(self.bos_text.encode())
        return self.tokenize(text, add_special=not written, check=check)

    def piece(self, token: int) -> bytes:
        """Return the text of a token that the user sees: nothing for control tokens but the visible markers."""
        if (piece := self._visible.get(token)) is None:
            piece = self._visible[token] = self._piece(token, special=False)
        return piece

    def raw_piece(self, token: int) -> bytes:
        """Return the text of a token in a rendered prompt, control tokens included."""
        if (piece := self._raw.get(token)) is None:
            piece = self._raw[token] = self._piece(token, special=True)
        return piece

    def _piece(self, token: int, *, special: bool) -> bytes:
        buffer = ctypes.create_string_buffer(256)  # of this call: the output thread asks, too
        n = llama.llama_token_to_piece(self.handle, token, buffer, len(buffer), 0, special)
        if n < 0:
            buffer = ctypes.create_string_buffer(-n)
            n = llama.llama_token_to_piece(self.handle, token, buffer, len(buffer), 0, special)
        return buffer.raw[:n]

    @cached_property
    def eog_tokens(self) -> tuple[int, ...]:
        """All tokens that end an answer, ascending."""
        return tuple(token for token in range(self.n_tokens) if self.is_eog(token))

    def is_eog(self, token: int) -> bool:
        if (ends := self._eog.get(token)) is None:
            ends = self._eog[token] = bool(llama.llama_vocab_is_eog(self.handle, token))
        return ends


class _GuidanceTokens:
    """What llguidance asks of a tokenizer: it looks these names up."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], spell: Callable[[bytes], list[int]]) -> None:
        self.tokens = tokens
        self.eos_token_id = len(tokens) - 1
        self.special_token_ids = [self.eos_token_id]
        self._spell = spell

    def __call__(self, text: bytes | str) -> list[int]:
        """Return tokens for a text that the grammar has made certain; none where the vocabulary cannot write it."""
        try:
            return self._spell(text.encode() if isinstance(text, str) else text)
        except GenerationFailed:
            return []
