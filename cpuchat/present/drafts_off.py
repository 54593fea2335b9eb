"""Why speculation is off, in words."""

from __future__ import annotations

from typing import Final

from cpuchat.protocol.reasons import DraftsOff, OffKind

_WORDS: Final[dict[OffKind, str]] = {
    "uncalibrated": "not calibrated yet (done while the chat is idle)",
    "nothing to draft from": "nothing to draft from yet",
    "too fast": "a pass takes {off.plain_ms:.2g} ms, and handling drafts takes as long",
    "slow prefill": "prefilling the draft model would take {off.prefill_s:.1f} s",
    "slow draft model": "the draft model takes {off.draft_ms:.3g} ms per token, plain decoding {off.plain_ms:.3g} ms",
    "slow verification": "batch verification costs as much as token-by-token decoding on these cores",
    "rare repeats": "repeated n-grams rarely continue the same way in this text",
    "acceptance unknown": "the draft model's acceptance rate is not known yet",
    "model": "{off.note}",
}


def off_words(off: DraftsOff | None) -> str:
    """Return the reason as a clause, to follow "drafts off: "; "" for None."""
    if off is None:
        return ""
    if off.kind != "low acceptance":
        return _WORDS[off.kind].format(off=off)
    at = f"at {100 * off.acceptance:.0f} % acceptance"
    if off.slower_share is None:
        return f"{at} plain decoding is faster on these cores"
    if off.slower_share >= 0.01:
        return f"{at} plain decoding is {100 * off.slower_share:.0f} % faster on these cores"
    return f"{at} drafting gains nothing over plain decoding on these cores"
