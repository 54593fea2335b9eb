"""Measures the current decode speed of a loaded model with a few short greedy answers without drafters.

Short, so that it can be done before and after every change of settings.
"""

from __future__ import annotations

import statistics

import msgspec

from cpuchat.errors import MeasureFailed
from cpuchat.greedy import Answering, answer_greedily
from cpuchat.protocol import Generate, Speculation
from cpuchat.timings import LEAST_TOKENS

N_TOKENS = 64
ROUNDS = 3
_WARM_UP_TOKENS = 8

# Texts that go on by themselves, continued without a chat template. Speed does not depend on what is written, only a
# model that ends at once cannot be measured: then the next one is tried.
PROMPTS = (
    "Once upon a time there was a small town by a river, and in this town lived",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18,",
    "Question: Explain in detail how a bicycle works.\nAnswer: A bicycle is",
)


class DecodeRate(msgspec.Struct, frozen=True, kw_only=True):
    """Decode rates in tokens per second: `tok_s` is the median of `rounds`, `spread` the largest less the smallest."""

    tok_s: float
    spread: float
    rounds: tuple[float, ...]


async def measure_decode(answer: Answering, *, n_tokens: int = N_TOKENS, rounds: int = ROUNDS) -> DecodeRate:
    """Decode `rounds` times `n_tokens` tokens, after a short one that does not count.

    Args:
        n_tokens: tokens of each round; a model that ends earlier is measured by what it wrote.

    Raises:
        MeasureFailed: the engine failed, it was stopped, or no answer reached 16 tokens (`n_tokens` if that is less).
    """
    least = min(LEAST_TOKENS, n_tokens)
    written = 0
    for prompt in PROMPTS:
        request = Generate(prompt=prompt, max_tokens=n_tokens, speculation=Speculation())
        await answer_greedily(answer, msgspec.structs.replace(request, max_tokens=_WARM_UP_TOKENS))
        rates: list[float] = []
        for _ in range(rounds):
            timings = await answer_greedily(answer, request)
            written = max(written, timings.predicted_n)
            rate = timings.predicted_per_second
            if timings.predicted_n < least or rate is None:
                break
            rates.append(rate)
        else:
            return DecodeRate(tok_s=statistics.median(rates), spread=max(rates) - min(rates), rounds=tuple(rates))
    raise MeasureFailed(f"The model stops after {written} tokens, too few to measure.", "Choose another model.")
