"""Why speculation is off, in words."""

from __future__ import annotations

from typing import Final

UNCALIBRATED: Final = "off: not calibrated on this machine yet"
SKIPPED: Final = "off: calibration was skipped"
DISTURBED: Final = "off: calibration disturbed by other programs"


def why_off(
    plain_ms: float,
    draft_ms: float,
    draft_rate: float,
    most_gain: float,
    acceptance: float,
    *,
    has_draft: bool,
    known: bool,
) -> str:
    """One plain sentence.

    `draft_rate`: tokens per ms at the best draft depth; `most_gain`: speed-up over plain decoding if every drafted
    token were right; `known`: the draft model was compared with the text already.
    """
    if most_gain < 1.03:
        if has_draft and draft_ms > 0.25 * plain_ms:
            return f"off: the draft model costs {draft_ms:.3g} ms per token, a plain token {plain_ms:.3g} ms"
        return "off: on these cores checking several tokens at once costs as much as writing them one by one"
    if not has_draft:
        return "off: too little of what repeats in this text goes on the same way"
    if not known:
        return "off: waiting to see how often the draft model is right"
    slower = 1.0 / (draft_rate * plain_ms) - 1.0 if draft_rate > 0 else 0.0
    at = f"off: at {100 * acceptance:.0f} % acceptance"
    if slower >= 0.01:
        return f"{at} plain decoding is {100 * slower:.0f} % faster on these cores"
    return f"{at} drafting gains nothing over plain decoding on these cores"
