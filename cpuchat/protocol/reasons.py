"""Why speculation is off, as a value: `present/drafts_off.py` has the words."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

OffKind = Literal[
    "uncalibrated",
    "calibration skipped",
    "calibration disturbed",
    "nothing to draft from",
    "too fast",
    "slow prefill",
    "slow draft model",
    "slow verification",
    "rare repeats",
    "acceptance unknown",
    "low acceptance",
    "model",
]

MATTERS: Final = 0.02
"""Share that a difference of speeds must exceed to be worth anything, the only threshold of it: of a measured one as
`measure.difference` tests it, of a predicted one with the prediction's error on top. Nobody notices less, two builds of
the same source differ by as much in where their code lies, and fewer rounds than anyone waits for do not show it."""
_PASS_ERROR: Final = 0.01
"""Of a calibrated pass, the best of several."""
WORTHWHILE_GAIN: Final = (1 + MATTERS) * (1 + _PASS_ERROR)
"""Smallest speed-up that is worth drafting, even if every drafted token were accepted."""

_MAX_DRAFT_SHARE: Final = 0.25
"""Share of a plain pass that a drafted token may take before it is the draft model that is too slow."""


class DraftsOff(msgspec.Struct, frozen=True):
    """Why speculation is off.

    `plain_ms` and `draft_ms` per token, of "too fast" and "slow draft model". `prefill_s`: seconds until the draft
    model has read the text. `acceptance` (0-1), with which plain decoding is `slower_share` (0.1: 10 %) faster than the
    best draft. `note`: what keeps a "model" (or its server) from drafting, as a clause.
    """

    kind: OffKind
    plain_ms: float = 0.0
    draft_ms: float = 0.0
    prefill_s: float = 0.0
    acceptance: float = 0.0
    slower_share: float = 0.0
    note: str = ""

    @property
    def is_verdict(self) -> bool:
        """Return whether drafting is off by what was measured of these models here, which is news at a glance.

        Not while that is unknown, and not where a model is so fast that nobody misses drafts.
        """
        return self.kind not in ("uncalibrated", "calibration disturbed", "nothing to draft from", "too fast")


UNCALIBRATED: Final = DraftsOff("uncalibrated")


def no_gain(
    plain_ms: float,
    draft_ms: float,
    draft_rate: float,
    max_gain: float,
    acceptance: float,
    *,
    has_draft: bool,
    is_scored: bool,
) -> DraftsOff:
    """Return why drafting does not pay.

    Args:
        draft_rate: tokens per ms at the best draft depth.
        max_gain: speed-up over plain decoding if every drafted token were accepted.
        is_scored: the draft model has been compared with the text already.
    """
    if max_gain < WORTHWHILE_GAIN:
        if has_draft and draft_ms > _MAX_DRAFT_SHARE * plain_ms:
            return DraftsOff("slow draft model", plain_ms=plain_ms, draft_ms=draft_ms)
        return DraftsOff("slow verification")
    if not has_draft:
        return DraftsOff("rare repeats")
    if not is_scored:
        return DraftsOff("acceptance unknown")
    slower = 1.0 / (draft_rate * plain_ms) - 1.0 if draft_rate > 0 else 0.0
    return DraftsOff("low acceptance", acceptance=acceptance, slower_share=slower)
