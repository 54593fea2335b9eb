"""The grammar of calls of tools, which begins where they do, in the middle of an answer."""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence

import msgspec

from cpuchat.engine.decoding.grammar import Grammar
from cpuchat.engine.llama.vocab import Vocab
from cpuchat.errors import CpuchatError
from cpuchat.tool_calls import Tool
from cpuchat.tools.call_format import ID, CallFormat
from cpuchat.tools.constraint import call_grammar


class CallGuide:
    """Follows the text of an answer until calls begin. The grammar is made only then: most answers call nothing."""

    def __init__(self, vocab: Vocab, form: CallFormat, tools: Sequence[Tool]) -> None:
        self._vocab = vocab
        self._form = form
        self._tools = tools
        self._trigger = form.trigger
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""  # whose end may be the beginning of a trigger
        self._is_over = not self._trigger

    def piece(self, token: int) -> bytes:
        """Return the text of a token; the markers of calls have one, too."""
        piece = self._vocab.piece(token)
        if piece or self._vocab.is_eog(token):
            return piece
        raw = self._vocab.raw_piece(token)
        return raw if raw.decode("utf-8", "replace") in self._form.literals else b""

    def follow(self, token: int) -> Grammar | None:
        """Add a token of the answer; returns the grammar of what comes next once calls have begun."""
        return None if self._is_over else self.follow_text(self._decoder.decode(self.piece(token)))

    def follow_text(self, text: str) -> Grammar | None:
        """Add a text, as `follow`."""
        if self._is_over:
            return None
        self._text += text
        at = self._begin()
        if at is None:
            return None
        self._is_over = True
        try:
            return self._grammar(self._text[at:])
        except CpuchatError:  # llama.cpp takes no such grammar, or the vocabulary not these texts
            return None

    def _begin(self) -> int | None:
        """Return where calls begin for certain; None when they do not yet."""
        text = self._text
        if self._form.only_at_start:
            return self._begin_of_answer(text)
        at = text.find(self._trigger)
        if at < 0:
            self._text = text[-len(self._trigger) :]
            return None
        return at

    def _begin_of_answer(self, text: str) -> int | None:
        """Return where calls begin whose trigger may begin any text: once the name of a tool follows."""
        start = text.lstrip()
        before = r"\{\s*" + re.escape(f'"{self._form.name_key}"') + r"\s*:\s*\"" if self._form.shape == "object" else ""
        before = before or re.escape(f"{self._form.section}{self._form.opening}".lstrip())
        names = "|".join(re.escape(tool.name) for tool in self._tools)
        if re.match(rf"{before}(?:{names})\W", start) is not None:
            return len(text) - len(start)
        longest = len(before) + max(len(tool.name) for tool in self._tools)
        self._is_over = not self._trigger.startswith(start[: len(self._trigger)]) or len(start) > longest
        return None

    def _grammar(self, written: str) -> Grammar | None:
        """Return the grammar with what is written of the calls accepted; None if that does not match it."""
        vocab, form = self._vocab, self._without_ends()
        if not (text := call_grammar(form, self._tools)):
            return None
        markers = frozenset(vocab.tokenize(form.literals.replace(ID, " ").encode(), add_special=False))
        grammar = Grammar(vocab, text, markers)
        for token in vocab.spell(written.encode() + self._decoder.getstate()[0]):
            if not grammar.allows(token):
                return None
            grammar.accept(token)
        return grammar

    def _without_ends(self) -> CallFormat:
        """Return the format without a marker that ends the answer: it is no text for a grammar."""
        changed = dict[str, str]()
        for name in ("closing", "end"):
            text: str = getattr(self._form, name).rstrip()
            tokens = self._vocab.tokenize(text.replace(ID, " ").encode(), add_special=False)
            if tokens and self._vocab.is_eog(tokens[-1]):
                changed[name] = text.removesuffix(self._vocab.raw_piece(tokens[-1]).decode("utf-8", "replace"))
        return msgspec.structs.replace(self._form, **changed) if changed else self._form
