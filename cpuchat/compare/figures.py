"""Computes the figures of both sides over the rounds, and the verdict."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from cpuchat.compare.runner import Round, SideAnswer
from cpuchat.measure.difference import MATTERS, compare

MIN_ROUNDS = 3
"""Rounds from which on medians and the spread are shown."""
_ROUNDS = 5
MEMORY_BUSY, MAX_REACHED = 0.4, 1.1
"""Utilization of the memory below which it is not the limit of decoding; and the share of what the bytes allow above
which they do not explain the difference."""

Name = Literal[
    "tok_s", "first_s", "prefill", "tokens", "acceptance", "per_pass", "memory", "bytes", "bandwidth", "utilization",
    "joules",
]  # fmt: skip
NAMES: tuple[Name, ...] = get_args(Name)


@dataclass(frozen=True, slots=True)
class Value:
    """The median of `n` rounds; `low` and `high` are the smallest and the largest."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Value:
        return cls(statistics.median(values), min(values), max(values), len(values))


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One figure of both sides; None: not known. Rates per second, `memory` and `bytes` in bytes, shares 0 to 1."""

    a: Value | None
    b: Value | None

    @property
    def ratio(self) -> float | None:
        """B ÷ A."""
        return self.b.median / self.a.median if self.a and self.b and self.a.median else None


Kind = Literal[
    "incomplete",  # a side failed, or was stopped
    "short",  # both are complete, and one has no speed: it takes two tokens
    "disturbed",  # other programs were using the cores
    "cached",  # the weights of both stay in L3: bytes do not decide
    "same",  # any difference is too small to matter
    "noisy",  # it cannot be told yet
    "settings",  # both read the same bytes, or it is not known how many
    "bytes",  # fewer bytes, faster: how much of what they allow
    "other limit",  # fewer bytes, but not faster, or faster although memory is not the limit
]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Comparison. `speed` and `bytes` are B ÷ A, `reached` is the share of what the bytes allow to the side that reads
    fewer; `interval` holds the true speed."""

    kind: Kind
    speed: float = 0.0
    bytes: float = 0.0
    reached: float = 0.0
    interval: tuple[float, float] = (0.0, 0.0)
    n_rounds: int = 1


@dataclass(frozen=True)
class ComparisonFigures:
    """The table of a turn. `rounds` of them are complete; without one, the figures are those of the last round."""

    rows: dict[Name, ComparisonRow] = field(default_factory=dict)
    verdict: Verdict = Verdict("incomplete")
    n_rounds: int = 0

    @property
    def medians(self) -> bool:
        return self.n_rounds >= MIN_ROUNDS

    def medians_of(self, side: int) -> dict[Name, float]:
        """Return what is known of a side (0, 1)."""
        return {name: value.median for name, row in self.rows.items() if (value := (row.a, row.b)[side]) is not None}


def figures_of(rounds: Sequence[Round]) -> ComparisonFigures:
    """Return the figures of the rounds of one turn that count (`Turn.counted`). Fewer than `MIN_ROUNDS`: those of the
    last round."""
    if not rounds:
        return ComparisonFigures()
    complete = [one for one in rounds if one.complete]
    counted = complete if len(complete) >= MIN_ROUNDS else (complete or list(rounds))[-1:]
    rows: dict[Name, ComparisonRow] = {}
    for name in NAMES:
        known = [
            [value for one in counted if (value := figure(name, one.answers[side])) is not None] for side in (0, 1)
        ]
        if any(known):
            rows[name] = ComparisonRow(*(Value.of(values) if values else None for values in known))
    return ComparisonFigures(rows, _verdict(rows, complete or counted), len(complete))


def figure(name: Name, answer: SideAnswer) -> float | None:
    """Return one figure of one answer; None where it is not known."""
    timings, roofline = answer.timings, answer.roofline
    if name == "memory":
        return answer.memory
    if timings is None:
        return None
    rate = timings.predicted_per_second
    match name:
        case "tok_s":
            return rate
        case "first_s":
            return timings.ttft_ms / 1e3 if timings.predicted_n else None
        case "prefill":
            return timings.prompt_per_second
        case "tokens":
            return timings.predicted_n
        case "acceptance":
            return timings.draft_n_accepted / timings.draft_n if timings.draft_n else None
        case "per_pass":
            return timings.tokens_per_pass
        case "bytes":
            return roofline.estimate.value / rate if roofline and roofline.estimate.value and rate else None
        case "bandwidth":
            return roofline.estimate.value if roofline else None
        case "utilization":
            share, peak = (roofline.utilization.value, roofline.peak.value) if roofline else (None, None)
            return None if share is None or peak is None or share > 1 or peak.estimated else share  # > 1: a wrong peak
        case "joules":
            return roofline.joules_per_token.value if roofline else None


def asked_after(n_rounds: int) -> float:
    """Return how many questions the verdict after so many rounds counts as. It is looked at after each, so all share
    what may be wrong, and the fifth, which tells most, gets most of it (after O'Brien and Fleming, 1979)."""
    return 3.0 if n_rounds == 1 else 3.3 * max(_ROUNDS / n_rounds, n_rounds / _ROUNDS)


def _verdict(rows: dict[Name, ComparisonRow], rounds: Sequence[Round]) -> Verdict:
    speed = rows.get("tok_s")
    complete = [one for one in rounds if one.complete]
    rounds = [one for one in complete if one.ratio is not None]
    if speed is None or not speed.ratio or not rounds:
        return Verdict("short" if complete else "incomplete")
    shortest_ms = min(one.timings.predicted_ms for done in rounds for one in done.answers if one.timings is not None)
    a, b = ([figure("tok_s", one.answers[side]) or 0.0 for one in rounds] for side in (0, 1))
    found = compare(a, b, asked=asked_after(len(rounds)), seconds=max(shortest_ms / 1e3, 0.01))
    size = rows.get("bytes")
    read = size.ratio if size is not None else None
    last = [answer.roofline for answer in rounds[-1].answers]
    busy = [value.median for row in (rows.get("utilization"),) if row for value in (row.a, row.b) if value]

    def verdict(kind: Kind, reached: float = 0.0) -> Verdict:
        return Verdict(kind, speed.ratio or 0.0, read or 0.0, reached, found.interval, len(rounds))

    if any(one.disturbed for one in rounds):
        return verdict("disturbed")
    if found.verdict in ("same", "noisy"):
        return verdict(found.verdict)
    if all(one is not None and one.fits_cache for one in last):
        return verdict("cached")
    if not read or abs(read - 1) <= MATTERS or "acceptance" in rows:
        return verdict("settings")
    slow, fast = found.interval
    reached, least = (speed.ratio * read, slow * read) if read < 1 else (1 / (speed.ratio * read), 1 / (fast * read))
    if reached > 1:  # what is more than the bytes allow must be so at the slow end of the interval too
        reached = max(1.0, least)
    is_busy = all(used >= MEMORY_BUSY for used in busy)
    by_bytes = (read < 1) == (speed.ratio > 1) and reached <= MAX_REACHED and is_busy
    return verdict("bytes" if by_bytes else "other limit", reached)
