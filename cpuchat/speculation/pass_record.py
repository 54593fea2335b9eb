"""The record of one pass of the target model: all that the decode loop hands down after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cpuchat.timings import DrafterName


@dataclass(frozen=True, slots=True)
class PassRecord:
    """One pass over 1 + `drafted` tokens. Times in ms.

    Attributes:
        verify_ms: duration of the pass, without a rollback.
        drafter: whose draft was verified, or who was asked in vain; None for a plain step.
        buckets: confidence bucket of each drafted token.
        accepted: how many drafted tokens, from the first on, the target's sampler chose too.
        compared: drafted tokens looked at; fewer than `drafted` when the answer ended inside the draft.
        draft_ms: how long the target waited for the draft model before this pass.
        unread: tokens of the text that the draft model had to read before it drafted.
        overlap: both models computed at the same time.
        rollback_ms: duration of the rollback after it.
        again: passes of that rollback, in which accepted tokens were evaluated again.
    """

    verify_ms: float
    drafter: DrafterName | None = None
    buckets: Sequence[int] = ()
    accepted: int = 0
    compared: int = 0
    draft_ms: float = 0.0
    unread: int = 0
    overlap: bool = False
    rollback_ms: float = 0.0
    again: int = 0

    @property
    def drafted(self) -> int:
        """Drafted tokens in the pass."""
        return len(self.buckets)
