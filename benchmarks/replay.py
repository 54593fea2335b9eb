"""Known answers written in simulated time: the real drafters and controller, known tokens, known times of passes.

Two references: one that knows how many tokens of each proposal are right and plans its passes by that, and the same for
whoever could draft the continuation of any place where the last two tokens stood before, always of the right one.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from cpuchat.base.text import common_prefix
from cpuchat.costs.calibrations import PassCosts, interpolate
from cpuchat.engine.llama.bindings import llama
from cpuchat.engine.llama.vocab import Vocab
from cpuchat.speculation.depth.controller import DepthController
from cpuchat.speculation.drafters.drafter import MAX_DEPTH, Proposal
from cpuchat.speculation.drafters.suffix import NgramIndex, ScoredDrafter, SuffixDecoding
from cpuchat.speculation.stats import PassRecord

TASKS = Path(__file__).with_name("real_text.toml")
RECORDED = {
    "1.5B Q8_0": (62.0, {2: 1.52, 3: 1.74, 4: 1.86, 5: 2.91, 6: 3.15, 8: 2.79, 12: 3.79, 16: 4.76}),
    "1.5B Q4_K_M": (35.0, {2: 1.60, 3: 2.16, 4: 2.61, 5: 3.25, 6: 3.77, 8: 6.59, 12: 7.34, 16: 7.41}),
}
"""ms of a pass over one token, and passes over n relative to it, measured on two cores."""


@dataclass(frozen=True)
class Task:
    """`copies`: the answer repeats much of the prompt."""

    name: str
    prompt: str
    answer: str
    copies: bool = True


@dataclass(frozen=True)
class Known:
    """Tokens of a prompt and of its answer."""

    prompt: list[int]
    answer: list[int]


def tasks() -> list[Task]:
    return [Task(**entry) for entry in tomllib.loads(TASKS.read_text(encoding="utf-8"))["task"]]


def recorded(name: str) -> PassCosts:
    plain, ratios = RECORDED[name]
    return PassCosts(interpolate({n: plain * ratio for n, ratio in {1: 1.0, **ratios}.items()}))


def tokenizer(file: Path) -> Callable[[str, str], Known]:
    """Return what makes tokens of a prompt and its answer, with the vocabulary of this model."""
    params = llama.llama_model_default_params()
    params.vocab_only = True
    vocab = Vocab(llama.llama_model_load_from_file(str(file).encode(), params))

    def tokens(prompt: str, answer: str) -> Known:
        return Known(
            vocab.tokenize(prompt.encode(), add_special=True), vocab.tokenize(answer.encode(), add_special=False)
        )

    return tokens


def likeness(written: str, expected: str) -> float:
    """Share of the expected answer's lines and words that were written, in order."""
    a, b = written.split(), expected.split()
    same = difflib.SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks()
    return sum(block.size for block in same) / max(1, len(b))


def replay(controller: DepthController, costs: PassCosts, text: Known) -> float:
    """Return the ms in which the answer is written; its first token comes from the prompt and takes none."""
    index = NgramIndex()
    scored = ScoredDrafter(index, SuffixDecoding(index), controller.free_depth)
    controller.begin_answer()
    index.set_text(text.prompt)
    scored.append(text.answer[:1])
    at, ms = 1, 0.0
    while at < len(text.answer):
        for score in scored.take_scores():
            controller.record_scores("suffix", *score)
        room = len(text.answer) - at - 1
        proposal = scored.propose(room) if room else Proposal("suffix")
        drafted = len(proposal)
        accepted = common_prefix(proposal.tokens, text.answer[at : at + drafted])
        took = costs.verify_ms[drafted]
        ms += took
        scored.append(text.answer[at : at + accepted + 1])
        at += accepted + 1
        if drafted:
            controller.record(PassRecord(took, proposal.drafter, proposal.buckets, accepted, drafted))
        else:
            controller.record(PassRecord(took))
    return ms


def proposed(text: Known) -> list[int]:
    """Return how many tokens are right, behind each token of the answer, of what suffix decoding proposes there."""
    index = NgramIndex()
    drafter = SuffixDecoding(index)
    index.extend(text.prompt)
    right = []
    for at, token in enumerate(text.answer[:-1], 1):
        index.extend([token])
        future = text.answer[at:]
        offer = drafter.propose(MAX_DEPTH).tokens
        right.append(common_prefix(offer, future[: len(offer)]))
    return right


def repeated(text: Known) -> list[int]:
    """Return how many tokens are right, behind each token of the answer, of the best continuation of the last two."""
    tokens, start = text.prompt + text.answer, len(text.prompt)
    places: dict[tuple[int, int], list[int]] = {}
    right = []
    for end, pair in enumerate(pairwise(tokens), 1):
        if end >= start and end < len(tokens) - 1:
            future = tokens[end + 1 : end + 1 + MAX_DEPTH]
            ways = (tokens[place + 1 : place + 1 + len(future)] for place in places.get(pair, ()))
            right.append(max((common_prefix(way, future) for way in ways), default=0))
        places.setdefault(pair, []).append(end)
    return right


def oracle(costs: PassCosts, right: Sequence[int]) -> float:
    """Return the least ms for an answer when `right[i]` tokens can be drafted, all of them right, behind its token i.

    The last token comes out of a pass, so it is never drafted.
    """
    times = list(costs.verify_ms)
    for n in range(len(times) - 2, -1, -1):  # a pass over more tokens may be faster
        times[n] = min(times[n], times[n + 1])
    best = [0.0] * (len(right) + 1)
    for at in range(len(right) - 1, -1, -1):
        most = min(right[at], len(right) - at - 1)
        best[at] = min(times[n] + best[at + n + 1] for n in range(most + 1))
    return best[0]
