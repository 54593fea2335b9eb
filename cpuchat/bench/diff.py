"""Two benchmarks of the same cells: which differences exceed the spread of their rounds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from cpuchat.bench.results import Report, Result

REGRESSION: int = 1
"""Exit code of `cpuchat bench --diff` when a figure is slower."""
LEAST = 0.02
"""Share below which a difference never counts."""

Figure = Literal["decode", "prefill"]
Verdict = Literal["faster", "slower", "same"]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Medians of one figure of one cell in tok/s. `change` as a share of the old one (−0.05: 5 % slower); `needed` is
    what it must exceed to be believed."""

    old: Result
    new: Result
    figure: Figure
    before: float
    after: float
    needed: float

    @property
    def change(self) -> float:
        return self.after / self.before - 1

    @property
    def verdict(self) -> Verdict:
        if abs(self.change) <= self.needed:
            return "same"
        return "faster" if self.change > 0 else "slower"


class Diff(msgspec.Struct, frozen=True, kw_only=True):
    """All differences, and the cells that only one of the benchmarks has measured."""

    differences: tuple[Difference, ...]
    only_old: tuple[Result, ...]
    only_new: tuple[Result, ...]

    @property
    def regressed(self) -> bool:
        return any(one.verdict == "slower" for one in self.differences)


def compare_reports(old: Report, new: Report) -> Diff:
    """Compare the cells that both have. A difference counts when it exceeds 2 % and the spread (largest less smallest
    round) of both."""
    before = {_key(one): one for one in old.results if not one.failure}
    after = {_key(one): one for one in new.results if not one.failure}
    differences: list[Difference] = []
    for key, one in before.items():
        if (other := after.get(key)) is not None:
            differences += _differences(one, other)
    return Diff(
        differences=tuple(differences),
        only_old=tuple(one for key, one in before.items() if key not in after),
        only_new=tuple(one for key, one in after.items() if key not in before),
    )


def _key(result: Result) -> tuple[object, ...]:
    """Identify a cell on any machine: paths differ, the files' names do not."""
    setup = msgspec.structs.replace(
        result.cell.setup, model=Path(result.model_filename).name, draft=Path(result.draft_filename).name
    )
    return (setup, result.drafters, result.speech, result.test, result.cell.test.n_gen)


def _differences(old: Result, new: Result) -> list[Difference]:
    decoding = old.decode_ts is not None and new.decode_ts is not None
    figures: list[tuple[Figure, Sequence[float], Sequence[float]]] = []
    if decoding:
        figures.append(("decode", old.samples_ts, new.samples_ts))
    if old.prefill_samples_ts and new.prefill_samples_ts:
        figures.append(("prefill", old.prefill_samples_ts, new.prefill_samples_ts))
    found: list[Difference] = []
    for figure, before, after in figures:
        if before and after and min(before) > 0:
            middle = statistics.median(before)
            spread = max(max(before) - min(before), max(after) - min(after))
            found.append(
                Difference(
                    old=old,
                    new=new,
                    figure=figure,
                    before=middle,
                    after=statistics.median(after),
                    needed=max(LEAST, spread / middle),
                )
            )
    return found
