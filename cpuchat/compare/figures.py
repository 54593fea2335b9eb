"""Computes the figures of both sides over the rounds, and the verdict."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from cpuchat.compare.runner import Round, SideAnswer

MIN_ROUNDS = 3
"""Rounds from which on medians and the spread are shown."""
NOISE, MAX_NOISE = 0.03, 1.5
"""Share by which two identical answers of a second differ on an idle machine. What interrupts has a length of its own,
so shorter answers differ more: those of the demo, 0.03 s, by a factor of 2."""
SAME_BYTES = 0.02
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

    @property
    def spread(self) -> float:
        return self.high - self.low


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """One figure of both sides; None is "not known". Rates per second, `memory` and `bytes` (per token) in bytes,
    shares 0 to 1."""

    name: Name
    a: Value | None
    b: Value | None

    @property
    def ratio(self) -> float | None:
        """B ÷ A."""
        return self.b.median / self.a.median if self.a and self.b and self.a.median else None


Kind = Literal[
    "incomplete",  # a side has no speed, or was stopped
    "disturbed",  # other programs were using the cores
    "cached",  # the weights of both stay in L3: bytes do not decide
    "noise",  # the difference is within the spread
    "settings",  # both read the same bytes
    "bytes",  # fewer bytes, faster: how much of what they allow
    "other limit",  # fewer bytes, but not faster, or faster although memory is not the limit
    "unknown",  # the bytes are not known
]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Comparison. `speed` and `bytes` are B ÷ A, `reached` is the share of what the bytes allow to the side that reads
    fewer; `noise` is the spread of the rounds as a share of the speed, or what is assumed for single rounds;
    `utilization` of the memory by the side that uses it less, None: not known."""

    kind: Kind
    speed: float = 0.0
    bytes: float = 0.0
    reached: float = 0.0
    noise: float = NOISE
    n_rounds: int = 1
    compute_bound: bool = False
    utilization: float | None = None


@dataclass(frozen=True)
class ComparisonFigures:
    """The table of a turn. `rounds` of them are complete; without one, the figures are those of the last round."""

    rows: dict[Name, ComparisonRow] = field(default_factory=dict)
    verdict: Verdict = Verdict("incomplete")
    n_rounds: int = 0
    ratios: tuple[float, float] | None = None
    """The smallest and the largest B ÷ A of the rates in a round; None before there are medians."""

    @property
    def medians(self) -> bool:
        return self.n_rounds >= MIN_ROUNDS


def figures_of(rounds: Sequence[Round]) -> ComparisonFigures:
    """Return the figures of the rounds of one turn that count (`Turn.counted`). Fewer than `MIN_ROUNDS`: those of the
    last round."""
    if not rounds:
        return ComparisonFigures()
    complete = [one for one in rounds if one.complete]
    counted = complete if len(complete) >= MIN_ROUNDS else (complete or list(rounds))[-1:]
    rows: dict[Name, ComparisonRow] = {
        name: ComparisonRow(name, *(_value(name, counted, side) for side in (0, 1))) for name in NAMES
    }
    rows = {name: row for name, row in rows.items() if row.a is not None or row.b is not None}
    ratios = [one.ratio for one in counted if one.ratio is not None]
    spread = (min(ratios), max(ratios)) if len(ratios) >= MIN_ROUNDS else None
    return ComparisonFigures(rows, _verdict(rows, counted), len(complete), spread)


def _value(name: Name, rounds: Sequence[Round], side: int) -> Value | None:
    found = [value for one in rounds if (value := figure(name, one.answers[side])) is not None]
    return Value.of(found) if found else None


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
            share = roofline.utilization.value if roofline else None
            return None if share is None or share > 1 else share  # a value above the peak means the peak was wrong
        case "joules":
            return roofline.joules_per_token.value if roofline else None


def _noise_of_one(measured: Round) -> float:
    """Return the spread that is assumed for a single round."""
    seconds = min((one.timings.predicted_ms / 1e3 for one in measured.answers if one.timings), default=1.0)
    return min(max(NOISE, NOISE / max(seconds, 1e-3)), MAX_NOISE)


def _verdict(rows: dict[Name, ComparisonRow], rounds: Sequence[Round]) -> Verdict:
    speed = rows.get("tok_s")
    if speed is None or speed.a is None or speed.b is None or not speed.ratio or not rounds[-1].complete:
        return Verdict("incomplete")
    ratio, n = speed.ratio, min(speed.a.n, speed.b.n)
    noise = max(one.spread / one.median for one in (speed.a, speed.b)) if n >= MIN_ROUNDS else _noise_of_one(rounds[-1])
    size = rows.get("bytes")
    read = size.ratio if size is not None else None
    last = [answer.roofline for answer in rounds[-1].answers]
    by_compute = any(one is not None and one.limit == "compute" for one in last)
    busy = [value.median for row in (rows.get("utilization"),) if row for value in (row.a, row.b) if value]
    min_busy = min(busy, default=None)

    def verdict(kind: Kind, reached: float = 0.0) -> Verdict:
        return Verdict(kind, ratio, read or 0.0, reached, noise, n, by_compute, min_busy)

    if any(one.disturbed for one in rounds):
        return verdict("disturbed")
    if abs(ratio - 1) <= noise:
        return verdict("noise")
    if all(one is not None and one.fits_cache for one in last):
        return verdict("cached")
    if not read:  # of one that was kept and is shown again, it was known
        kept = any(answer.model is None for answer in rounds[-1].answers)
        return verdict("settings" if kept else "unknown")
    if abs(read - 1) <= SAME_BYTES or "acceptance" in rows:
        return verdict("settings")
    reached = ratio * read if read < 1 else 1 / (ratio * read)
    by_bytes = (read < 1) == (ratio > 1) and reached <= MAX_REACHED and (min_busy is None or min_busy >= MEMORY_BUSY)
    return verdict("bytes" if by_bytes else "other limit", reached)
