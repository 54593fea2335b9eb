"""How long a pass takes: of decoding, of verifying drafts, of a prompt, and of many chats together.

The work of a pass (`ModelWork`: bytes to read and multiply-adds, by tensor type) takes time on a machine, which
`CostProfile` describes as far as that time depends on it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import msgspec

from cpuchat.protocol.model_info import ModelWork, Weights

Points = tuple[tuple[float, float], ...]
"""Pairs of tokens and a rate, by rising tokens."""
COST_MODEL = 4
"""Raise it with every change of the work of a pass or of how profiles are fitted: what earlier versions kept of models
and of this machine is then computed and measured again."""


class PassPart(NamedTuple):
    """A part of a pass: matrices of one `type` that `batch` tokens are multiplied with at once."""

    type: str
    nbytes: float
    madds: float
    batch: float


KV = "KV"
"""The type of attention over the KV cache among the arithmetic rates."""
ATTENTION_TILE = 64
"""Tokens of a pass from which on flash attention over an unquantized cache computes in tiles (GGML_FA_TILE_Q in
ggml-cpu/common.h). For fewer it takes 2.3 times as long for each (0.5B shape behind 4,000 tokens, Zen 3)."""
ROUTED = " routed"
"""Follows the type of experts among the arithmetic rates: few tokens are multiplied with each of many matrices."""
_LAST = 0.85  # share of the last layer that is computed only for the tokens whose logits are wanted: all behind K and V
ACTIVATIONS = "activations"
"""The type of what is done to values between matrices (quantizing, norms, gates): much where matrices are small."""
ALIKE = 0.5
"""`ModelWork.alike` of text: DeepSeek-R1 takes 1.21, 1.66, 2.65 and 4.46 times as long for 2, 4, 8 and 16 tokens as for
one (llama.cpp pull request 17034); with independent choices it would read 1.55, 2.6, 4.5 and 7.7 times as much."""


def experts_read(
    n_expert: int, n_expert_used: int, n_tokens: float, *, sequences: int = 1, alike: float = 0.0
) -> float:
    """Return the expected number of distinct experts that `n_tokens` tokens use, each `n_expert_used` of `n_expert`.
    Texts choose independently; of the further tokens of one text the share `alike` chooses as the others do."""
    if n_expert <= 0:
        return 0.0
    choosing = sequences * (1 + (n_tokens / sequences - 1) * (1 - alike))
    return n_expert * (1 - (1 - min(n_expert_used / n_expert, 1.0)) ** choosing)


def parts(
    work: ModelWork, n_tokens: float, n_past: float = 0, *, n_outputs: float | None = None, sequences: int = 1
) -> list[PassPart]:
    """Return the parts of a pass over `n_tokens`, which belong in equal parts to so many `sequences`: each has `n_past`
    tokens in a KV cache of its own. `n_outputs`: tokens whose logits are wanted (default: all)."""
    outputs = n_tokens if n_outputs is None else n_outputs
    # Tokens that pass through all layers, as it were; files without layers exist.
    whole = n_tokens - (n_tokens - outputs) * _LAST / max(work.n_layer, 1)
    found = [PassPart(one.type, one.nbytes, one.madds * whole, whole) for one in work.dense]
    if outputs:
        found += [PassPart(one.type, one.nbytes, one.madds * outputs, outputs) for one in work.head]
    between = whole * sum(one.activations for one in work.dense)
    between += outputs * sum(one.activations for one in work.head)
    if work.is_moe:
        read = experts_read(work.n_expert, work.n_expert_used, n_tokens, sequences=sequences, alike=work.alike)
        used = whole * work.n_expert_used
        batch = max(used / max(read, 1e-9), 1.0)
        found += [
            PassPart(one.type + ROUTED, one.nbytes * read / work.n_expert, one.madds * used / work.n_expert, batch)
            for one in work.experts
        ]
        between += used / work.n_expert * sum(one.activations for one in work.experts)
    if between:
        found.append(PassPart(ACTIVATIONS, 0.0, between, whole))
    each = n_tokens / sequences
    for one in work.attention:
        cells = one.cells(each, n_past)
        seen = cells - (each - 1) / 2
        seen = min(seen, one.window) if one.window else seen
        madds = one.madds * (one.wide if each >= ATTENTION_TILE else 1.0)
        found.append(PassPart(KV, sequences * cells * one.nbytes, n_tokens * seen * madds, each))
    moved = n_tokens * work.row + 2.0 * sequences * work.state
    if moved:
        found.append(PassPart(KV, moved, 0.0, 1.0))
    return found


N_PAST = 650
"""Tokens in the context for which speeds and limits are given: the middle of an answer of 300 tokens, after 500."""


def bytes_read(work: ModelWork, n_tokens: float, n_past: float = 0, *, sequences: int = 1) -> float:
    """Return the bytes that a pass reads."""
    return sum(part.nbytes for part in parts(work, n_tokens, n_past, sequences=sequences))


def by_type(matrices: Iterable[Weights]) -> tuple[Weights, ...]:
    """Add up matrices by type, in the order of their first appearance."""
    totals: dict[str, Weights] = {}
    for one in matrices:
        known = totals.get(one.type, Weights(one.type, 0.0, 0.0))
        totals[one.type] = Weights(
            one.type, known.nbytes + one.nbytes, known.madds + one.madds, known.activations + one.activations
        )
    return tuple(totals.values())


BITS = {
    "F32": 32.0, "F16": 16.0, "BF16": 16.0, "Q8_0": 8.5, "Q8_K": 9.1, "Q6_K": 6.56, "Q5_0": 5.5, "Q5_1": 6.0,
    "Q5_K": 5.5, "Q4_0": 4.5, "Q4_1": 5.0, "Q4_K": 4.5, "IQ4_NL": 4.5, "IQ4_XS": 4.25, "MXFP4": 4.25, "Q3_K": 3.44,
    "Q2_K": 2.63, "Q2_0": 2.25, "IQ3_S": 3.44, "IQ3_XXS": 3.06, "IQ2_S": 2.5, "IQ2_XS": 2.31, "IQ1_S": 1.56,
}  # fmt: skip
"""Bits of a value by type, to find the nearest type whose rate is known."""
_USUAL_BITS = 4.5  # of a type not named above: the others are low-bit formats
_IN_CACHE = 2.0  # how many times as fast weights are read that stay in the L3 caches
_AROUND = 2  # layers whose fixed costs are those of a pass beside its layers (embedding, output, graph, sampling)
MICRO_BATCH = 512
"""Tokens of a prompt that are evaluated at once (n_ubatch)."""
_KERNELS_CHANGE = 32  # tokens up to which kernels for fewer and more tokens differ


class ProductRate(msgspec.Struct, frozen=True):
    """The speed of one tensor type ("Q4_K") on the threads of a placement: `points` are pairs of tokens in a pass and
    bytes of weights per second, by rising tokens. Raises ValueError: none, or not positive (a damaged file)."""

    type: str
    points: Points

    def __post_init__(self) -> None:
        if not self.points or not all(0 < value < math.inf for point in self.points for value in point):
            raise ValueError(f"no rates of {self.type}: {self.points}")

    def rate(self, n_tokens: float) -> float:
        """Return bytes of weights per second in a pass: straight lines between the points on logarithmic scales. Longer
        passes take as much time per token as the last one."""
        return interpolated(self.points, n_tokens) * min(1.0, self.points[-1][0] / n_tokens)


def interpolated(points: Points, at: float) -> float:
    """Return the value at `at`: straight lines through `points` on logarithmic scales, constant outside them."""
    (_, before), *_ = points
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 < at < x1:
            return y0 * (y1 / y0) ** (math.log(at / x0) / math.log(x1 / x0))
        before = y1 if at >= x1 else before
    return before


class CostProfile(msgspec.Struct, frozen=True, kw_only=True):
    """A machine with the cores in use. `bandwidth`: bytes per second that weights are read at most; `l3_bytes` of the
    caches (0: not known). `products`: the rate of each tensor type. `attention`: multiply-adds per second by the tokens
    of a chat in the pass. `activations` per second between matrices (0: they take no time). `layer_s`: seconds that a
    layer takes beyond these (barriers, norms)."""

    bandwidth: float
    products: tuple[ProductRate, ...]
    attention: Points = ()
    activations: float = 0.0
    layer_s: float = 0.0
    l3_bytes: float = 0.0

    def read_rate(self, working_set: float) -> float:
        """Return bytes per second for weights of `working_set` bytes."""
        if not self.l3_bytes:
            return self.bandwidth
        ends = ((self.l3_bytes / 2, _IN_CACHE * self.bandwidth), (2 * self.l3_bytes, self.bandwidth))
        return interpolated(ends, working_set)

    def product(self, kind: str) -> ProductRate:
        """Return the rate of a tensor type: of the nearest by bits of a value where it is unknown."""
        kind = kind if any(one.type == kind for one in self.products) else kind.removesuffix(ROUTED)
        bits = math.log(BITS.get(kind, _USUAL_BITS))

        def distance(one: ProductRate) -> tuple[bool, bool, float]:
            away = abs(math.log(BITS.get(one.type, _USUAL_BITS)) - bits)
            return one.type != kind, one.type.endswith(ROUTED), away

        return min(self.products, key=distance)

    def seconds(self, part: PassPart, working_set: float) -> float:
        """Return the time of a part of a pass over weights of `working_set` bytes."""
        reading = part.nbytes / self.read_rate(working_set)
        if part.type == KV:
            computing = part.madds / interpolated(self.attention, part.batch) if self.attention else 0.0
            return max(reading, computing)
        if part.type == ACTIVATIONS:
            return part.madds / self.activations if self.activations else 0.0
        saved = part.nbytes / self.bandwidth - reading
        return max(part.nbytes / self.product(part.type).rate(part.batch) - saved, reading)


def scaled(profile: CostProfile, speed: float) -> CostProfile:
    """Return a machine that is `speed` times as fast in everything."""

    def faster(points: Points) -> Points:
        return tuple((n, speed * rate) for n, rate in points)

    return CostProfile(
        bandwidth=speed * profile.bandwidth,
        products=tuple(ProductRate(one.type, faster(one.points)) for one in profile.products),
        attention=faster(profile.attention),
        activations=speed * profile.activations,
        layer_s=profile.layer_s / speed,
        l3_bytes=profile.l3_bytes,
    )


@dataclass(frozen=True, slots=True)
class PassCost:
    """The time of a pass in seconds: `fixed`, reading alone, what computing adds to that, and all of it."""

    fixed: float
    read: float
    compute: float

    @property
    def seconds(self) -> float:
        return self.fixed + self.read + self.compute

    @property
    def limit(self) -> str:
        """Return what takes most of it: "memory", "compute" or "overhead"."""
        named = {"memory": self.read, "compute": self.compute, "overhead": self.fixed}
        return max(named, key=lambda name: named[name])

    @property
    def limit_share(self) -> float:
        """Return the share of the pass that it takes."""
        return max(self.read, self.compute, self.fixed) / self.seconds

    def __add__(self, other: PassCost) -> PassCost:
        return PassCost(self.fixed + other.fixed, self.read + other.read, self.compute + other.compute)


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
    """Return the time of one pass; the arguments are those of `parts`, which run one after another. `beside`: bytes of
    other weights that are read in turn with these, a draft model's: they share the caches."""
    working_set = work.weight_bytes + beside
    todo = parts(work, n_tokens, n_past, n_outputs=n_outputs, sequences=sequences)
    read = sum(part.nbytes for part in todo) / profile.read_rate(working_set)
    total = sum(profile.seconds(part, working_set) for part in todo)
    return PassCost(profile.layer_s * (work.n_layer + _AROUND), read, max(total - read, 0.0))


