"""Real models that answer with and without drafts, held against each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import numpy as np

from cpuchat.costs.calibrations import PassCosts
from cpuchat.engine.decoding.decode import Decoder, DecodeResult
from cpuchat.engine.decoding.sampling import Sampler
from cpuchat.engine.drafting.draft_model import DraftModel
from cpuchat.engine.drafting.speculator import Speculator
from cpuchat.engine.llama.model import Model
from cpuchat.engine.text.reasoning import ReasoningSplitter
from cpuchat.engine.text.text_stream import TextStream
from cpuchat.protocol.messages import Event, LoadOptions, Sampling, Speculation, TextDelta
from cpuchat.protocol.timings import SpeculationFigures
from cpuchat.speculation.depth.controller import DepthController
from cpuchat.speculation.drafters.drafter import Proposal
from tests.support.guided import Guided
from tests.support.pair_files import next_token_table, write_pair
from tests.support.prefilling import prefilled, store_of

N_VOCAB = 2048
OPTIONS = LoadOptions(n_ctx=512, n_batch=64, n_ubatch=64)
GREEDY = Sampling(temperature=0.0)
ROUNDING = 2e-2
"""How far two evaluations of a row of logits may be apart when the batches differ."""

FLAT = PassCosts(verify_ms=tuple(0.5 + 0.01 * n for n in range(32)), draft_ms=0.05, read_ms=0.01)
"""A draft costs hardly anything."""


def pair_files(folder: Path, alpha: float) -> tuple[Path, Path]:
    """Return target and draft whose next token is a function of the last one; the draft is right with rate `alpha`."""
    target, draft = folder / f"target-{alpha}.gguf", folder / f"draft-{alpha}.gguf"
    write_pair(target, draft, alpha, target="tiny", draft="tiny", n_vocab=N_VOCAB)
    return target, draft


def chain(token: int, n: int, table: Sequence[int] = ()) -> list[int]:
    """Return the tokens that the synthetic target, or a model with this `table`, writes after `token`."""
    table, said = table or next_token_table(N_VOCAB).tolist(), []
    for _ in range(n):
        token = table[token]
        said.append(token)
    return said


class Wandering(DepthController):
    """Anything may follow anything: plain steps, drafts of every depth and drafter, listening."""

    def __init__(self, seed: int) -> None:
        super().__init__(FLAT, has_draft_model=True)
        self._rng = np.random.default_rng(seed)

    def plan_draft(self, most: int, lag: int) -> int:
        depth = int(self._rng.choice((0, 0, 1, 2, 3, 5, 8, 31)))
        self.plan = min(depth, most)
        return self.plan

    def free_depth(self, proposal: Proposal) -> int:
        return int(self._rng.integers(0, len(proposal) + 1)) if self._rng.integers(0, 2) else 0

    def shadow_budget(self, lag: int) -> int:
        return int(self._rng.integers(0, lag + 1)) if self._rng.integers(0, 2) else 0


@dataclass
class Said:
    """One answer. `held` are the tokens of the target's sequence after it."""

    result: DecodeResult
    prompt: list[int]
    cache_n: int
    held: list[int]
    figures: SpeculationFigures | None = None
    deltas: list[TextDelta] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(d.text for d in self.deltas)

    @property
    def tokens(self) -> list[int]:
        return self.result.tokens

    @property
    def reason(self) -> str:
        return self.result.stop_reason


