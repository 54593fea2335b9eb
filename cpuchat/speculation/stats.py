"""What speculation did in one answer."""

from __future__ import annotations

from collections import deque
from typing import Final

from cpuchat.speculation.drafters.drafter import MAX_DEPTH
from cpuchat.timings import DrafterCount, DrafterName, SpeculationFigures

_RECENT_PASSES: Final = 32


class SpeculationStats:
    """Counts of one answer; `figures` is their state.

    Drafted tokens count as llama-server counts them: all that were in a verify pass, also those after the first
    wrong one.
    """

    def __init__(self) -> None:
        self.passes = 0
        self.draft_n = 0
        self.accepted_n = 0
        self.drafter = ""
        self.draft_ms = 0.0
        self._drafted = [0] * MAX_DEPTH
        self._accepted = [0] * MAX_DEPTH
        self._by_drafter: dict[DrafterName, list[int]] = {}
        self._recent: deque[tuple[int, int]] = deque(maxlen=_RECENT_PASSES)

    def plain(self) -> None:
        """One token was decoded without a draft."""
        self.passes += 1

    def verified(self, drafter: DrafterName, n: int, accepted: int) -> None:
        """A pass verified `n` drafted tokens, the first `accepted` of them were right."""
        self.passes += 1
        self.draft_n += n
        self.accepted_n += accepted
        self.drafter = drafter
        for i in range(n):
            self._drafted[i] += 1
        for i in range(accepted):
            self._accepted[i] += 1
        counts = self._by_drafter.setdefault(drafter, [0, 0])
        counts[0] += n
        counts[1] += accepted
        self._recent.append((n, accepted))

    def figures(
        self,
        *,
        depth: int = 0,
        overlap: bool = False,
        draft_passes: int = 0,
        plain_ms: float | None = None,
        reason: str = "",
    ) -> SpeculationFigures:
        """The counts, with what the controller knows."""
        deepest = max((i + 1 for i, n in enumerate(self._drafted) if n), default=0)
        return SpeculationFigures(
            passes=self.passes,
            draft_n=self.draft_n,
            draft_n_accepted=self.accepted_n,
            recent_draft_n=sum(n for n, _ in self._recent),
            recent_draft_n_accepted=sum(n for _, n in self._recent),
            by_position=tuple(zip(self._drafted[:deepest], self._accepted[:deepest], strict=True)),
            by_drafter=tuple(
                DrafterCount(name=name, draft_n=n, draft_n_accepted=accepted)
                for name, (n, accepted) in self._by_drafter.items()
            ),
            drafter=self.drafter,
            depth=depth,
            overlap=overlap,
            draft_passes=draft_passes,
            draft_ms=self.draft_ms,
            plain_ms=plain_ms,
            reason=reason,
        )
