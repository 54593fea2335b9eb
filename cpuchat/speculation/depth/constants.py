"""The constants of the depth controller.

Each value is the best of those tried in benchmarks/simulate.py; benchmarks/README.md has the ablations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from cpuchat.protocol.reasons import MATTERS


@dataclass(frozen=True, slots=True)
class ControllerConstants:
    """Units: "tokens" are compared ones (drafted and judged by the target), "plain steps" passes without a draft."""

    # Acceptance
    draft_priors: tuple[float, ...] = (0.55, 0.25, 0.4, 0.55, 0.7, 0.82, 0.92, 0.97)
    """Expected acceptance (0-1) of a draft model by confidence bucket, before anything is observed."""
    free_priors: tuple[float, ...] = (0.35, 0.12, 0.3, 0.45, 0.6, 0.75, 0.88, 0.95)
    """The same of suffix decoding."""
    draft_prior_tokens: float = 2.0
    """Tokens that a prior of the draft model is worth."""
    free_prior_tokens: float = 4.0
    """Tokens that a prior of suffix decoding is worth."""
    draft_window_tokens: float = 240.0
    """Tokens after which an observation of the draft model is mostly forgotten."""
    free_window_tokens: float = 64.0
    """Tokens after which an observation of suffix decoding is mostly forgotten."""
    lasting_weight: float = 1 - 1 / 1000
    """Weight (0-1) of a token in the count over all texts when the next one is added."""
    max_tokens_kept: float = 60.0
    """Tokens of earlier answers that still count in the next."""
    max_tokens_after_loss: float = 20.0
    """Tokens that still count when the draft model has lost what it had gained, or was shadow drafting."""
    free_max_tokens_after_loss: float = 10.0
    """The same of suffix decoding (benchmarks/replay.py, JSON, Q4_K_M: 0.86 without, 0.94 with 20, 0.99 with 10)."""
    max_gain_before_loss: float = 2.0
    """Gain of the draft model, in plain steps, that later losses are counted against at most."""
    free_max_gain_before_loss: float = 1.0
    """The same of suffix decoding."""
    min_tokens_known: int = 3
    """Tokens from which the draft model's acceptance counts as known."""

    # Budget
    budget_share: float = 0.007
    """Share (0-1) of elapsed time that accrues."""
    budget_start: float = 0.6
    """Plain steps that a new pair has at first."""
    budget_loan: float = 0.8
    """Plain steps that a new pair may owe for shadow drafting until its acceptance is known."""
    max_budget: float = 6.0
    """Plain steps that are saved up at most."""
    min_budget: float = -0.2
    """Plain steps below which bad luck does not push the budget."""
    expected_share: float = 0.5
    """Share (0-1) of what is booked of a draft that is expected at the acceptance known by then; the rest is what it
    accepted. (Accepted alone is mostly chance, expected alone does not see that it is too hopeful.)"""

    # Choice of the depth
    worthwhile_gain: float = (1 + MATTERS) * 1.01
    """Smallest speed-up that is worth drafting, even if every drafted token were accepted: what matters, on top of the
    error of a calibrated pass, the best of several."""
    max_draft_share: float = 0.25
    """Share (0-1) of a plain pass that a drafted token may take before it is the draft model that is too slow."""
    free_min_gain: float = 0.02
    """Tokens that verifying a proposal of suffix decoding must gain."""
    recent_weight: float = 0.85
    """Weight (0-1) of the passes so far in the recent rate when the next one is added."""
    recent_rate_share: float = 0.9
    """Share (0-1) of the recent rate that a proposal of suffix decoding must reach soon after a draft."""
    recent_rate_passes: int = 4
    """Passes since a draft within which the recent rate is asked for."""
    recent_passes: int = 16
    """Passes since a draft within which its depth is shown."""
    catch_up_tokens: int = 128
    """Tokens within which reading what is unread must pay (or as many again as were written)."""
    near_share: float = 0.25
    """Share (0-1) of a plain step below which reading what is unread always pays."""

    # Shadow drafting
    shadow_tokens: int = 12
    """Tokens that the draft model reads at a time only to be scored."""
    first_shadow_tokens: int = 6
    """The same until its acceptance is known."""

    # Costs
    follow_share: float = 0.2
    """Share (0-1) by which a time follows what is observed."""
    quick_follow_share: float = 0.8
    """The same at first (calibration was done under other conditions) and after a change; in between it falls as an
    average of all would."""
    pause: float = 0.25
    """Logarithm of the ratio to the expected time from which a pass may be a pause of the machine; nothing makes a
    pass faster by accident."""
    confirming_passes: int = 3
    """Passes in a row that seem paused and mean that conditions have changed."""
    timing_steps: int = 5
    """Plain steps after which a calibrated time of twice or three times theirs is corrected to within 2 %."""


CONSTANTS: Final = ControllerConstants()
