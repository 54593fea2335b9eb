"""Rounds of measurements on a machine that other programs use too: what counts, and when a difference is believed.

What is measured stands between two measurements of an anchor, one of the things to compare. When the anchor drifted by
more than 10 %, what stands between is measured again. Two things are compared in turn (A B A B A): the ratio of each
round is taken to the anchor just before and after, and `InTurn` tells after every round whether it decides.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping, Sequence
from itertools import pairwise
from typing import Final, Generic, NamedTuple, TypeVar

C = TypeVar("C", bound=Hashable)
S = TypeVar("S")

GROUP: Final = 4
"""Measurements between two of the anchor."""
MAX_DRIFT: Final = 0.10
MAX_REPEATS: Final = 2


def has_drifted(before: float, after: float) -> bool:
    """Return whether two speeds of the same differ by more than 10 % of the slower one."""
    return max(before, after) > (1 + MAX_DRIFT) * min(before, after)


class Group(NamedTuple, Generic[C, S]):
    """What was measured between two measurements of the anchor, `before` and `after`, which `drifted` or not."""

    measured: list[tuple[C, S]]
    before: S
    after: S
    drifted: bool


class Anchored(Generic[C, S]):
    """Measures beside an anchor.

    Args:
        measure: measures something once.
        speed: the rate of a sample, which shows drift.
        repeats: how often a group is measured again while the anchor drifts.
    """

    def __init__(
        self, anchor: C, measure: Callable[[C], Awaitable[S]], speed: Callable[[S], float], repeats: int
    ) -> None:
        self.anchor = anchor
        self.measure, self.speed = measure, speed
        self.samples: list[S] = []
        """Those of the anchor."""
        self._repeats = repeats

    async def again(self) -> S:
        """Measure the anchor."""
        self.samples.append(await self.measure(self.anchor))
        return self.samples[-1]

    async def group(
        self, members: Sequence[C], measure: Callable[[C], Awaitable[S | None]] | None = None
    ) -> Group[C, S]:
        """Measure a few things after the last measurement of the anchor, and the anchor again. `measure`: measures a
        member; None for one that cannot be, which is left out.
        """
        for repeat in range(1 + self._repeats):
            before, measured = self.samples[-1], list[tuple[C, S]]()
            for member in members:
                if (sample := await (measure or self.measure)(member)) is not None:
                    measured.append((member, sample))
            if not measured:
                return Group([], before, before, False)
            after = await self.again()
            drifted = has_drifted(self.speed(before), self.speed(after))
            if not drifted or repeat == self._repeats:
                return Group(measured, before, after, drifted)
        raise AssertionError("repeats is negative")


class Protocol(Generic[C, S]):
    """Measures some cells, `rounds` times each, after a warm-up of each that is dropped; every other round goes through
    them backwards. Four during which the anchor drifts are repeated at most twice, then kept and marked noisy.

    `measure`, `speed`: as of `Anchored`; the first cell is the anchor. `keep`: takes a cell's sample of a round (from
    1) and whether it is noisy, once it counts.
    """

    def __init__(
        self,
        rounds: int,
        measure: Callable[[C], Awaitable[S]],
        speed: Callable[[S], float],
        keep: Callable[[C, int, S, bool], None],
    ) -> None:
        self._rounds = rounds
        self._measure = measure
        self._speed = speed
        self._keep = keep

    async def run(self, cells: Sequence[C], done: Collection[tuple[C, int]] = ()) -> None:
        """Measure all cells in all rounds but those that are `done`."""
        order = [place for place in schedule(cells, self._rounds) if place not in done]
        if not order:
            return
        wanted = {cell for cell, _ in order}
        warm_up = [cell for cell in cells if cell in wanted]
        for cell in warm_up:
            await self._measure(cell)
        if len(wanted) == 1:  # its own rounds tell of drift
            for cell, number in order:
                self._keep(cell, number, await self._measure(cell), False)
            return
        anchored = Anchored(warm_up[0], self._measure, self._speed, MAX_REPEATS)
        await anchored.again()
        for at in range(0, len(order), GROUP):
            places = order[at : at + GROUP]
            found = await anchored.group([cell for cell, _ in places])
            for (cell, number), (_, sample) in zip(places, found.measured, strict=True):
                self._keep(cell, number, sample, found.drifted)


def schedule(cells: Sequence[C], rounds: int) -> list[tuple[C, int]]:
    """Return (cell, round) in the order of measuring: every other round backwards."""
    return [(cell, number) for number in range(1, rounds + 1) for cell in (cells if number % 2 else cells[::-1])]


MIN_GAIN: Final = 0.02
MIN_ROUNDS, MAX_ROUNDS = 3, 8
_Z: Final = 3.2
"""Normal quantile of a gain that is believed. Six choices of two figures each, looked at after each of six rounds, are
together to be wrong in at most 2 % of all runs of `tune` (benchmarks/tune_noise.py)."""
_HOPE: Final = 1.5
"""Standard errors by which a gain may exceed its estimate; where even that is too little, measuring stops early."""


class MeasuredGain(NamedTuple):
    """The gain of a figure as a share (0.05: 5 % faster), its standard error, and the gain that would be believed."""

    gain: float
    error: float
    needed: float

    @property
    def is_sure(self) -> bool:
        return self.gain > self.needed


class InTurn:
    """Ratios of one thing to the anchor, measured in turn. `first`: rates of the anchor before the first round, by the
    name of the figure.
    """

    def __init__(self, first: Mapping[str, float]) -> None:
        self._anchors = [first]
        self._rivals: list[Mapping[str, float]] = []

    @property
    def rounds(self) -> int:
        return len(self._rivals)

    def add(self, rival: Mapping[str, float], anchor: Mapping[str, float]) -> None:
        """Add a round: the thing to compare, and the anchor after it."""
        self._rivals.append(rival)
        self._anchors.append(anchor)

    def gain(self, name: str) -> MeasuredGain:
        """Return the gain of a figure, by the logarithms of its ratios.

        What one measurement scatters by is told by the ratios and by neighbouring measurements of the anchor together.
        A mean of n ratios in turn varies by (2n - 0.5) / n² of it, as neighbours share an anchor.
        """
        n, logs = self.rounds, [math.log(anchor[name]) for anchor in self._anchors]
        ratios = [
            math.log(rival[name]) - (before + after) / 2
            for rival, (before, after) in zip(self._rivals, pairwise(logs), strict=True)
        ]
        mean = statistics.fmean(ratios)
        squares = sum((ratio - mean) ** 2 for ratio in ratios) / 1.5
        squares += sum((after - before) ** 2 for before, after in pairwise(logs)) / 2
        error = math.sqrt(squares / (2 * n - 1) * (2 * n - 0.5)) / n
        needed = max(math.log1p(MIN_GAIN), student(_Z, max(1, (n - 1) + 2 * n // 3)) * error)
        return MeasuredGain(math.expm1(mean), error, math.expm1(needed))

    def is_decided(self, names: Sequence[str]) -> bool:
        """Return whether another round would not change what is said of these figures."""
        gains = [self.gain(name) for name in names]
        if self.rounds >= MAX_ROUNDS or all(one.gain + _HOPE * one.error < MIN_GAIN for one in gains):
            return True
        return self.rounds >= MIN_ROUNDS and any(one.is_sure for one in gains)


def student(z: float, dof: int) -> float:
    """Return the quantile of Student's t distribution that is `z` of the normal one (Abramowitz and Stegun 26.7.5;
    within 1 % from 3 degrees of freedom on)."""
    terms = ((z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return z + sum(term / dof**power for power, term in enumerate(terms, 1))
