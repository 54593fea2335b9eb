"""Finds the fastest of some candidates on a machine that other programs use too. Knows nothing of what is measured.

Successive halving: all candidates are measured briefly, the better half again for longer, until one is left. The
anchor, the setting in use, is measured before and after every four: a candidate counts by its ratio to the anchor at
the same time, and four during which the anchor drifted by more than 10 % are repeated once. What is left is measured in
turn with the anchor, and wins only if it gains more than the spread of these rounds and is nowhere slower.

For a single change `measure_decode`, a few short greedy answers without drafters, is done before and after it, and
`compare` decides whether decoding became faster, or whether that was noise.
"""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Generic, Literal, TypeVar

import msgspec

from cpuchat.base.errors import CpuchatError, Interrupted, MeasureFailed
from cpuchat.bench.run import GROUP, MAX_DRIFT, has_drifted
from cpuchat.protocol.messages import Generate, Speculation
from cpuchat.protocol.timings import LEAST_TOKENS
from cpuchat.quality.greedy import Answering, answer_greedily
from cpuchat.telemetry import units

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


LEAST_GAIN = 0.02


class RateChange(msgspec.Struct, frozen=True, kw_only=True):
    """`gain` as a share of the rate before (0.05: 5 % faster); `needed` is the gain that would have been believed.

    `keep` only above `needed`; `words` say it in one sentence.
    """

    keep: bool
    gain: float
    needed: float
    words: str


def compare(before: DecodeRate, after: DecodeRate) -> RateChange:
    """Keep a change only if it gains more than 2 % and more than twice the spread of the rounds.

    The larger spread of the two measurements counts.
    """
    gained = after.tok_s - before.tok_s
    enough = max(LEAST_GAIN * before.tok_s, 2 * max(before.spread, after.spread))
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


MAX_ROUNDS: Final = 3
HOPELESS: Final = 0.97
"""A candidate this far below the anchor is not measured again: short measurements scatter by less."""
_CLEAR: Final = 2.0
"""A gain this many times above the threshold needs no third round."""

