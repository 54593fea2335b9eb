"""Orders measurements on a shared machine. Knows nothing of what is measured.

A warm-up of each cell is dropped. Every other round goes through the cells backwards. An anchor (the first cell) is
measured again every four measurements: when it drifted by more than 10 %, these four are repeated, at most twice; after
that they are kept and marked noisy.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Hashable, Sequence
from typing import Final, Generic, TypeVar

C = TypeVar("C", bound=Hashable)
S = TypeVar("S")

GROUP: Final = 4
"""Measurements between two of the anchor."""
MAX_DRIFT: Final = 0.10
MAX_REPEATS: Final = 2


class Protocol(Generic[C, S]):
    """Measures some cells, `rounds` times each.

    Args:
        measure: measures a cell once.
        speed: the rate of a sample, which shows drift.
        keep: takes a cell's sample of a round (from 1) and whether it is noisy, once it counts.
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
        order = [one for one in schedule(cells, self._rounds) if one not in done]
        if not order:
            return
        wanted = {cell for cell, _ in order}
        if len(wanted) == 1:  # its own rounds tell of drift
            await self._measure(order[0][0])
            for cell, number in order:
                self._keep(cell, number, await self._measure(cell), False)
            return
        for cell in cells:
            if cell in wanted:
                await self._measure(cell)
        anchor = next(cell for cell in cells if cell in wanted)
        before = await self._anchor(anchor)
        for at in range(0, len(order), GROUP):
            before = await self._group(order[at : at + GROUP], anchor, before)

    async def _group(self, group: Sequence[tuple[C, int]], anchor: C, before: float) -> float:
        """Measure a group, again while the anchor drifts; returns the anchor's speed after it."""
        for attempt in range(1 + MAX_REPEATS):
            samples = [await self._measure(cell) for cell, _ in group]
            after = await self._anchor(anchor)
            drifted = has_drifted(before, after)
            before = after
            if not drifted or attempt == MAX_REPEATS:
                for (cell, number), sample in zip(group, samples, strict=True):
                    self._keep(cell, number, sample, drifted)
                break
        return before

    async def _anchor(self, anchor: C) -> float:
        return self._speed(await self._measure(anchor))


def has_drifted(before: float, after: float) -> bool:
    """Return whether two speeds of the same differ by more than 10 % of the slower one."""
    return max(before, after) > (1 + MAX_DRIFT) * min(before, after)


def schedule(cells: Sequence[C], rounds: int) -> list[tuple[C, int]]:
    """Return (cell, round) in the order of measuring: every other round backwards."""
    return [(cell, number) for number in range(1, rounds + 1) for cell in (cells if number % 2 else cells[::-1])]
