"""Answers in simulated time: known pass costs, known acceptance, the real controller. Nothing is measured.

Tests and `benchmarks/simulate.py` share it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from msgspec.structs import replace

from cpuchat.costs.calibrations import PassCosts, interpolate
from cpuchat.speculation.depth.acceptance import DraftPlan
from cpuchat.speculation.depth.controller import DepthController
from cpuchat.speculation.drafters.cascade import Cascade
from cpuchat.speculation.drafters.drafter import MAX_DEPTH, Proposal
from cpuchat.speculation.drafters.ngrams import NgramIndex
from cpuchat.speculation.drafters.suffix import SuffixDecoding
from cpuchat.speculation.stats import PassRecord

_BENCHMARKS = Path(__file__).parents[3] / "benchmarks"

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


AMX = "AMX"
"""Not recorded: a matrix unit that takes 16 rows at a time, so that a pass costs little more up to 16 tokens."""
_AMX = (20.0, {1: 1, 2: 1.04, 4: 1.08, 8: 1.15, 16: 1.30, 17: 1.9, 24: 2.05, 32: 2.2})


def true_costs(target: str, draft: str | None) -> PassCosts:
    """Costs of `TARGETS`, `AMX`, or "recorded Q8_0" and the like: the curve of benchmarks/results/speculation.json."""
    draft_ms, read_ms = DRAFTS[draft] if draft else (0.0, 0.0)
    if target.startswith("recorded "):
        return PassCosts(_recorded()[target.removeprefix("recorded ")], draft_ms, read_ms)
    t1, shape = _AMX if target == AMX else _SHAPES[target]
    return PassCosts(interpolate({n: t1 * ratio for n, ratio in shape.items()}), draft_ms, read_ms)


_SIZES = {
    "8B": (8.03, {"Q4_K_M": 4.92, "Q8_0": 8.54, "F16": 16.1}),
    "70B": (70.6, {"Q4_K_M": 42.5, "Q8_0": 75.0, "F16": 141.1}),
}
_READ_GB_S = 0.65 * 537.6
_PREFILL_GOPS = {"Q4_K_M": 7200.0, "Q8_0": 6500.0, "F16": 5800.0}
_DRAFT_GB, _DRAFT_PARAMS, _SYNC_MS = 0.81, 1.24, 1.0


def server_costs(target: str) -> PassCosts:
    """Costs of "8B Q4_K_M", "70B F16" and the like with a 1B Q4_K_M draft on one EPYC of 96 cores: not measured.

    Decoding reads all weights at 65 % of 12 channels DDR5-5600 (measured there: 55 to 75 %). Prefill is estimated: 96
    cores at 3.5 GHz and 70 % scaling with llama.cpp's 30 int8 operations per cycle; Q8_0 and F16 as much slower as on
    the 2 cores measured here. A pass takes T(n) = T(1) (1 + (n / n*)^6)^(1/6) with n* = prefill / decode rate, which
    fits measured passes of a 70B model on a Xeon within 5 %.
    """
    size, quantization = target.split()
    params, gigabytes = _SIZES[size]
    t1 = 1e3 * gigabytes[quantization] / _READ_GB_S
    per_token = 2e3 * params / _PREFILL_GOPS[quantization]
    times = tuple(t1 * (1 + (n * per_token / t1) ** 6) ** (1 / 6) for n in range(1, 33))
    draft_ms = 1e3 * _DRAFT_GB / _READ_GB_S + _SYNC_MS
    return PassCosts(times, draft_ms, 2e3 * _DRAFT_PARAMS / _PREFILL_GOPS["Q4_K_M"])


@cache
def _recorded() -> dict[str, tuple[float, ...]]:
    results = json.loads((_BENCHMARKS / "results" / "speculation.json").read_text())
    return {one["quantization"]: tuple(one["pass_ms"]) for one in results["sections"]["adaptive"]["data"]["pairs"]}


@cache
def draft_traces() -> dict[str, list[list[bool]]]:
    """Recorded answers by name: whether the draft model says each token too (benchmarks/record_traces.py)."""
    traces = json.loads((_BENCHMARKS / "traces.json").read_text())["draft"]
    return {name: [[c == "1" for c in answer] for answer in answers] for name, answers in traces.items()}


@cache
def real_texts() -> dict[str, tuple[list[int], list[int]]]:
    """Prompt and answer of real texts by name, as token ids."""
    texts = json.loads((_BENCHMARKS / "traces.json").read_text())["texts"]
    return {name: (one["prompt"], one["answer"]) for name, one in texts.items()}


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
    overlap: bool = False,
) -> PassRecord:
    """Return a pass over a draft, all of it compared unless `compared` is less."""
    n = len(proposal) if compared is None else compared
    return PassRecord(ms, proposal.drafter, tuple(proposal.buckets), accepted, n, draft_ms, unread, overlap)


def text(rng: random.Random, rate: float, n: int) -> list[bool]:
    """Return whether the draft model is right at each position, independently."""
    return [rng.random() < rate for _ in range(n)]


def bursty(rng: random.Random, rates: Sequence[float], stretch: int, n: int) -> list[bool]:
    """The same with a rate that changes every `stretch` tokens, as where code and prose alternate."""
    return [rng.random() < rates[i // stretch % len(rates)] for i in range(n)]


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
        offer, hits = propose(at) if propose else (Proposal("lookup"), [])
        offer, hits = offer.cut(room), hits[:room]
        free = controller.free_depth(offer) if offer else 0
        plan = DraftPlan() if free else controller.plan_draft(room, lag)
        assert 0 <= free <= len(offer) and 0 <= plan.depth <= room
        answer.passes += 1
        if free:
            accepted = _run(hits, 0, free)
            ms = now.verify_ms[free]
            answer.ms += ms
            controller.record(verified(offer.cut(free), accepted, noise(ms)))
            answer.free.append((at, free, accepted))
            at += accepted + 1
            lag += accepted + 1
        elif plan.depth:
            accepted = _run(right, at, plan.depth)
            draft_ms = plan.depth * now.draft_ms + max(0, lag - 2) * now.read_ms
            ms = now.verify_ms[plan.depth]
            answer.ms += ms + draft_ms
            draft = Proposal("draft", [0] * plan.depth, [0] * plan.depth)
            controller.record(verified(draft, accepted, noise(ms), draft_ms=noise(draft_ms), unread=lag))
            at += accepted + 1
            lag = 2 if accepted == plan.depth else 1
        else:
            ms = now.verify_ms[0] * (1.0 + disturbed)
            answer.ms += ms
            controller.record(PassRecord(noise(ms)))
            at += 1
            lag += 1
        if offer and not free:
            score = min(_run(hits, 0, len(hits)) + 1, at - start, len(hits))
            controller.record_scores(offer.drafter, offer.buckets[:score], hits[:score])
        answer.plans.append((start, plan.depth))
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


def _free_drafters(worth: Callable[[Proposal], int], prompt: Sequence[int]) -> Cascade:
    index = NgramIndex()
    cascade = Cascade(index, (SuffixDecoding(index),), worth)
    cascade.begin_answer(prompt)
    return cascade


def _hits(tokens: Sequence[int], written: Sequence[int]) -> int:
    return next(
        (j for j, (a, b) in enumerate(zip(tokens, written, strict=False)) if a != b), min(len(tokens), len(written))
    )


def text_answer(
    worth: Callable[[Proposal], int],
    costs: PassCosts,
    prompt: Sequence[int],
    text: Sequence[int],
    controller: DepthController | None = None,
    noise: Noise | None = None,
) -> float:
    """Return the ms to write a real text with the free drafters, as deep as `worth` or a controller decides."""
    noise, ms, at = noise or Noise(), 0.0, 0
    cascade = _free_drafters(controller.free_depth if controller else worth, prompt)
    if controller:
        controller.begin_answer()
    while at < len(text):
        proposal = cascade.propose(min(MAX_DEPTH, len(text) - at - 1)) if at < len(text) - 1 else Proposal("lookup")
        accepted = _hits(proposal.tokens, text[at:])
        took = costs.verify_ms[len(proposal)]
        ms += took
        if controller:
            controller.record(verified(proposal, accepted, noise(took)) if proposal else PassRecord(noise(took)))
        cascade.append(text[at : at + accepted + 1])
        scores = cascade.take_scores()
        for drafter, buckets, right in scores:
            if controller:
                controller.record_scores(drafter, buckets, right)
        at += accepted + 1
    return ms


def oracle_answer(costs: PassCosts, prompt: Sequence[int], text: Sequence[int]) -> float:
    """Return the ms of one who knows which proposed tokens are right and verifies exactly these, where it pays."""
    at = 0

    def worth(proposal: Proposal) -> int:
        right = _hits(proposal.tokens, text[at:])
        return max(range(right + 1), key=lambda n: n + 1 - costs.verify_ms[n] / costs.verify_ms[0])

    cascade, ms = _free_drafters(worth, prompt), 0.0
    while at < len(text):
        n = len(cascade.propose(min(MAX_DEPTH, len(text) - at - 1))) if at < len(text) - 1 else 0
        ms += costs.verify_ms[n]
        cascade.append(text[at : at + n + 1])
        cascade.take_scores()
        at += n + 1
    return ms
