"""Constraints of an answer that may reason first, for a limited number of tokens, and then match a grammar, all of it
or the calls of tools in it, wherever they begin. llguidance follows the grammar.
"""

from __future__ import annotations

import codecs
import re
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from cpuchat.base.errors import CpuchatError, GrammarUnmet, UsageError
from cpuchat.engine.decoding.sampling import Constraint, Row, largest
from cpuchat.engine.llama.vocab import Vocab
from cpuchat.engine.text.reasoning import ReasoningSplitter
from cpuchat.grammar.gbnf import gbnf_to_lark
from cpuchat.grammar.limits import parser_limits, short_reason
from cpuchat.protocol.messages import ANY_CALL, CallRule, Tool
from cpuchat.tools.call_format import ID, CallFormat
from cpuchat.tools.call_grammar import call_grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher


_N_LIKELY: Final = 64


class Grammar:
    """The grammar of one answer, and what of it is accepted.

    Tokens without visible text are never allowed, but for those that end a complete answer, and the `markers`, whose
    text is part of the grammar. `text`: as of `Generate.grammar`, or Lark of llguidance, which defines `start`. Raises
    UsageError: the grammar is invalid."""

    def __init__(self, vocab: Vocab, text: str, markers: frozenset[int] = frozenset()) -> None:
        from llguidance import LLMatcher  # 8 MB, for answers in a form only

        if not text.startswith(("{", "start: ")):
            text = gbnf_to_lark(text, "the grammar")
        self._matcher = LLMatcher(vocab.guidance, text, log_level=0, limits=parser_limits())
        if reason := self._matcher.get_error():
            raise UsageError(f"Invalid grammar: {short_reason(reason)}.", "Check the file.")
        self._vocab = vocab
        self._silent = vocab.silent_tokens - markers

    def allows(self, token: int) -> bool:
        """Return whether `token` may come next. Raises GrammarUnmet as `mask`."""
        if self._vocab.is_eog(token):
            return self.is_complete()
        if token in self._silent:
            return False
        is_allowed = self._matcher.validate_tokens([token]) == 1
        self._check()
        return is_allowed

    def mask(self, row: Row) -> NDArray[np.bool_]:
        """Return which tokens may come next; where the search for all takes too long, of the most likely in `row` only.
        Raises GrammarUnmet: the text can be read in so many ways that each search takes too long."""
        allowed = np.zeros(self._vocab.n_tokens, np.bool_)
        trial = self._matcher.deep_copy()  # which an error ends
        bits = b"" if trial.is_stopped() else trial.compute_bitmask()
        if _error(trial):
            likely = [token for token in largest(row, _N_LIKELY).tolist() if self.allows(token)]
            allowed[likely] = True
        elif bits:
            allowed |= np.unpackbits(np.frombuffer(bits, np.uint8), count=allowed.size, bitorder="little").view(bool)
            allowed[list(self._silent)] = False
        allowed[list(self._vocab.eog_tokens)] = self.is_complete()
        return allowed

    def accept(self, token: int) -> None:
        """Add `token`, which must be allowed. Raises GrammarUnmet as `mask`."""
        if not self._vocab.is_eog(token):
            self._matcher.consume_token(token)
            self._check()

    def _check(self) -> None:
        if reason := _error(self._matcher):
            raise GrammarUnmet(
                f"The answer cannot go on under the grammar: {reason}.",
                "Change the rules that can read one text in several ways.",
            )

    def is_complete(self) -> bool:
        return bool(self._vocab.eog_tokens) and self._matcher.is_accepting()


def _error(matcher: LLMatcher) -> str:
    """Return what ended a matcher; "" for nothing, and where the text has come to its end."""
    error = matcher.get_error() if matcher.is_error() else ""
    return "" if error.startswith("NoExtension") else short_reason(error)


class EitherGrammar:
    """Grammars of which a text matches one, as long as several can: an answer in a form, or calls."""

    def __init__(self, grammars: Sequence[Grammar]) -> None:
        self._open = list(grammars)

    def allows(self, token: int) -> bool:
        return any(one.allows(token) for one in self._open)

    def mask(self, row: Row) -> NDArray[np.bool_]:
        return np.logical_or.reduce([one.mask(row) for one in self._open])

    def accept(self, token: int) -> None:
        """Add `token`, which must be allowed. Raises GrammarUnmet as `Grammar`."""
        self._open = [one for one in self._open if one.allows(token)]
        for one in self._open:
            one.accept(token)

    def is_complete(self) -> bool:
        return any(one.is_complete() for one in self._open)


