"""llama.cpp's grammar sampler: which tokens may continue a text under a grammar."""

from __future__ import annotations

import ctypes
import weakref
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cpuchat.engine.llama.bindings import (
    grammar_accept,
    grammar_apply,
    grammar_free,
    grammar_new,
    grammar_ways,
    llama,
    log,
)
from cpuchat.engine.llama.vocab import Vocab
from cpuchat.errors import GrammarUnmet, UsageError
from cpuchat.grammar.gbnf import ROOT
from cpuchat.grammar.ways import MOST_WAYS, STEPS

_CANDIDATES: Final = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama_token_data


class Grammar:
    """The grammar of one answer, and what of it is accepted.

    Tokens without a text that the user sees are never allowed, but for those that end the answer once it is complete.

    Args:
        text: GBNF with a rule `root`.
        markers: tokens whose text is part of the grammar though the user does not see it.

    Raises:
        UsageError: llama.cpp rejects the grammar, or the model has no tokenizer.
    """

    def __init__(self, vocab: Vocab, text: str, markers: frozenset[int] = frozenset()) -> None:
        if not vocab.has_tokenizer:
            raise UsageError(
                "A grammar needs the text of tokens; this model has no tokenizer.", "Choose another model."
            )
        log.clear()
        self._grammar = grammar_new(vocab.handle, text.encode(), ROOT.encode(), False, None, 0, None, 0)
        if not self._grammar:
            reason = " ".join(log.lines(errors_only=True)[-1:]) or "see the worker's log"
            raise UsageError(f"llama.cpp rejected the grammar: {reason}.", "Check the file.")
        weakref.finalize(self, grammar_free, self._grammar)
        # llama.cpp's check of a token can take twice as long with each character, and shorter tokens write the same.
        self._silent = (vocab.silent_tokens | vocab.longer_than(STEPS)) - markers
        self._has_text = np.ones(vocab.n_tokens, np.bool_)
        self._has_text[list(self._silent)] = False
        self._end = vocab.eos if vocab.is_eog(vocab.eos) else next(iter(vocab.eog_tokens), -1)
        self._one = llama.llama_token_data()
        self._one_array = llama.llama_token_data_array(
            data=ctypes.pointer(self._one), size=1, selected=-1, sorted=False
        )
        self._one_pointer = ctypes.byref(self._one_array)

    def allows(self, token: int) -> bool:
        """Return whether `token` may come next."""
        if token in self._silent:
            return False
        one = self._one
        one.id, one.logit = token, 0.0
        grammar_apply(self._grammar, self._one_pointer)
        return one.logit == 0.0

    def allowed(self, ids: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Return which of `ids` may come next. Costs some 0.1 µs each."""
        allowed = self._has_text[ids]
        ids = ids[allowed]
        candidates = np.zeros(ids.size, _CANDIDATES)
        candidates["id"] = ids
        data = candidates.ctypes.data_as(llama.llama_token_data_p)
        array = llama.llama_token_data_array(data=data, size=ids.size, selected=-1, sorted=False)
        grammar_apply(self._grammar, ctypes.byref(array))
        allowed[allowed] = candidates["logit"] == 0
        return allowed

    def accept(self, token: int) -> None:
        """Add `token`, which must be allowed: llama.cpp ends the process otherwise.

        Raises:
            GrammarUnmet: the text can be read in so many ways that the next tokens would take seconds, then minutes.
        """
        grammar_accept(self._grammar, token)
        if grammar_ways(self._grammar) > MOST_WAYS:
            raise GrammarUnmet(
                f"The answer can match the grammar in more than {MOST_WAYS:,} ways.",
                "Change the rules that can read one text in several ways.",
            )

    def is_complete(self) -> bool:
        """Return whether the text may end here."""
        return self._end >= 0 and self.allows(self._end)
