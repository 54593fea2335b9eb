"""Things measured in turn, so that a machine that grows slower, or is busy for a while, is to none's advantage."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from typing import Final, Generic, TypeVar

from cpuchat.base.errors import MeasureFailed
from cpuchat.measure.difference import Difference, compare

DRIFT: Final = 0.10
"""Share by which rates of the same differ only if something else was at work meanwhile."""
MIN_ROUNDS, MAX_ROUNDS = 3, 8
_GROUP: Final = 4
"""Measurements between two of the anchor."""
Rates = Mapping[str, float]
"""Rates by the name of the figure."""
T = TypeVar("T")
C = TypeVar("C", bound=Hashable)


class Drifted(MeasureFailed, code="drifted"):
    """Raised when the speed of the same changed twice while others were measured."""


def in_order(things: Sequence[T], number: int) -> Sequence[T]:
    """Return the things in the order of a round, numbered from 0: A B, B A, A B, ..."""
    return things[::-1] if number % 2 else things


def has_drifted(before: float, after: float) -> bool:
    """Return whether two rates of the same differ by more than 10 % of the slower one."""
    return max(before, after) > (1 + DRIFT) * min(before, after)


def has_scattered(rates: Sequence[float]) -> bool:
    """Return whether rates of the same differ so, one in five of the fastest and of the slowest left out: of many, some
    do on any machine."""
    ranked, n_left_out = sorted(rates), len(rates) // 5
    return bool(ranked) and has_drifted(ranked[n_left_out], ranked[-1 - n_left_out])


class Rounds:
    """What was measured of a rival, and of the anchor around it or at the same time; `difference` compares a figure."""

    def __init__(self, asked: int) -> None:
        self.anchors: list[Rates] = []
        self.rivals: list[Rates] = []
        self._asked = asked

    def continue_from(self, anchor: Rates) -> None:
        """Take what was measured as of a machine on which the last anchor was this one: no ratio changes."""
        factors = {name: anchor[name] / rate for name, rate in self.anchors[-1].items()}
        for side in (self.anchors, self.rivals):
            side[:] = [{name: factor * rates[name] for name, factor in factors.items()} for rates in side]

    def difference(self, name: str) -> Difference:
        a, b = ([rates[name] for rates in side] for side in (self.anchors, self.rivals))
        return compare(a, b, asked=self._asked)


class Turns(Generic[C]):
    """An anchor and its rivals. What drifted by more than 10 % meanwhile is measured once more; `by` is the figure that
    tells. `measure` returns None for a rival that cannot be measured, and its errors end everything. `asked` as of
    `compare`."""

    def __init__(self, measure: Callable[[C], Awaitable[Rates | None]], anchor: C, by: str, *, asked: int = 1) -> None:
        self._measure = measure
        self._anchor = anchor
        self._by = by
        self._asked = asked
        self.anchors: list[Rates] = []
        """All measurements of the anchor."""

    async def rank(self, rivals: Sequence[C]) -> dict[C, Rounds]:
        """Measure all rivals that can be, and those that may be faster once more, backwards; returns the fastest one
        first. Raises Drifted."""
        found = {rival: Rounds(self._asked) for rival in rivals}
        await self._measured_anchor()
        for number in range(2):
            for at in range(0, len(rivals), _GROUP):
                before, measured = await self._between(in_order(rivals[at : at + _GROUP], number))
                after = self.anchors[-1]  # the anchor is taken as changing evenly meanwhile
                for place, (rival, rates) in enumerate(measured, 1):
                    share = place / (len(measured) + 1)
                    anchor = {name: before[name] + share * (after[name] - before[name]) for name in before}
                    found[rival].anchors.append(anchor)
                    found[rival].rivals.append(rates)
            rivals = [rival for rival in rivals if found[rival].rivals and found[rival].difference(self._by).may_gain]
        measured = [rival for rival in found if found[rival].rivals]
        ranked = sorted(measured, key=lambda rival: found[rival].difference(self._by).ratio, reverse=True)
        return {rival: found[rival] for rival in ranked}

    async def duel(self, rival: C, figures: Sequence[str]) -> Rounds:
        """Measure one rival until it is clear whether it is faster in one of these figures, or cannot be: from the
        start, as what was measured before chose it, and tells too well of it. Raises Drifted."""
        rounds = Rounds(self._asked)
        await self._measured_anchor()
        while len(rounds.rivals) < MAX_ROUNDS:
            before, measured = await self._between([rival])
            if not measured:
                break
            if not rounds.anchors:
                rounds.anchors.append(before)
            rounds.continue_from(before)  # another one than the last, if that drifted
            rounds.anchors.append(self.anchors[-1])
            rounds.rivals.append(measured[0][1])
            now = [rounds.difference(name) for name in figures]
            is_sure = len(rounds.rivals) >= MIN_ROUNDS and any(one.verdict == "faster" for one in now)
            if is_sure or not any(one.may_gain for one in now):
                break
        return rounds

    async def _between(self, rivals: Sequence[C]) -> tuple[Rates, list[tuple[C, Rates]]]:
        """Measure rivals after the anchor, and the anchor again; once more if that drifted. Returns the anchor's rates
        before them, and theirs."""
        for _ in range(2):
            before = self.anchors[-1]
            tried = [(rival, await self._measure(rival)) for rival in rivals]
            measured = [(rival, rates) for rival, rates in tried if rates is not None]
            after = (await self._measured_anchor()) if measured else before
            if not has_drifted(before[self._by], after[self._by]):
                return before, measured
        share = max(before[self._by], after[self._by]) / min(before[self._by], after[self._by]) - 1
        raise Drifted(f"speed drifted by {100 * share:.0f} %")

    async def _measured_anchor(self) -> Rates:
        rates = await self._measure(self._anchor)
        assert rates is not None
        self.anchors.append(rates)
        return rates