class CallGuide:
    """Follows an answer until calls begin, or cannot any more (`is_over`). The grammar is made only then."""

    def __init__(self, vocab: Vocab, form: CallFormat, tools: Sequence[Tool], rule: CallRule = ANY_CALL) -> None:
        self._vocab = vocab
        self._form = form
        self._tools = [tool for tool in tools if tool.name in rule.names or not rule.names]
        self._rule = rule
        self._trigger = form.trigger
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""  # whose end may be the beginning of a trigger
        self.is_over = not self._trigger

    def piece(self, token: int) -> bytes:
        """Return the text of a token; the markers of calls have one, too."""
        piece = self._vocab.piece(token)
        if piece or self._vocab.is_eog(token):
            return piece
        raw = self._vocab.raw_piece(token)
        return raw if raw.decode("utf-8", "replace") in self._form.literals else b""

    def from_start(self, answer: str = "") -> Grammar | EitherGrammar | None:
        """Return the grammar of an answer that must be calls, or that is calls or matches the grammar `answer`; None:
        it may be anything. Raises UsageError: no grammar can hold the calls to what the strict tools take."""
        if self._rule.mode != "required" and not answer:
            return None
        self.is_over = True
        form = self._without_ends()
        form = msgspec.structs.replace(form, section=form.section.removeprefix(form.text_end))
        calls = self._new_grammar(form)
        if self._rule.mode != "required":
            return EitherGrammar([Grammar(self._vocab, answer), *([calls] if calls is not None else [])])
        if calls is None:
            raise UsageError("The schemas of the strict tools are too much for one grammar.", "Offer fewer tools.")
        return calls

    def follow(self, token: int) -> Grammar | None:
        """Add a token of the answer; returns the grammar of what comes next once calls have begun."""
        return None if self.is_over else self.follow_text(self._decoder.decode(self.piece(token)))

    def follow_text(self, text: str) -> Grammar | None:
        if self.is_over:
            return None
        self._text = text = self._text + text
        if self._form.only_at_start:
            # The trigger may begin any text: calls have begun once the name of a tool follows.
            start, opening = text.lstrip(), f"{self._form.section}{self._form.opening}".lstrip()
            name_key = re.escape(f'"{self._form.name_key}"')
            before = rf"\{{\s*{name_key}\s*:\s*\"" if self._form.shape == "object" else re.escape(opening)
            names = "|".join(re.escape(tool.name) for tool in self._tools)
            written = start if re.match(rf"{before}(?:{names})\W", start) is not None else ""
            longest = len(before) + max(len(tool.name) for tool in self._tools)
            is_other = not self._trigger.startswith(start[: len(self._trigger)]) or len(start) > longest
            self.is_over = is_other and not written
        elif (at := text.find(self._trigger)) >= 0:
            written = text[at:]
        else:
            written, self._text = "", text[-len(self._trigger) :]
        if not written:
            return None
        self.is_over = True
        try:
            return self._grammar(written)
        except CpuchatError:  # llguidance takes no such grammar, or the vocabulary not these texts
            return None

    def _grammar(self, written: str) -> Grammar | None:
        """Return the grammar with what is written of the calls accepted; None if that does not match it."""
        vocab = self._vocab
        if (grammar := self._new_grammar(self._without_ends())) is None:
            return None
        for token in vocab.spell(written.encode() + self._decoder.getstate()[0]):
            if not grammar.allows(token):
                return None
            grammar.accept(token)
        return grammar

    def _new_grammar(self, form: CallFormat) -> Grammar | None:
        if not (text := call_grammar(form, self._tools, single=self._rule.single)):
            return None
        literals = form.literals.replace(ID, " ").encode()
        return Grammar(self._vocab, text, frozenset(self._vocab.tokenize(literals, add_special=False)))

    def _without_ends(self) -> CallFormat:
        """Return the format without a marker that ends the answer: it is no text for a grammar."""
        changed = dict[str, str]()
        for name in ("closing", "end"):
            text: str = getattr(self._form, name).rstrip()
            tokens = self._vocab.tokenize(text.replace(ID, " ").encode(), add_special=False)
            if tokens and self._vocab.is_eog(tokens[-1]):
                changed[name] = text.removesuffix(self._vocab.raw_piece(tokens[-1]).decode("utf-8", "replace"))
        return msgspec.structs.replace(self._form, **changed) if changed else self._form


def call_markers(vocab: Vocab, form: CallFormat) -> tuple[int, ...]:
    """Return the token without which no call begins; () if calls begin with ordinary text."""
    tokens = vocab.tokenize(form.trigger.encode(), add_special=False) if not form.only_at_start else []
    is_marker = len(tokens) == 1 and vocab.raw_piece(tokens[0]).decode("utf-8", "replace") == form.trigger
    return tuple(tokens) if is_marker else ()


