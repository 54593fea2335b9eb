"""Greedy answers that are measured or judged, not shown; and whether a change made decoding faster.

`measure_decode`, a few short answers without drafters, is done before and after a change, and `compare` decides whether
decoding became faster, or whether that was noise. What can be measured in turn is compared by `measure.rounds`.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import AsyncGenerator, Callable

import msgspec

from cpuchat.base.errors import MeasureFailed
from cpuchat.protocol.messages import AnyEvent, Failed, Generate, GenerationFinished, Sampling, Speculation, TextDelta
from cpuchat.protocol.timings import MIN_TOKENS, Timings
from cpuchat.telemetry import units

Answering = Callable[[Generate], AsyncGenerator[AnyEvent, None]]
"""`Conversation.generate_detached` or `Backend.generate` of a loaded model."""


async def answer_greedily(
    answer: Answering, request: Generate, tell: Callable[[TextDelta], None] = lambda _: None
) -> Timings:
    """Let the model answer `request` greedily; returns the figures, and tells of every piece of text. Raises
    MeasureFailed: the engine failed, or it was stopped.
    """
    request = msgspec.structs.replace(request, sampling=Sampling(temperature=0.0))
    async with contextlib.aclosing(answer(request)) as events:
        async for event in events:
            match event:
                case TextDelta():
                    tell(event)
                case Failed():
                    raise MeasureFailed(event.message, event.hint)
                case GenerationFinished(stop_reason="cancelled"):
                    raise MeasureFailed("The measurement was cancelled.", "Measure again when nothing else is running.")
                case GenerationFinished():
                    return event.timings
    raise MeasureFailed("The measurement returned no figures.", "Measure again.")


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
    """Decode `rounds` times `n_tokens` tokens, after a short one that does not count. `n_tokens`: tokens of each round;
    a model that ends earlier is measured by what it wrote. Raises MeasureFailed: the engine failed, it was stopped, or
    no answer reached 16 tokens (`n_tokens` if that is less).
    """
    min_tokens = min(MIN_TOKENS, n_tokens)
    written = 0
    for prompt in PROMPTS:
        request = Generate(prompt=prompt, max_tokens=n_tokens, speculation=Speculation())
        await answer_greedily(answer, msgspec.structs.replace(request, max_tokens=_WARM_UP_TOKENS))
        rates: list[float] = []
        for _ in range(rounds):
            timings = await answer_greedily(answer, request)
            written = max(written, timings.predicted_n)
            rate = timings.predicted_per_second
            if timings.predicted_n < min_tokens or rate is None:
                break
            rates.append(rate)
        else:
            return DecodeRate(tok_s=statistics.median(rates), spread=max(rates) - min(rates), rounds=tuple(rates))
    raise MeasureFailed(f"The model stops after {written} tokens, too few to measure.", "Choose another model.")


MIN_GAIN = 0.02


class RateChange(msgspec.Struct, frozen=True, kw_only=True):
    """`gain` as a share of the rate before (0.05: 5 % faster); `needed` is the gain that would have been believed.

    `keep` only above `needed`; `words` say it in one sentence.
    """

    keep: bool
    gain: float
    needed: float
    words: str


def compare(before: DecodeRate, after: DecodeRate) -> RateChange:
    """Keep a change only if it gains more than 2 % and more than twice the larger spread of the two measurements."""
    gained = after.tok_s - before.tok_s
    enough = max(MIN_GAIN * before.tok_s, 2 * max(before.spread, after.spread))
    gain, needed = gained / before.tok_s, enough / before.tok_s
    keep = gained > enough
    rates = f"{units.rate(before.tok_s)} → {units.rate(after.tok_s)} tok/s"
    if keep:
        words = f"Keep it: {rates}, {percent(gain)}, significant (threshold {100 * needed:.1f} %)."
    elif gained < -enough:
        words = f"Revert it: {rates}, {percent(gain)}, significantly slower."
    else:
        words = f"Revert it: {rates}, {percent(gain)}, not significant (threshold {100 * needed:.1f} %)."
    return RateChange(keep=keep, gain=gain, needed=needed, words=words)


def percent(share: float) -> str:
    """Format as `+3.2 %`, `−1.0 %`; what rounds to zero has no sign."""
    text = f"{100 * abs(share):.1f} %"
    return text if text == "0.0 %" else ("+" if share > 0 else "−") + text
