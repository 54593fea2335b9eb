"""Answers in simulated time: known pass costs, known acceptance, the real controller. Nothing is measured.

Tests and `benchmarks/simulate.py` share it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from cpuchat.costs.calibrations import PassCosts, interpolate
from cpuchat.speculation.depth.controller import DepthController
from cpuchat.speculation.drafters.drafter import MAX_DEPTH, Proposal
from cpuchat.speculation.stats import PassRecord

# ms of a pass over n tokens, relative to one (1.5B shape, 2 cores; measured).
_SHAPES: dict[str, tuple[float, dict[int, float]]] = {
    "Q4_K_M": (35.0, {1: 1, 2: 1.60, 3: 2.16, 4: 2.61, 5: 3.25, 6: 3.77, 8: 6.59, 12: 7.34, 16: 7.41}),
    "Q8_0": (62.0, {1: 1, 2: 1.52, 3: 1.74, 4: 1.86, 5: 2.91, 6: 3.15, 8: 2.79, 12: 3.79, 16: 4.76}),
    "F16": (98.0, {1: 1, 2: 1.32, 3: 1.40, 4: 1.41, 5: 1.55, 6: 1.58, 8: 2.23, 12: 2.60, 16: 3.31}),
}
_MEASURED = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32)
TARGETS = tuple(_SHAPES)
DRAFTS = {"0.05B": (1.5, 0.4), "0.5B": (20.0, 4.0)}
"""ms per drafted token, ms per token read in a batch."""


def true_costs(target: str, draft: str | None) -> PassCosts:
    """Return the costs of one of `TARGETS` with one of `DRAFTS`."""
    draft_ms, read_ms = DRAFTS[draft] if draft else (0.0, 0.0)
    t1, shape = _SHAPES[target]
    return PassCosts(interpolate({n: t1 * ratio for n, ratio in shape.items()}), draft_ms, read_ms)


def miscalibrated(costs: PassCosts, rng: random.Random, common: float, own: float) -> PassCosts:
    """Return what a calibration with these relative errors would have measured: `common` to all, `own` of each point
    (uniform, at most that much)."""
    together = 1 + rng.uniform(-common, common)
    verify = {n: costs.verify_ms[n - 1] * together * (1 + rng.uniform(-own, own)) for n in _MEASURED}
    return replace(costs, verify_ms=interpolate(verify), draft_ms=costs.draft_ms * (1 + rng.uniform(-common, common)))


def verified(
    proposal: Proposal,
    accepted: int,
    ms: float,
    *,
    compared: int | None = None,
    draft_ms: float = 0.0,
    unread: int = 0,
) -> PassRecord:
    """Return a pass over a draft, all of it compared unless `compared` is less."""
    n = len(proposal) if compared is None else compared
    return PassRecord(ms, proposal.drafter, tuple(proposal.buckets), accepted, n, draft_ms, unread)


def text(rng: random.Random, rate: float, n: int) -> list[bool]:
    """Return whether the draft model is right at each position, independently."""
    return [rng.random() < rate for _ in range(n)]


@dataclass
class Noise:
    """Pass times scatter by `spread`; a share of them, `pauses`, takes three times as long."""

    rng: random.Random = field(default_factory=lambda: random.Random(1))
    spread: float = 0.0
    pauses: float = 0.0

    def __call__(self, ms: float) -> float:
        if self.spread == 0 and self.pauses == 0:
            return ms
        ms *= max(0.5, self.rng.gauss(1.0, self.spread))
        return ms * 3 if self.rng.random() < self.pauses else ms


@dataclass
class Answer:
    """What one answer took, in true (noiseless) ms, and how it was written."""

    ms: float = 0.0
    read_ms: float = 0.0
    passes: int = 0
    plans: list[tuple[int, int]] = field(default_factory=list)
    free: list[tuple[int, int, int]] = field(default_factory=list)


def _run(right: Sequence[bool], start: int, most: int) -> int:
    n = 0
    while n < most and right[start + n]:
        n += 1
    return n


def fixed_answer(costs: PassCosts, right: Sequence[bool], depth: int) -> float:
    """Return the ms for this text at a fixed depth."""
    ms, at = 0.0, 0
    while at < len(right):
        g = min(depth, len(right) - at - 1)
        ms += costs.verify_ms[g] + g * costs.draft_ms
        at += 1 + _run(right, at, g)
    return ms


def best_fixed(costs: PassCosts, texts: Sequence[Sequence[bool]]) -> tuple[float, int]:
    """Return the ms over all texts at the best fixed depth, and that depth (0 included)."""
    return min((sum(fixed_answer(costs, right, depth) for right in texts), depth) for depth in range(MAX_DEPTH + 1))


def adaptive_answer(
    controller: DepthController,
    costs: PassCosts | Callable[[int], PassCosts],
    right: Sequence[bool],
    noise: Noise | None = None,
    *,
    propose: Callable[[int], tuple[Proposal, list[bool]]] | None = None,
    prompt: int = 24,
    after_read: float = 0.0,
) -> Answer:
    """Simulate one answer with adaptive depth. `costs` may depend on the position in the text. `propose(at)`: a free
    drafter's proposal there and which of its tokens are right. `after_read`: by what share the plain step after the
    draft model was evaluated in the background is slower."""
    noise = noise or Noise()
    cost_at = costs if callable(costs) else lambda _at: costs
    answer = Answer()
    controller.begin_answer()
    at, lag, disturbed = 0, prompt, 0.0
    while at < len(right):
        now = cost_at(at)
        room = len(right) - at - 1
        start = at
        offer, hits = propose(at) if propose else (Proposal("suffix"), [])
        offer, hits = offer.cut(room), hits[:room]
        free = controller.free_depth(offer) if offer else 0
        depth = 0 if free else controller.plan_draft(room, lag)
        assert 0 <= free <= len(offer) and 0 <= depth <= room
        answer.passes += 1
        if free:
            accepted = _run(hits, 0, free)
            ms = now.verify_ms[free]
            answer.ms += ms
            controller.record(verified(offer.cut(free), accepted, noise(ms)))
            answer.free.append((at, free, accepted))
            at += accepted + 1
            lag += accepted + 1
        elif depth:
            accepted = _run(right, at, depth)
            draft_ms = depth * now.draft_ms + max(0, lag - 2) * now.read_ms
            ms = now.verify_ms[depth]
            answer.ms += ms + draft_ms
            draft = Proposal("draft", [0] * depth, [0] * depth)
            controller.record(verified(draft, accepted, noise(ms), draft_ms=noise(draft_ms), unread=lag))
            at += accepted + 1
            lag = 2 if accepted == depth else 1
        else:
            ms = now.verify_ms[0] * (1.0 + disturbed)
            answer.ms += ms
            controller.record(PassRecord(noise(ms)))
            at += 1
            lag += 1
        if offer and not free:
            score = min(_run(hits, 0, len(hits)) + 1, at - start, len(hits))
            controller.record_scores(offer.drafter, offer.buckets[:score], hits[:score])
        answer.plans.append((start, depth))
        disturbed = 0.0
        k = controller.shadow_budget(lag)
        assert 0 <= k <= lag
        if k:
            ms = k * now.read_ms
            answer.ms += ms
            answer.read_ms += ms
            seen = min(k, at)
            controller.record_read(k, noise(ms), is_shadow=True)
            controller.record_scores("draft", [0] * seen, right[at - seen : at])
            disturbed = after_read
            lag = 0  # all of it, or started afresh from the middle
    return answer
