"""Why speculation is off: one plain sentence each."""

from __future__ import annotations

from typing import Final

UNCALIBRATED: Final = "off: not calibrated on this machine yet"
SKIPPED: Final = "off: calibration skipped"
DISTURBED: Final = "off: calibration disturbed by other programs"
NO_REPEATS: Final = "off: nothing to draft from yet"

WORTHWHILE_GAIN: Final = 1.03
"""Smallest speed-up that is worth drafting, even if every drafted token were accepted."""


_TOO_FAST: Final = "off: decoding takes "


def is_verdict(reason: str) -> bool:
    """Return whether drafting is off by what was measured of these models here, which is news at a glance.

    Not while that is unknown, and not where a model is so fast that nobody misses drafts.
    """
    return reason not in ("", UNCALIBRATED, DISTURBED, NO_REPEATS) and not reason.startswith(_TOO_FAST)


def too_fast(plain_ms: float) -> str:
    """Return the reason for a model that decodes as fast as drafts can be handled."""
    return f"{_TOO_FAST}{plain_ms:.2g} ms per token, and handling drafts takes as long"


def slow_prefill(seconds: float) -> str:
    """Return the reason while the draft model has too much of the text to read first."""
    return f"off: prefilling the draft model would take {seconds:.1f} s"


def disabled_reason(
    plain_ms: float,
    draft_ms: float,
    draft_rate: float,
    max_gain: float,
    acceptance: float,
    *,
    has_draft: bool,
    is_scored: bool,
) -> str:
    """Return one plain sentence.

    Args:
        draft_rate: tokens per ms at the best draft depth.
        max_gain: speed-up over plain decoding if every drafted token were accepted.
        is_scored: the draft model has been compared with the text already.
    """
    if max_gain < WORTHWHILE_GAIN:
        if has_draft and draft_ms > 0.25 * plain_ms:
            return f"off: the draft model takes {draft_ms:.3g} ms per token, plain decoding {plain_ms:.3g} ms"
        return "off: batch verification costs as much as token-by-token decoding on these cores"
    if not has_draft:
        return "off: repeated n-grams rarely continue the same way in this text"
    if not is_scored:
        return "off: the draft model's acceptance rate is not known yet"
    slower = 1.0 / (draft_rate * plain_ms) - 1.0 if draft_rate > 0 else 0.0
    at = f"off: at {100 * acceptance:.0f} % acceptance"
    if slower >= 0.01:
        return f"{at} plain decoding is {100 * slower:.0f} % faster on these cores"
    return f"{at} drafting gains nothing over plain decoding on these cores"
