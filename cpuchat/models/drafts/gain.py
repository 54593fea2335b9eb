"""Predicts the speed-up from a draft model before it is loaded.

Leviathan et al. (2211.17192): if a drafted token is accepted with probability a, a pass that verifies g of them yields
E = (1 - a^(g+1)) / (1 - a) tokens. They assume that a pass costs as much as one over a single token, which is wrong on
CPUs: here it is divided by the measured T(g + 1) of the target and g tokens of the draft model. Other costs are not
counted: on two Zen 4 cores, measured speed-ups were 1 to 14 % lower.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from cpuchat.timings import SpeculationFigures

if TYPE_CHECKING:
    from cpuchat.telemetry.speculation import Drafting

Kind = Literal["measured", "prose", "code"]

TYPICAL: tuple[tuple[Kind, float], ...] = (("prose", 0.6), ("code", 0.8))
"""Acceptance rate per token with a small model of the same family: open chat 0.6 to 0.75, code 0.8 to 0.95."""
MIN_PLAIN_MS: Final = 2.0
"""Milliseconds per token below which nothing is drafted: looking for drafts, sampling several rows and bookkeeping take
0.1 to 0.3 ms per pass, which such a fast model cannot gain back.
"""
WORTH = 1.1
"""Smallest speed-up that is worth a second model."""
NOT_CALIBRATED = "the target is not calibrated yet; load it in the app with drafting on"
NO_SPEED = "the draft model's time per token is unknown"
_MIN_TESTS = 100
_NEARLY_ALL = 0.9


class Gain(msgspec.Struct, frozen=True):
    """At an `acceptance` rate per token, the best draft `depth` (0: no drafting) and its speed-up."""

    kind: Kind
    acceptance: float
    depth: int
    speedup: float


class Expectation(msgspec.Struct, frozen=True):
    """The expected speed-up of a draft model: for its measured acceptance rate, if known, and for typical texts.

    `gains` is empty when nothing is known, and `why` says what is missing; else `why` is the basis of `draft_ms`,
    milliseconds for a drafted token. `no_gain` is why there is no speed-up, "" when there is one.
    """

    gains: tuple[Gain, ...] = ()
    why: str = NOT_CALIBRATED
    draft_ms: float = 0.0
    no_gain: str = ""

    @property
    def mean(self) -> float:
        """Return the measured speed-up, else the mean over typical texts; 0 when not known."""
        counting = [gain for gain in self.gains if gain.kind == "measured"] or self.gains
        return sum(gain.speedup for gain in counting) / len(counting) if counting else 0.0

    @property
    def pays(self) -> bool:
        """Return whether it is worth loading: a tenth faster for some texts."""
        return any(gain.speedup >= WORTH for gain in self.gains)

    @property
    def words(self) -> str:
        """`≈ 1.1× in prose, ≈ 1.4× in code`; `no gain: ...`, or why nothing is known."""
        if not self.gains:
            return self.why
        if self.no_gain:
            return f"no gain: {self.no_gain}"
        return ", ".join(f"{_times(gain)} {_where(gain)}" for gain in self.gains)


def _times(gain: Gain) -> str:
    return f"≈ {gain.speedup:.1f}×" if gain.depth else "no gain"


def _where(gain: Gain) -> str:
    return (
        f"at its measured acceptance of {100 * gain.acceptance:.0f} %" if gain.kind == "measured" else f"in {gain.kind}"
    )


def gain(
    pass_ms: Sequence[float], draft_ms: float, acceptance: float, kind: Kind = "measured", *, overlap: bool = False
) -> Gain:
    """Return the best depth, 0 included.

    Args:
        pass_ms: milliseconds of a pass of the target over 1, 2, ... tokens; at least one.
        draft_ms: milliseconds for a drafted token.
        acceptance: probability that a drafted token is accepted if those before it were, 0 to 1.
        overlap: the next tokens are drafted while these are verified.
    """
    tokens = reached = 1.0
    best = Gain(kind, acceptance, 0, 1.0)
    if pass_ms[0] < MIN_PLAIN_MS:
        return best
    for depth in range(1, len(pass_ms)):
        reached *= acceptance
        tokens += reached
        drafting = depth * draft_ms
        took = max(pass_ms[depth], drafting) if overlap else pass_ms[depth] + drafting
        speedup = tokens * pass_ms[0] / took
        if speedup > best.speedup:
            best = Gain(kind, acceptance, depth, speedup)
    return best


def expectation(pass_ms: Sequence[float], draft_ms: float, basis: str, measured: float | None = None) -> Expectation:
    """Return the speed-up for typical texts, and for the acceptance rate `measured` with this pair.

    Args:
        pass_ms: as of `gain`; () when the target was never calibrated.
        draft_ms: 0 when not known.
        basis: where `draft_ms` comes from, or why it is not known.
    """
    if not pass_ms:
        return Expectation()
    if draft_ms <= 0:
        return Expectation(why=basis or NO_SPEED)
    kinds: tuple[tuple[Kind, float], ...] = TYPICAL if measured is None else (("measured", measured), *TYPICAL)
    gains = tuple(gain(pass_ms, draft_ms, rate, kind) for kind, rate in kinds)
    return Expectation(gains, basis, draft_ms, "" if any(one.depth for one in gains) else _why_none(pass_ms, draft_ms))


def _why_none(pass_ms: Sequence[float], draft_ms: float) -> str:
    if pass_ms[0] < MIN_PLAIN_MS:
        return f"decoding takes {pass_ms[0]:.2g} ms per token, and handling drafts takes as long"
    best = max(rate for _, rate in TYPICAL)
    if not gain(pass_ms, 0.0, best).depth:
        return "batch verification costs as much as token-by-token decoding"
    return f"a drafted token takes {draft_ms:.1f} ms, too slow against {pass_ms[0]:.1f} ms for a decoded one"


def measured_acceptance(figures: SpeculationFigures | Drafting | None) -> float | None:
    """Return the acceptance rate per token of an answer; None when too little was drafted, or not by a draft model.

    Unlike `draft_n_accepted / draft_n` it counts a draft only up to its first rejected token.
    """
    if figures is None:
        return None
    drafted = sum(one.draft_n for one in figures.by_drafter if one.name == "draft")
    if not drafted or drafted < _NEARLY_ALL * sum(one.draft_n for one in figures.by_drafter):
        return None
    accepted = tests = 0
    reached: int | None = None
    for n_drafted, n_accepted in figures.by_position:
        tests += n_drafted if reached is None else min(reached, n_drafted)
        accepted += n_accepted
        reached = n_accepted
    return accepted / tests if tests >= _MIN_TESTS else None
