"""The record of one pass of the target, which the decode loop hands down after it, and the counts of one answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cpuchat.protocol.drafters import DrafterName
from cpuchat.protocol.timings import DrafterCount, SpeculationFigures
from cpuchat.speculation.drafters.drafter import MAX_DEPTH


@dataclass(frozen=True, slots=True)
class PassRecord:
    """One pass over 1 + `drafted` tokens. Times in ms. `verify_ms`: of the pass, without a rollback. `drafter`: whose
    draft was verified, or who proposed nothing; None for a plain step. `buckets`: confidence bucket of each drafted
    token; the target's sampler chose the first `accepted` too, of those `compared`: fewer than `drafted` when the
    answer ended inside the draft. `draft_ms`: how long the target waited for the draft model, which had to read
    `unread` tokens of the text first. `rollback_ms`: of the rollback after the pass, with `again` further passes over
    accepted tokens."""

    verify_ms: float
    drafter: DrafterName | None = None
    buckets: Sequence[int] = ()
    accepted: int = 0
    compared: int = 0
    draft_ms: float = 0.0
    unread: int = 0
    rollback_ms: float = 0.0
    again: int = 0

    @property
    def drafted(self) -> int:
        return len(self.buckets)


class SpeculationStats:
    """Counts of one answer. Drafted tokens count as llama-server counts them: all that were in a verify pass, including
    those after the first rejected one."""

    def __init__(self) -> None:
        self._passes = 0
        self._drafter = ""
        self._drafted = [0] * MAX_DEPTH
        self._accepted = [0] * MAX_DEPTH
        self._by_drafter: dict[DrafterName, list[int]] = {}

    def record(self, record: PassRecord) -> None:
        """Count a pass, with those of the rollback after it; one without a draft is a plain step."""
        self._passes += 1 + record.again
        n, accepted = record.drafted, record.accepted
        if record.drafter is None or not n:
            return
        self._drafter = record.drafter
        for i in range(n):
            self._drafted[i] += 1
        for i in range(accepted):
            self._accepted[i] += 1
        counts = self._by_drafter.setdefault(record.drafter, [0, 0])
        counts[0] += n
        counts[1] += accepted

    def counts(self) -> SpeculationFigures:
        """Return what is counted here: all but what drafting and the controller know."""
        deepest = max((i + 1 for i, n in enumerate(self._drafted) if n), default=0)
        return SpeculationFigures(
            passes=self._passes,
            draft_n=sum(self._drafted),
            draft_n_accepted=sum(self._accepted),
            by_position=tuple(zip(self._drafted[:deepest], self._accepted[:deepest], strict=True)),
            by_drafter=tuple(
                DrafterCount(name=name, draft_n=n, draft_n_accepted=accepted)
                for name, (n, accepted) in self._by_drafter.items()
            ),
            drafter=self._drafter,
        )
