"""Why speculation is off, as a value: `present/drafts_off.py` has the words."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

OffKind = Literal[
    "uncalibrated",
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


class DraftsOff(msgspec.Struct, frozen=True):
    """Why speculation is off.

    `plain_ms` and `draft_ms` per token, of "too fast" and "slow draft model". `prefill_s`: seconds until the draft
    model has read the text. `acceptance` (0-1), with which plain decoding is `slower_share` (0.1: 10 %) faster than the
    best draft (None: not known, as other programs disturbed the calibration). `note`: what keeps a "model" (or its
    server) from drafting, as a clause."""

    kind: OffKind
    plain_ms: float = 0.0
    draft_ms: float = 0.0
    prefill_s: float = 0.0
    acceptance: float = 0.0
    slower_share: float | None = 0.0
    note: str = ""

    @property
    def is_verdict(self) -> bool:
        """Return whether drafting is off by what was measured of these models here, which is news at a glance.

        Not while that is unknown, and not where a model is so fast that nobody misses drafts."""
        return self.kind not in ("uncalibrated", "nothing to draft from", "too fast")


UNCALIBRATED: Final = DraftsOff("uncalibrated")
