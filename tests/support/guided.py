"""A sampler with the constraints of an answer, as `engine.answer` makes one."""

from __future__ import annotations

from cpuchat.engine.decoding.guided import AnswerGrammar, CallGuide, Grammar, ReasoningLimit
from cpuchat.engine.decoding.sampling import Sampler
from cpuchat.engine.llama.vocab import Vocab
from cpuchat.protocol.messages import Sampling


class Guided(Sampler):
    def __init__(
        self,
        sampling: Sampling,
        vocab: Vocab,
        grammar: str = "",
        budget: int | None = None,
        calls: CallGuide | None = None,
    ) -> None:
        first = None
        if calls is not None:
            first = calls.from_start(grammar)
        elif grammar:
            first = Grammar(vocab, grammar)
        self.reasoning = ReasoningLimit(vocab, budget, is_required=first is not None)
        self.grammar = AnswerGrammar(vocab, first, calls, self.reasoning)
        super().__init__(sampling, vocab.n_tokens, constraints=(self.reasoning, self.grammar))
