"""A recorded comparison, made by hand."""

from __future__ import annotations

import msgspec

from cpuchat.compare.agreement import AnswerAgreement, ScoredToken, UnlikelyWord
from cpuchat.compare.figures import Verdict
from cpuchat.compare.recording import RecordedSide, Recording
from cpuchat.quality.statistics import Interval


def recorded_side(name: str, ms: float, words: list[str], size: float) -> RecordedSide:
    """One token for each word, one every `ms`."""
    return RecordedSide(
        name=name,
        tokens=tuple((f"{word} ", ms * number) for number, word in enumerate(words)),
        first_s=0.2,
        tok_s=1e3 / ms,
        ended=True,
        bytes_per_token=size,
        utilization=0.56,
    )


def agreed_answer(share: float, *places: UnlikelyWord, tokens: tuple[ScoredToken, ...] = ()) -> AnswerAgreement:
    """An answer of ten words with this share of the same."""
    return AnswerAgreement(
        tokens=tokens, n_words=10, words=Interval(share, share - 0.1, min(share + 0.1, 1)), places=places,
        same_top=0.9, kld=0.02, ppl=1.4, ppl_other=1.5,
    )  # fmt: skip


WORDS = [f"word{number}" for number in range(60)]
RECORDING = Recording(
    title="Q8_0 against Q4_K_M",
    sides=(
        recorded_side("Q8_0", 100.0, WORDS, 1.65e9),
        recorded_side("Q4_K_M", 50.0, [*WORDS[:30], "other", *WORDS[31:]], 0.98e9),
    ),
    machine="EPYC 9354P · 32 threads",
    prompt="Why is it slow?",
    verdict=Verdict("bytes", 2.0, 0.59, 0.97, (1.9, 2.1), 3),
)
"""B is twice as fast, and has another word in the middle: it ends after 2.95 s, A after 5.9 s."""
STOPPED = msgspec.structs.replace(
    RECORDING,
    sides=(msgspec.structs.replace(RECORDING.sides[0], ended=False), RECORDING.sides[1]),
    verdict=Verdict("incomplete"),
    stopped=True,
)