class Talker:
    """A target and what drafts for it, without the rest of the engine."""

    def __init__(
        self,
        target: Model,
        draft: Model | None = None,
        costs: PassCosts | None = None,
    ) -> None:
        self.target, self.draft = target, draft
        self.store = store_of(target)
        self.drafter = DraftModel(draft.sequence, min(draft.vocab.n_tokens, target.vocab.n_tokens)) if draft else None
        self.speculator = Speculator(costs, self.drafter)
        # These models are so quick that the real one would leave them alone.
        self.speculator.min_plain_ms, self.speculator.lookup_share = 0.0, math.inf

    def use(self, drafter: DraftModel) -> None:
        """Draft with `drafter`."""
        self.drafter = drafter
        self.speculator = Speculator(None, drafter)
        self.speculator.min_plain_ms, self.speculator.lookup_share = 0.0, math.inf

    def decide(self, controller: DepthController) -> Talker:
        """Let `controller` decide instead of one that uses times."""
        self.speculator._controller = controller
        if self.speculator._draft is not None:
            self.speculator._draft.controller = controller
        return self

    def say(
        self,
        prompt: list[int],
        speculation: Speculation | None = None,
        *,
        sampling: Sampling = GREEDY,
        max_tokens: int = 48,
        stop: tuple[str, ...] = (),
        is_eog: Callable[[int], bool] | None = None,
        on_delta: Callable[[TextDelta], None] = lambda _: None,
        on_update: Callable[[int, SpeculationFigures], None] = lambda *_: None,
        grammar: str = "",
    ) -> Said:
        """Return an answer to `prompt`; plain without `speculation`."""
        target, deltas = self.target, []

        def emit(event: Event) -> None:
            assert isinstance(event, TextDelta)
            deltas.append(event)
            on_delta(event)

        filled = prefilled(target, prompt, self.store)
        vocab = target.vocab
        sampler = Guided(sampling, vocab, grammar) if grammar else Sampler(sampling, vocab.n_tokens)
        sampler.accept_prompt(prompt)
        stream = TextStream(1, emit, target.vocab.piece, ReasoningSplitter(""), stop, perf_counter())
        ends = is_eog or target.vocab.is_eog
        speculator = self.speculator if speculation is not None else None
        assert speculation is None or self.speculator.begin_answer(speculation, prompt)
        result = Decoder(target.sequence, sampler, stream, ends, max_tokens, speculator, on_update).run(filled.row)
        figures = speculator.figures() if speculator is not None else None
        return Said(result, prompt, filled.cache_n, list(target.sequence.tokens), figures, deltas)


def assert_same(model: Model, plain: Said, drafted: Said, sampling: Sampling = GREEDY) -> None:
    """Assert that the answers are equal, or differ from a token on at which rounding decides: the row of a plain step
    (re-evaluated here) puts the choice less than `ROUNDING` from the other token. Rows of passes over several tokens
    differ from it by that."""
    if drafted.tokens == plain.tokens:
        assert drafted.text == plain.text
        assert drafted.reason == plain.reason
        assert drafted.held == plain.held
        return
    at = next(i for i, (a, b) in enumerate(zip(plain.tokens, drafted.tokens, strict=False)) if a != b)
    sampler = Sampler(sampling, model.vocab.n_tokens)
    sampler.accept_prompt(plain.prompt)
    for token in plain.tokens[:at]:
        sampler.accept(token)
    text = [*plain.prompt, *plain.tokens[:at]]
    row = prefilled(model, text).row
    one, other = plain.tokens[at], drafted.tokens[at]
    candidates, weights = sampler.candidates(row.copy())
    ids = [int(token) for token in candidates]
    shares = np.array(weights, np.float64) / np.sum(weights, dtype=np.float64)
    with np.errstate(divide="ignore"):  # a share may round to 0
        logits = dict(zip(ids, np.log(shares), strict=True))
    greedy = sampling.temperature <= 0
    if greedy:
        logits = {token: float(row[token]) for token in (one, other)}
    tie = abs(logits.get(one, np.inf) - logits.get(other, -np.inf)) < ROUNDING
    if not greedy and not tie and sampling.seed is not None:
        draws = np.random.Generator(np.random.PCG64(sampling.seed)).random(at + 1)
        upper = dict(zip(ids, shares.cumsum(), strict=True))
        share = dict(zip(ids, shares, strict=True))
        nearest = min(max(draws[at], upper[other] - share[other]), upper[other]) if other in upper else np.inf
        tie = abs(nearest - draws[at]) < ROUNDING
    assert tie, f"token {at}: {one} without drafts, {other} with them, and it was no near-tie"
