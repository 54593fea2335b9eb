"""Computes the time of passes: of decoding, of verifying drafts, of a prompt, and of many chats together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cpuchat.costmodel.profile import CostProfile
from cpuchat.costmodel.work import ModelWork, Part, parts

MICRO_BATCH = 512
"""Tokens of a prompt that are evaluated at once (n_ubatch)."""
_KERNELS_CHANGE = 32  # tokens up to which kernels for fewer and more tokens differ


@dataclass(frozen=True, slots=True)
class PassCost:
    """The time of a pass in seconds: `fixed`, reading alone, computing alone, and all of it, partly at once."""

    fixed: float
    read: float
    compute: float
    seconds: float

    @property
    def limit(self) -> str:
        """Return what takes most of it: "memory", "compute" or "overhead"."""
        named = {"memory": self.read, "compute": self.compute, "overhead": self.fixed}
        return max(named, key=lambda name: named[name])

    @property
    def limit_share(self) -> float:
        """Return the share of the pass that it takes, at most 1: both may go on at the same time."""
        longest = {"memory": self.read, "compute": self.compute, "overhead": self.fixed}[self.limit]
        return min(longest / self.seconds, 1.0)

    def __add__(self, other: PassCost) -> PassCost:
        return PassCost(
            self.fixed + other.fixed,
            self.read + other.read,
            self.compute + other.compute,
            self.seconds + other.seconds,
        )


def pass_cost(
    profile: CostProfile,
    work: ModelWork,
    n_tokens: float = 1,
    n_past: float = 0,
    *,
    n_outputs: float | None = None,
    sequences: int = 1,
    beside: float = 0.0,
) -> PassCost:
    """Return the time of one pass; the arguments are those of `work.parts`.

    Reading and computing overlap within matrices of one type, not across them: those are multiplied one after another.

    Args:
        beside: bytes of other weights that are read in turn with these, a draft model's: they share the caches.
    """
    todo = parts(work, n_tokens, n_past, n_outputs=n_outputs, sequences=sequences)
    return cost_of(profile, todo, work.n_layer, work.weight_bytes + beside)


def cost_of(profile: CostProfile, todo: Sequence[Part], n_layer: int, working_set: float) -> PassCost:
    """Return the time of a pass that consists of these parts."""
    rate = profile.read_rate(working_set)
    fixed = profile.pass_s + profile.layer_s * n_layer
    read = compute = total = 0.0
    for part in todo:
        reading = part.nbytes / rate
        computing = part.madds / profile.madd_rate(part.type, part.batch, working_set) if part.madds else 0.0
        read += reading
        compute += computing
        total += overlapped(reading, computing, profile.overlap)
    return PassCost(fixed, read, compute, fixed + total)


def overlapped(read: float, compute: float, exponent: float) -> float:
    """Return the time of both together: between the longer of them and their sum."""
    longer, shorter = max(read, compute), min(read, compute)
    if shorter <= 0:
        return longer
    return longer * (1 + (shorter / longer) ** exponent) ** (1 / exponent)


def prefill_cost(profile: CostProfile, work: ModelWork, n_prompt: int, n_past: int = 0) -> PassCost:
    """Return the time to evaluate a prompt, in micro-batches; its last token's logits give the first token."""
    total = PassCost(0.0, 0.0, 0.0, 0.0)
    done = 0
    while done < n_prompt:
        n = min(MICRO_BATCH, n_prompt - done)
        done += n
        total += pass_cost(profile, work, n, n_past + done - n, n_outputs=1 if done == n_prompt else 0)
    return total


def verify_costs(
    profile: CostProfile, target: ModelWork, longest: int, n_past: float, draft_bytes: float
) -> list[float]:
    """Return the seconds of passes of the target over 1, 2, ... `longest` tokens, with a draft model beside it."""
    return [pass_cost(profile, target, n, n_past, beside=draft_bytes).seconds for n in range(1, longest + 1)]


def draft_cost(profile: CostProfile, draft: ModelWork, n_past: float, target_bytes: float) -> float:
    """Return the seconds of one drafted token, sequential with the target."""
    return pass_cost(profile, draft, 1, n_past, beside=target_bytes).seconds


@dataclass(frozen=True, slots=True)
class PairCosts:
    """Seconds of passes of a target over 1, 2, ... tokens, and of a drafted token, with both models in memory."""

    verify: tuple[float, ...]
    draft: float


def pair_costs(profile: CostProfile, target: ModelWork, draft: ModelWork, n_past: float, longest: int) -> PairCosts:
    """Return what a target with a draft model costs, for passes of up to `longest` tokens."""
    return PairCosts(
        tuple(verify_costs(profile, target, longest, n_past, draft.weight_bytes)),
        draft_cost(profile, draft, n_past, target.weight_bytes),
    )


def tokens_per_pass(acceptance: float, depth: int) -> float:
    """Return the expected tokens of a pass that verifies `depth` drafted tokens (Leviathan et al., 2211.17192)."""
    if acceptance >= 1:
        return depth + 1.0
    return (1 - acceptance ** (depth + 1)) / (1 - acceptance)


def batch_rate(profile: CostProfile, work: ModelWork, users: int, n_past: float = 0) -> float:
    """Return tok/s of each of `users` chats that are decoded together: the weights are read once per step for all, the
    KV cache of each for itself."""
    return 1 / pass_cost(profile, work, users, n_past, sequences=users).seconds


def most_users(profile: CostProfile, work: ModelWork, tok_s: float, n_past: float, limit: int) -> int:
    """Return how many chats, at most `limit`, can be decoded together at `tok_s` each; 0 when not even one can."""
    few = min(limit, _KERNELS_CHANGE)  # longer passes are not always slower per token here: all are tried
    low = max((n for n in range(1, few + 1) if batch_rate(profile, work, n, n_past) >= tok_s), default=0)
    if low < few:
        return low
    high = limit
    while low < high:
        middle = (low + high + 1) // 2
        if batch_rate(profile, work, middle, n_past) >= tok_s:
            low = middle
        else:
            high = middle - 1
    return low


def compute_ceiling(profile: CostProfile, work: ModelWork, n_past: float = 0) -> float:
    """Return the tok/s if only computing took time, in passes as long as micro-batches: what no drafter exceeds."""
    return MICRO_BATCH / pass_cost(profile, work, MICRO_BATCH, n_past).compute
