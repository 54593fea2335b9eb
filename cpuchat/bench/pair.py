"""Measures a draft model with its target before it is used: acceptance and speed-up by kind of prompt."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from cpuchat.bench.matrix import KINDS, OFF, Cell, Matrix, Workload, setups_of
from cpuchat.bench.prompts import load
from cpuchat.bench.results import Report, Result
from cpuchat.bench.run import Bench
from cpuchat.settings import Settings

DEPTHS: Final = (2, 4, 8)
TOKENS: Final = 64
ROUNDS: Final = 3
WORTH: Final = 1.02
"""Speed-up from which on a draft model is worth keeping."""
_ADAPTS: Final = 1.05
"""A fixed depth must be faster than the adaptive one by this factor: the best depth changes with the text."""


class KindResult(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of prompts. `plain` in tok/s; `acceptance`, `tokens_per_pass` and `speed_up` are those of `depth`, the
    fastest (0: adaptive); `speed_ups` are those of all depths."""

    kind: str
    plain: float
    depth: int
    speed_up: float
    speed_ups: dict[int, float]
    acceptance: float | None
    tokens_per_pass: float | None


class PairResult(msgspec.Struct, frozen=True, kw_only=True):
    """All kinds. `reason` is why the adaptive depth drafted nothing, "" when it did."""

    kinds: tuple[KindResult, ...]
    reason: str = ""

    @property
    def depth(self) -> int:
        """Return the depth to use for all kinds (0: adaptive)."""
        depths = set.intersection(*(set(one.speed_ups) for one in self.kinds)) if self.kinds else {0}
        best = max(sorted(depths), key=self.speed_up_with)
        return 0 if self.speed_up_with(0) * _ADAPTS >= self.speed_up_with(best) else best

    @property
    def speed_up(self) -> float:
        """Return that with `depth`."""
        return self.speed_up_with(self.depth)

    def speed_up_with(self, depth: int) -> float:
        """Return the geometric mean of the kinds' speed-ups with a depth; 0 when it was not measured."""
        found = [one.speed_ups.get(depth, 0.0) for one in self.kinds]
        return statistics.geometric_mean(found) if found and all(found) else 0.0

    @property
    def worth_keeping(self) -> bool:
        return self.speed_up >= WORTH


def pair_bench(
    target: Path, draft: Path, chosen: Settings, folder: Path, tell: Callable[[], None] = lambda: None
) -> Bench:
    """Return the benchmark of a pair: plain, adaptive and fixed depths, a prompt of each kind.

    The engine runs as the settings say, with what tuning found for the target.
    """
    [setup] = setups_of(target, Matrix(), chosen)
    setup = msgspec.structs.replace(setup, draft=str(draft))
    cells: list[Cell] = []
    for kind in KINDS:
        test = Workload.of_prompts(kind, TOKENS)
        cells.append(Cell(setup=setup, test=test, drafters=OFF))
        cells += [Cell(setup=setup, test=test, drafters="draft", draft_depth=depth) for depth in (0, *DEPTHS)]
    one_of_each = {prompt.kind: prompt for prompt in reversed(load())}
    prompts = [one_of_each[kind] for kind in KINDS]
    return Bench(cells, ROUNDS, chosen, folder=folder, prompts=prompts, tell=tell)


def pair_result(report: Report) -> PairResult:
    """Return what a finished `pair_bench` says."""
    kinds: list[KindResult] = []
    for kind in KINDS:
        rows = [one for one in report.results if one.test == kind and not one.failure]
        plain = next((one for one in rows if one.drafters == OFF), None)
        drafted = [one for one in rows if one.speed_up is not None]
        if plain is not None and plain.decode_ts and drafted:
            kinds.append(_kind_result(kind, plain.decode_ts, drafted))
    reasons = [one.no_drafts for one in report.results if one.no_drafts]
    return PairResult(kinds=tuple(kinds), reason=next(iter(reasons), ""))


def _kind_result(kind: str, plain: float, drafted: list[Result]) -> KindResult:
    best = max(drafted, key=lambda one: one.speed_up or 0.0)
    return KindResult(
        kind=kind,
        plain=plain,
        depth=best.cell.draft_depth,
        speed_up=best.speed_up or 0.0,
        speed_ups={one.cell.draft_depth: one.speed_up or 0.0 for one in drafted},
        acceptance=best.acceptance,
        tokens_per_pass=best.tokens_per_pass,
    )