Verdict = Literal["faster", "no gain", "slower", "mixed", "busy", "failed"]
C = TypeVar("C")


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens per second: `prefill`, and `decode` of each text that was written."""

    prefill: float
    decode: tuple[float, ...]

    @property
    def mean_decode(self) -> float:
        """Return the geometric mean of all texts."""
        return statistics.geometric_mean(self.decode)

    def overall(self, prompt_share: float) -> float:
        """Return tokens per second where this share of all tokens are prompts'."""
        return 1 / (prompt_share / self.prefill + (1 - prompt_share) / self.mean_decode)


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate's speed ÷ the anchor's at the same time. `worst` is the least of all figures alone."""

    overall: float
    decode: float
    prefill: float
    worst: float


class Finding(msgspec.Struct, Generic[C], frozen=True, kw_only=True):
    """The best candidate (None: none was measured) and the verdict on it.

    `ratio` is the median of the rounds, `spread` the largest less the smallest. `anchor` is the median speed of the
    setting in use. `problem` is why nothing could be decided, or why a candidate failed.
    """

    verdict: Verdict
    best: C | None = None
    ratio: Ratio | None = None
    spread: float = 0.0
    anchor: Speed | None = None
    problem: str = ""


class Halving(Generic[C]):
    """One search.

    Args:
        measure: measures a candidate for a rung (from 1; later rungs take longer). Raises CpuchatError for one that
            cannot be used, Interrupted when the search is to end.
        prompt_share: share of prompt tokens among all tokens, 0 to 1.
    """

    def __init__(self, measure: Callable[[C, int], Awaitable[Speed]], prompt_share: float) -> None:
        self._measure = measure
        self._share = prompt_share
        self._anchors: list[Speed] = []
        self._problem = ""

    async def run(self, anchor: C, candidates: Sequence[C]) -> Finding[C]:
        """Find out whether one of `candidates` is faster than `anchor`.

        Raises:
            Interrupted: as `measure` does.
            CpuchatError: the anchor cannot be measured.
        """
        rivals, rung = list(candidates), 1
        best: C | None = None
        ratio: Ratio | None = None
        while rivals:
            found = await self._rung(anchor, rivals, rung)
            if found is None:
                return self._finding("busy", problem=self._busy_words())
            if not found:
                break
            ranked = sorted(found, key=lambda one: one[1].overall, reverse=True)
            best, ratio = ranked[0]
            rivals = [one for one, its in ranked if its.overall > HOPELESS][: max(1, len(ranked) // 2)]
            if len(rivals) <= 1:
                break
            rung += 1
        if best is None or ratio is None:
            return self._finding("failed", problem=self._problem)
        if ratio.overall <= 1:
            return self._finding("slower" if ratio.overall < HOPELESS else "no gain", best, ratio)
        return await self._duel(anchor, best, rung)

    async def _rung(self, anchor: C, rivals: Sequence[C], rung: int) -> list[tuple[C, Ratio]] | None:
        """Measure all rivals, with the anchor between each few of them; None if that drifted twice."""
        found: list[tuple[C, Ratio]] = []
        await self._anchor(anchor, rung)
        for at in range(0, len(rivals), GROUP):
            group = await self._group(anchor, rivals[at : at + GROUP], rung)
            group = await self._group(anchor, rivals[at : at + GROUP], rung) if group is None else group
            if group is None:
                return None
            found += group
        return found

    async def _group(self, anchor: C, rivals: Sequence[C], rung: int) -> list[tuple[C, Ratio]] | None:
        """Measure some rivals after the last measurement of the anchor, and that again; None if it drifted."""
        before = self._anchors[-1]
        measured = [(one, speed) for one in rivals if (speed := await self._tried(one, rung)) is not None]
        if not measured:
            return []
        after = await self._anchor(anchor, rung)
        if _drifted(before, after, self._share):
            return None
        steps = len(measured) + 1
        return [
            (one, _ratio(speed, before, after, at / steps, self._share)) for at, (one, speed) in enumerate(measured, 1)
        ]

    async def _duel(self, anchor: C, best: C, rung: int) -> Finding[C]:
        """Measure both in turn, until it is clear which is faster, at most three rounds."""
        ratios: list[Ratio] = []
        anchors = self._anchors[-1:]
        while len(ratios) < MAX_ROUNDS:
            speed = await self._tried(best, rung)
            if speed is None:
                return self._finding("failed", best, problem=self._problem)
            anchors.append(await self._anchor(anchor, rung))
            if _drifted(anchors[-2], anchors[-1], self._share):
                return self._finding("busy", best, problem=self._busy_words())
            ratios.append(_ratio(speed, anchors[-2], anchors[-1], 0.5, self._share))
            if len(ratios) > 1 and _is_clear(ratios):
                break
        found = Ratio(**{name: statistics.median(getattr(one, name) for one in ratios) for name in _NAMES})
        spread = _spread(ratios, "overall")
        if spread > MAX_DRIFT:
            return self._finding("busy", best, found, spread, f"rounds differed by {100 * spread:.0f} %")
        return self._finding(_verdict(found, ratios), best, found, spread)

    async def _anchor(self, anchor: C, rung: int) -> Speed:
        speed = await self._measure(anchor, rung)
        self._anchors.append(speed)
        return speed

    async def _tried(self, candidate: C, rung: int) -> Speed | None:
        """Measure a candidate; None if it cannot be used."""
        try:
            return await self._measure(candidate, rung)
        except Interrupted:
            raise
        except CpuchatError as error:
            self._problem = str(error)
            return None

    def _finding(
        self,
        verdict: Verdict,
        best: C | None = None,
        ratio: Ratio | None = None,
        spread: float = 0.0,
        problem: str = "",
    ) -> Finding[C]:
        return Finding(
            verdict=verdict, best=best, ratio=ratio, spread=spread, anchor=self.anchor_speed, problem=problem
        )

    @property
    def anchor_speed(self) -> Speed | None:
        """Return the median speed of the anchor so far."""
        middle = sorted(self._anchors, key=lambda one: one.overall(self._share))
        return middle[len(middle) // 2] if middle else None

    def _busy_words(self) -> str:
        rates = [one.overall(self._share) for one in self._anchors[-2:]]
        drift = 100 * (max(rates) / min(rates) - 1)
        return f"speed drifted by {drift:.0f} %"


_NAMES: Final = ("overall", "decode", "prefill", "worst")
_GAINS: Final = ("overall", "decode", "prefill")
"""Any of these may be what is faster, as long as nothing is slower."""


def _ratio(speed: Speed, before: Speed, after: Speed, at: float, share: float) -> Ratio:
    """Return the ratio to the anchor, taken as changing evenly from `before` to `after`; `at` from 0 to 1."""

    def between(first: float, last: float) -> float:
        return first + (last - first) * at

    parts = zip(*((one.prefill, *one.decode) for one in (speed, before, after)), strict=True)
    return Ratio(
        overall=speed.overall(share) / between(before.overall(share), after.overall(share)),
        decode=speed.mean_decode / between(before.mean_decode, after.mean_decode),
        prefill=speed.prefill / between(before.prefill, after.prefill),
        worst=min(one / between(first, last) for one, first, last in parts),
    )


def _drifted(before: Speed, after: Speed, share: float) -> bool:
    return has_drifted(before.overall(share), after.overall(share))


def _spread(ratios: Sequence[Ratio], name: str) -> float:
    values = [getattr(one, name) for one in ratios]
    return max(values) - min(values)


def _is_clear(ratios: Sequence[Ratio]) -> bool:
    """Return whether another round would not change the verdict."""
    gains = {name: [getattr(one, name) - 1 for one in ratios] for name in _GAINS}
    if all(max(values) < LEAST_GAIN for values in gains.values()):
        return True
    if min(min(one.worst, one.overall) for one in ratios) <= 1 - LEAST_GAIN:
        return False
    return any(min(values) > _CLEAR * max(LEAST_GAIN, _spread(ratios, name)) for name, values in gains.items())


def _verdict(ratio: Ratio, ratios: Sequence[Ratio]) -> Verdict:
    """Judge the median `ratio` of the rounds."""
    thresholds = {name: max(LEAST_GAIN, _spread(ratios, name)) for name in _NAMES}
    if ratio.overall - 1 < -thresholds["overall"]:
        return "slower"
    if ratio.overall <= 1 or not any(getattr(ratio, name) - 1 > thresholds[name] for name in _GAINS):
        return "no gain"
    # Nowhere slower than what two measurements of the same differ by.
    return "faster" if 1 - ratio.worst <= min(thresholds["worst"], MAX_DRIFT / 2) else "mixed"