def prefill_cost(profile: CostProfile, work: ModelWork, n_prompt: int) -> PassCost:
    """Return the time to evaluate a prompt, in micro-batches; its last token's logits give the first token."""
    total = PassCost(0.0, 0.0, 0.0)
    for done in range(0, n_prompt, MICRO_BATCH):
        n = min(MICRO_BATCH, n_prompt - done)
        total += pass_cost(profile, work, n, done, n_outputs=int(done + n == n_prompt))
    return total


@dataclass(frozen=True, slots=True)
class PairCosts:
    """Seconds of passes of a target over 1, 2, ... tokens, and of a drafted token, with both models in memory."""

    verify: tuple[float, ...]
    draft: float


def pair_costs(profile: CostProfile, target: ModelWork, draft: ModelWork, n_past: float, longest: int) -> PairCosts:
    """Return what a target with a draft model costs, for passes of up to `longest` tokens."""
    return PairCosts(
        tuple(pass_cost(profile, target, n, n_past, beside=draft.weight_bytes).seconds for n in range(1, longest + 1)),
        pass_cost(profile, draft, 1, n_past, beside=target.weight_bytes).seconds,
    )


def tokens_per_pass(acceptance: float, depth: int) -> float:
    """Return the expected tokens of a pass that verifies `depth` drafted tokens (Leviathan et al., 2211.17192)."""
    return (1 - acceptance ** (depth + 1)) / (1 - acceptance) if acceptance < 1 - 1e-6 else depth + 1.0


def batch_rate(profile: CostProfile, work: ModelWork, users: int, n_past: float = 0) -> float:
    """Return tok/s of each of `users` chats that are decoded together: the weights are read once per step for all, the
    KV cache of each for itself."""
    return 1 / pass_cost(profile, work, users, n_past, sequences=users).seconds


def max_users(profile: CostProfile, work: ModelWork, tok_s: float, n_past: float, limit: int) -> int:
    """Return how many chats, at most `limit`, can be decoded together at `tok_s` each; 0 when not even one can."""
    few = min(limit, _KERNELS_CHANGE)  # longer passes are not always slower per token here: all are tried
    low = max((n for n in range(1, few + 1) if batch_rate(profile, work, n, n_past) >= tok_s), default=0)
    if low < few:
        return low
    more = range(few + 1, limit + 1)
    return few + bisect_left(more, True, key=lambda n: batch_rate(profile, work, n, n_past) < tok_s)


def compute_ceiling(profile: CostProfile, work: ModelWork, n_past: float = 0) -> float:
    """Return the tok/s if only computing took time, in passes as long as micro-batches: what no drafter exceeds."""
    return MICRO_BATCH / pass_cost(profile, work, MICRO_BATCH, n_past).compute
