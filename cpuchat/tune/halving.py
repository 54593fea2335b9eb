"""Finds the fastest of some candidates on a machine that other programs use too. Knows nothing of what is measured.

Successive halving: all candidates are measured briefly, the better half again for longer, until one is left. The
anchor, the setting in use, is measured before and after every four: a candidate counts by its ratio to the anchor at
the same time, and four during which the anchor drifted by more than 10 % are repeated once. What is left is measured in
turn with the anchor, and wins only if that gain is beyond what such rounds scatter by, and it is nowhere slower.
"""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Final, Generic, Literal, TypeVar

import msgspec

from cpuchat.base.errors import CpuchatError, Interrupted
from cpuchat.telemetry.rounds import MAX_DRIFT, MIN_GAIN, InTurn, MeasuredGain, has_drifted

GROUP: Final = 4
"""Measurements between two of the anchor."""
HOPELESS: Final = 0.97
"""A candidate this far below the anchor is not measured again: short measurements scatter by less."""
Verdict = Literal["faster", "no gain", "slower", "mixed", "busy", "failed"]
C = TypeVar("C", bound=Hashable)


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

    def figures(self, prompt_share: float) -> dict[str, float]:
        """Return all rates by name."""
        texts = {f"text {number}": rate for number, rate in enumerate(self.decode)}
        return {"overall": self.overall(prompt_share), "decode": self.mean_decode, "prefill": self.prefill, **texts}


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate's speed ÷ the anchor's at the same time."""

    overall: float
    decode: float
    prefill: float


class HalvingResult(msgspec.Struct, Generic[C], frozen=True, kw_only=True):
    """The best candidate (None: none was measured) and the verdict on it.

    `spread` is the standard error of the overall ratio. `anchor` is the median speed of the setting in use. `problem`
    is why nothing could be decided, or why a candidate failed.
    """

    verdict: Verdict
    best: C | None = None
    ratio: Ratio | None = None
    spread: float = 0.0
    anchor: Speed | None = None
    problem: str = ""


class Halving(Generic[C]):
    """One search. `measure`: measures a candidate for a rung (from 1; later rungs take longer). Raises CpuchatError
    for one that cannot be used, Interrupted when the search is to end. `prompt_share`: share of prompt tokens among
    all tokens, 0 to 1.
    """

    def __init__(self, measure: Callable[[C, int], Awaitable[Speed]], prompt_share: float) -> None:
        self._measure = measure
        self._share = prompt_share
        self._anchors: list[Speed] = []
        self._problem = ""

    async def run(self, anchor: C, candidates: Sequence[C]) -> HalvingResult[C]:
        """Find out whether one of `candidates` is faster than `anchor`. Raises Interrupted: as `measure` does;
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

    async def _anchor(self, anchor: C, rung: int) -> Speed:
        self._anchors.append(await self._measure(anchor, rung))
        return self._anchors[-1]

    async def _group(
        self, anchor: C, members: Sequence[C], before: Speed, rung: int
    ) -> tuple[list[tuple[C, Speed]], Speed, Speed] | None:
        """Measure a few rivals after the anchor (`before`), and the anchor again; all once more if that drifted.
        Returns those that can be used with the anchor's speeds before and after; None if it drifted twice.
        """
        for _ in range(2):
            tried = [(member, await self._tried(member, rung)) for member in members]
            measured = [(member, speed) for member, speed in tried if speed is not None]
            if not measured:
                return [], before, before
            after = await self._anchor(anchor, rung)
            if not has_drifted(before.overall(self._share), after.overall(self._share)):
                return measured, before, after
            before = after
        return None

    async def _rung(self, anchor: C, rivals: Sequence[C], rung: int) -> list[tuple[C, Ratio]] | None:
        """Measure all rivals, with the anchor between each few of them; None if that drifted twice."""
        found: list[tuple[C, Ratio]] = []
        after = await self._anchor(anchor, rung)
        for at in range(0, len(rivals), GROUP):
            group = await self._group(anchor, rivals[at : at + GROUP], after, rung)
            if group is None:
                return None
            measured, before, after = group
            steps = len(measured) + 1
            found += [
                (rival, _ratio(speed, before, after, number / steps, self._share))
                for number, (rival, speed) in enumerate(measured, 1)
            ]
        return found

    async def _duel(self, anchor: C, best: C, rung: int) -> HalvingResult[C]:
        """Measure both in turn, until it is clear which is faster. What was measured before chose the best one, so it
        tells too well of it, and does not count."""
        after = await self._anchor(anchor, rung)
        rounds = InTurn(after.figures(self._share))
        while not rounds.rounds or not rounds.is_decided(GAINS):
            group = await self._group(anchor, [best], after, rung)
            if group is None:
                return self._finding("busy", best, problem=self._busy_words())
            measured, _, after = group
            if not measured:
                return self._finding("failed", best, problem=self._problem)
            rounds.add(measured[0][1].figures(self._share), after.figures(self._share))
        found = Ratio(**{name: 1 + rounds.gain(name).gain for name in Ratio.__struct_fields__})
        texts = [f"text {number}" for number in range(len(after.decode))]
        return self._finding(_verdict(rounds, texts), best, found, rounds.gain("overall").error)

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
    ) -> HalvingResult[C]:
        return HalvingResult(
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


GAINS: Final = ("decode", "prefill")
"""Either may be what is faster, as long as nothing is slower."""


def _ratio(speed: Speed, before: Speed, after: Speed, at: float, share: float) -> Ratio:
    """Return the ratio to the anchor, taken as changing evenly from `before` to `after`; `at` from 0 to 1."""
    own, first, last = (one.figures(share) for one in (speed, before, after))
    return Ratio(
        **{name: own[name] / (first[name] + (last[name] - first[name]) * at) for name in Ratio.__struct_fields__}
    )


def _verdict(rounds: InTurn, texts: Sequence[str]) -> Verdict:
    overall = rounds.gain("overall")
    if -overall.gain > overall.needed:
        return "slower"
    if overall.gain <= 0 or not any(rounds.gain(name).is_sure for name in GAINS):
        return "no gain"
    # Nowhere slower than what rounds of the same would differ by.
    return "faster" if all(_is_no_slower(rounds.gain(name)) for name in (*texts, "prefill")) else "mixed"


def _is_no_slower(gain: MeasuredGain) -> bool:
    return gain.gain > -min(max(MIN_GAIN, 2 * gain.error), MAX_DRIFT / 2)
