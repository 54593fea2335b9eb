"""Finds the fastest of some candidates on a machine that other programs use too. Knows nothing of what is measured.

Successive halving: all candidates are measured briefly, the better half again for longer, until one is left. The
anchor, the setting in use, is measured before and after every four: a candidate counts by its ratio to the anchor at
the same time, and four during which the anchor drifted by more than 10 % are repeated once. What is left is measured in
turn with the anchor, and wins only if it gains more than the spread of these rounds and is nowhere slower.
"""

from __future__ import annotations

import statistics
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Generic, Literal, TypeVar

import msgspec

from cpuchat.bench.protocol import GROUP, MAX_DRIFT, has_drifted
from cpuchat.errors import CpuchatError, Interrupted
from cpuchat.tune.compare import LEAST_GAIN

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
