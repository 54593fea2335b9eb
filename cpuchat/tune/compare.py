"""Decides whether a change made decoding faster, or whether that was noise."""

from __future__ import annotations

import msgspec

from cpuchat.telemetry import units
from cpuchat.tune.measure import DecodeRate

LEAST_GAIN = 0.02


class RateChange(msgspec.Struct, frozen=True, kw_only=True):
    """`gain` as a share of the rate before (0.05: 5 % faster); `needed` is the gain that would have been believed.

    `keep` only above `needed`; `words` say it in one sentence.
    """

    keep: bool
    gain: float
    needed: float
    words: str


def compare(before: DecodeRate, after: DecodeRate) -> RateChange:
    """Keep a change only if it gains more than 2 % and more than twice the spread of the rounds.

    The larger spread of the two measurements counts.
    """
    gained = after.tok_s - before.tok_s
    enough = max(LEAST_GAIN * before.tok_s, 2 * max(before.spread, after.spread))
    gain, needed = gained / before.tok_s, enough / before.tok_s
    keep = gained > enough
    rates = f"{units.rate(before.tok_s)} → {units.rate(after.tok_s)} tok/s"
    if keep:
        words = f"Keep it: {rates}, {percent(gain)}, significant (threshold {100 * needed:.1f} %)."
    elif gained < -enough:
        words = f"Revert it: {rates}, {percent(gain)}, significantly slower."
    else:
        words = f"Revert it: {rates}, {percent(gain)}, not significant (threshold {100 * needed:.1f} %)."
    return RateChange(keep=keep, gain=gain, needed=needed, words=words)


def percent(share: float) -> str:
    """Format as `+3.2 %`, `−1.0 %`; what rounds to zero has no sign."""
    text = f"{100 * abs(share):.1f} %"
    return text if text == "0.0 %" else ("+" if share > 0 else "−") + text
