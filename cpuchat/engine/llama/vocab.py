"""Tokenizing and detokenizing for one model."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from cpuchat.engine.llama.bindings import llama
from cpuchat.engine.llama.control_text import CONTROL_NAMES, MARK_BYTES, ControlText, SpecialToken
from cpuchat.engine.llama.spm_coverage import SpmCoverage
from cpuchat.errors import GenerationFailed
from cpuchat.protocol import Message
from cpuchat.tool_calls import Tool, ToolCall

_VOCAB_TYPE_NONE = 0
_Marked = TypeVar("_Marked", Message, Tool, ToolCall)
Check = Callable[[int, int], None]


class Vocab:
    """The vocabulary of a loaded model; valid as long as the model is.

    A model without a tokenizer (some synthetic ones) gets a stand-in: one token for each byte, numbers as text.

    Args:
        visible_markers: control tokens that are shown as text, such as `<think>`.
        spm_coverage: what can be tokenized, when that is not everything.
        special_types: see `control_text.special_types`.

    Attributes:
        markers: the tokens of `visible_markers`.
    """

    def __init__(
        self,
        model: Any,
        visible_markers: tuple[str, ...] = (),
        spm_coverage: SpmCoverage | None = None,
        special_types: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self._vocab = llama.llama_model_get_vocab(model)
        self.n_tokens = int(llama.llama_vocab_n_tokens(self._vocab))
        self.has_tokenizer = llama.llama_vocab_type(self._vocab) != _VOCAB_TYPE_NONE
        self._longer: dict[int, frozenset[int]] = {}
        self._visible: dict[int, bytes] = {}
        self._raw: dict[int, bytes] = {}
        self._eog: dict[int, bool] = {}
        self.bos = int(llama.llama_vocab_bos(self._vocab)) if self.has_tokenizer else -1
        self.eos = int(llama.llama_vocab_eos(self._vocab)) if self.has_tokenizer else -1
        self.bos_text = self._text(self.bos)
        self.eos_text = self._text(self.eos)
        self._adds_eos = self.has_tokenizer and bool(llama.llama_vocab_get_add_eos(self._vocab))
        self._coverage = spm_coverage
        self._control_text = ControlText(())  # of a name there is one block
        for marker in visible_markers:
            token = self._token_of(marker)
            if token is not None:
                self._visible[token] = self.raw_piece(token)
        self.markers = frozenset(self._visible)
        self._special = self._special_tokens(special_types)
        self._control_text = ControlText(self._special)

    @property
    def handle(self) -> Any:
        """llama.cpp's own pointer to the vocabulary."""
        return self._vocab

    @cached_property
    def silent_tokens(self) -> frozenset[int]:
        """The tokens that have no text and do not end an answer."""
        return frozenset(t.id for t in self._special if not self.piece(t.id) and not self.is_eog(t.id))

    def longer_than(self, n: int) -> frozenset[int]:
        """Return the tokens whose text has more than `n` characters. Takes some 0.1 s the first time."""
        if n not in self._longer:
            text = llama.llama_vocab_get_text  # as stored, where each character takes as many bytes or more
            stored = (token for token in range(self.n_tokens) if len(text(self._vocab, token) or b"") > n)
            self._longer[n] = frozenset(t for t in stored if len(self.piece(t).decode("utf-8", "replace")) > n)
        return self._longer[n]

    def _token_of(self, text: str) -> int | None:
        """Return the token that `text` is; None if it is several, or not tokenizable."""
        if self._coverage is not None and self._coverage.unknown(text.encode()):
            return None
        tokens = self.tokenize(text.encode(), add_special=False)
        return tokens[0] if len(tokens) == 1 else None

    def _special_tokens(self, types: Mapping[int, int]) -> list[SpecialToken]:
        if not self.has_tokenizer:
            return []
        by_name = {token: 0 for name in CONTROL_NAMES if (token := self._token_of(name)) is not None}
        found: list[SpecialToken] = []
        for token, kind in (by_name | dict(types)).items():
            if token < self.n_tokens:
                text = llama.llama_vocab_get_text(self._vocab, token) or b""
                one = SpecialToken.of(token, text, llama.llama_vocab_get_attr(self._vocab, token), kind)
                found += (one,) if one else ()
        return found

    def _text(self, token: int) -> str:
        if not 0 <= token < self.n_tokens:
            return ""
        return (llama.llama_vocab_get_text(self._vocab, token) or b"").decode("utf-8", "replace")

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
        """Return a value of JSON with its texts marked."""
        match value:
            case str():
                return self._control_text.mark(value)
            case dict():
                return {self._control_text.mark(key): self._marked(one) for key, one in value.items()}
            case list():
                return [self._marked(one) for one in value]
        return value

    def tokenize(self, text: bytes, *, add_special: bool, check: Check = lambda n_tokens, n_bytes: None) -> list[int]:
        """Return token ids; markers such as `<|im_end|>` become control tokens, except in marked content.

        Args:
            add_special: prepends the model's begin token if it wants one. An end token is never appended.
            check: called after each block with the tokens and bytes so far; what it raises ends the call.

        Raises:
            GenerationFailed: the vocabulary does not cover the text.
        """
        if not self.has_tokenizer:
            return [b % self.n_tokens for b in text.replace(MARK_BYTES, b"")]
        tokens: list[int] = []
        at = 0
        for block in self._control_text.blocks(text):
            tokens += self._tokenize_block(block, add_special and at == 0)
            at += len(block)
            check(len(tokens), at)
        return tokens

    def _tokenize_block(self, text: bytes, add_special: bool) -> list[int]:
        if MARK_BYTES not in text:
            return self._tokenize(text, add_special, True)
        tokens = self._tokenize(b"", add_special, True)
        for part in self._control_text.split(text):
            tokens += (part,) if isinstance(part, int) else self._tokenize(part, False, False)
        return tokens

    def _tokenize(self, text: bytes, add_special: bool, parse_special: bool) -> list[int]:
        if self._coverage is not None and (unknown := self._coverage.unknown(text, with_controls=parse_special)):
            raise GenerationFailed(
                f"This model's vocabulary has no token for {unknown!r}.",
                "Remove that character, or choose another model.",
            )
        room = len(text) + 8
        while True:
            out = (ctypes.c_int32 * room)()
            n = llama.llama_tokenize(self._vocab, text, len(text), out, room, add_special, parse_special)
            if n >= 0:
                break
            room = -n
        tokens = out[:n]
        if add_special and self._adds_eos and tokens and tokens[-1] == self.eos:
            tokens.pop()
        return tokens

    def spell(self, text: bytes) -> list[int]:
        """Return tokens whose texts together are `text`, which goes on from another one: no space is put before it, as
        SentencePiece does (llm_tokenizer_spm).

        Raises:
            GenerationFailed: the vocabulary does not cover the text.
        """
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
        if not self.has_tokenizer:
            return b" %d" % token
        buffer = ctypes.create_string_buffer(256)  # of this call: the output thread asks, too
        n = llama.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, special)
        if n < 0:
            buffer = ctypes.create_string_buffer(-n)
            n = llama.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, special)
        return buffer.raw[:n]

    @cached_property
    def eog_tokens(self) -> tuple[int, ...]:
        """All tokens that end an answer, ascending."""
        return tuple(token for token in range(self.n_tokens) if self.is_eog(token))

    def is_eog(self, token: int) -> bool:
        """Return whether this token ends the answer."""
        if (ends := self._eog.get(token)) is None:
            ends = self._eog[token] = self.has_tokenizer and bool(llama.llama_vocab_is_eog(self._vocab, token))
        return ends