class ReasoningLimit(Constraint):
    """Follows the reasoning of an answer, and forces the tokens that close it when its `budget` of tokens (None: no
    limit) is used up, when the user wants the answer, or where the model would end without one that `is_required`: an
    answer in a form, whose text is told apart from the markers around reasoning."""

    def __init__(self, vocab: Vocab, budget: int | None = None, *, is_required: bool = False) -> None:
        self._vocab = vocab
        self._budget = budget
        self._is_required = is_required
        self._splitter: ReasoningSplitter | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._n_reasoned = 0
        self._must_answer = False
        self._forced: deque[int] = deque()
        self._rest: str | None = None

    def begin(self, splitter: ReasoningSplitter) -> None:
        """Let the answer begin as `splitter`, which has seen the prompt, expects it: it may reason first."""
        self._splitter = splitter
        self._end_if_due(splitter)

    def end(self) -> None:
        """End the reasoning with its next token. From any thread."""
        self._must_answer = True

    @property
    def is_open(self) -> bool:
        return self._splitter is not None and self._splitter.in_reasoning

    @property
    def is_over(self) -> bool:
        return self._splitter is None

    def precedes(self, token: int) -> bool:
        """Return whether `token`, coming next, belongs to the reasoning or its markers, or may without an answer."""
        splitter = self._splitter
        if splitter is None or splitter.in_reasoning or not self._is_required:
            return splitter is not None
        text = self._vocab.piece(token).decode("utf-8", "replace")
        is_marker = token in self._vocab.markers
        return bool(text) and not self._vocab.is_eog(token) and splitter.awaits(text, is_marker=is_marker)

    def forced(self, token: int | None = None) -> int | None:
        if token is not None and self._is_required and self.is_open and self._vocab.is_eog(token):
            assert self._splitter is not None
            self._must_answer = True
            self._end_if_due(self._splitter)
        return self._forced[0] if self._forced else None

    def accept(self, token: int) -> None:
        if self._forced:
            self._forced.popleft()
        splitter, self._rest = self._splitter, None
        if splitter is None or not self.precedes(token):
            self._splitter = None
            return
        pieces = splitter.feed(self._decoder.decode(self._vocab.piece(token)))
        self._rest = ""
        if splitter.in_reasoning:
            self._n_reasoned += 1
            self._end_if_due(splitter)
        if splitter.in_answer:
            self._splitter = None
            self._rest = "".join(text for channel, text in [*pieces, *splitter.flush()] if channel == "answer")

    def take_rest(self) -> str | None:
        """Return what of the text of the last token belongs to the answer; None: the token itself does."""
        rest, self._rest = self._rest, None
        return rest

    def _end_if_due(self, splitter: ReasoningSplitter) -> None:
        is_over = self._must_answer or (self._budget is not None and self._n_reasoned >= self._budget)
        if is_over and splitter.in_reasoning and not self._forced:
            tokens = self._vocab.tokenize(f"\n{splitter.transition}".encode(), add_special=False)
            if not any(map(self._vocab.is_eog, tokens)):
                self._forced.extend(tokens)


class AnswerGrammar(Constraint):
    """Holds an answer, after its `reasoning`, which is asked before this one, to a grammar: all of it to `grammar`
    (None: any text), or the calls in it to that of `calls` (None: no calls)."""

    def __init__(
        self, vocab: Vocab, grammar: Grammar | EitherGrammar | None, calls: CallGuide | None, reasoning: ReasoningLimit
    ) -> None:
        self._vocab = vocab
        self._grammar = grammar
        self._calls = calls if grammar is None else None
        self._reasoning = reasoning

    @property
    def is_met(self) -> bool:
        """Whether the text is complete under the grammar of the answer, or there is none."""
        if self._grammar is None or self._calls is not None:
            return True
        return not self._reasoning.is_open and self._grammar.is_complete()

    @property
    def is_over(self) -> bool:
        return self._grammar is None and (self._calls is None or self._calls.is_over)

    def allows(self, token: int) -> bool:
        return self._grammar is None or self._reasoning.precedes(token) or self._grammar.allows(token)

    def mask(self, row: Row) -> NDArray[np.bool_]:
        return self._grammar.mask(row) if self._grammar is not None else super().mask(row)

    def accept(self, token: int) -> None:
        rest = self._reasoning.take_rest()
        if self._grammar is None:
            if self._calls is not None and rest != "":
                self._grammar = self._calls.follow(token) if rest is None else self._calls.follow_text(rest)
        elif rest is None:
            self._grammar.accept(token)
        elif rest:  # the token that ends the reasoning holds the beginning of the answer, too
            for part in self._vocab.spell(rest.encode()):
                if not self._grammar.allows(part):
                    message = "The text after the model's reasoning does not match the grammar."
                    raise GrammarUnmet(message, "Ask again.")
                self._grammar.accept(part)
