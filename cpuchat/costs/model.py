"""How long a pass takes: of decoding, of verifying drafts, of a prompt, and of many chats together.

The work of a pass (`ModelWork`: bytes to read and multiply-adds, by tensor type) takes time on a machine, which
`CostProfile` describes as far as that time depends on it. Of a machine that was not measured, `usual_profile` computes
the profile from its bandwidth, its cores and the kind of its CPU; what cores compute is in cpus.toml, each figure with
its source.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec

from cpuchat.base import toml
from cpuchat.base.decoding import prepared
from cpuchat.costs.products import Points, ProductRate, interpolated
from cpuchat.protocol.model_info import ModelWork, Weights

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
_ATTENTION_TILE = 64
"""Tokens of a pass from which on flash attention over an unquantized cache computes in tiles (ggml-cpu/ops.cpp)."""
ROUTED = " routed"
"""Follows the type of experts among the arithmetic rates: few tokens are multiplied with each of many matrices."""
_LAST = 0.85
"""Share of the last layer that is computed only for the tokens whose logits are wanted: all behind K and V."""
ACTIVATIONS = "activations"
"""The type of what is done to values between matrices (quantizing, norms, gates): much where matrices are small."""
ALIKE = 0.5
"""`ModelWork.alike` of text: DeepSeek-R1 takes 1.21, 1.66, 2.65 and 4.46 times as long for 2, 4, 8 and 16 tokens as for
one (llama.cpp pull request 17034); with independent choices it would read 1.55, 2.6, 4.5 and 7.7 times as much.
"""


def experts_read(
    n_expert: int, n_expert_used: int, n_tokens: float, *, sequences: int = 1, alike: float = 0.0
) -> float:
    """Return the expected number of distinct experts that `n_tokens` tokens use, when each chooses `n_expert_used` of
    `n_expert`.

    Texts choose independently of each other; of the further tokens of one text the share `alike` chooses as the others
    do.
    """
    if n_expert <= 0:
        return 0.0
    choosing = sequences * (1 + (n_tokens / sequences - 1) * (1 - alike))
    return n_expert * (1 - (1 - min(n_expert_used / n_expert, 1.0)) ** choosing)


def parts(
    work: ModelWork, n_tokens: float, n_past: float = 0, *, n_outputs: float | None = None, sequences: int = 1
) -> list[PassPart]:
    """Return the parts of a pass.

    Args:
        n_tokens: evaluated together, of all sequences.
        n_past: tokens in the context of each sequence.
        n_outputs: tokens whose logits are wanted (default: all).
        sequences: chats that the tokens belong to in equal parts; each has a KV cache of its own.
    """
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
        madds = one.madds * (one.wide if each >= _ATTENTION_TILE else 1.0)
        found.append(PassPart(KV, sequences * cells * one.nbytes, n_tokens * seen * madds, each))
    moved = n_tokens * work.row + 2.0 * sequences * work.state
    if moved:
        found.append(PassPart(KV, moved, 0.0, 1.0))
    return found


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
_IN_CACHE = 2.0
"""How many times as fast weights are read that stay in the L3 caches."""
_AROUND = 2
"""Layers whose fixed costs are those of a pass beside its layers (embedding, output, graph, sampling)."""
MICRO_BATCH = 512
"""Tokens of a prompt that are evaluated at once (n_ubatch)."""
_KERNELS_CHANGE = 32  # tokens up to which kernels for fewer and more tokens differ


class CostProfile(msgspec.Struct, frozen=True, kw_only=True):
    """A machine with the cores in use.

    `bandwidth`: bytes per second that weights are read at most; `l3_bytes` of the caches (0: not known). `products`:
    the rate of each tensor type, one after the other. `attention`: multiply-adds per second by the tokens of a chat in
    the pass. `activations` per second between matrices (0: they take no time). `layer_s`: seconds that a layer takes
    beyond these (barriers, norms).
    """

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
    return msgspec.structs.replace(on_other_cores(profile, read=speed, compute=speed), layer_s=profile.layer_s / speed)


def on_other_cores(profile: CostProfile, *, read: float, compute: float) -> CostProfile:
    """Return other cores of the same machine, which read and compute so many times as fast; fixed costs stay. What a
    product takes beyond reading is computing."""
    memory = 1 / profile.bandwidth

    def rate(now: float) -> float:
        return 1 / (memory / read + max(1 / now - memory, 0.0) / compute)

    return msgspec.structs.replace(
        profile,
        bandwidth=read * profile.bandwidth,
        products=tuple(
            msgspec.structs.replace(one, points=tuple((n, rate(now)) for n, now in one.points))
            for one in profile.products
        ),
        attention=tuple((n, compute * now) for n, now in profile.attention),
        activations=compute * profile.activations,
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
    """Return the time of one pass; the arguments are those of `parts`. The parts run one after another.

    Args:
        beside: bytes of other weights that are read in turn with these, a draft model's: they share the caches.
    """
    working_set = work.weight_bytes + beside
    todo = parts(work, n_tokens, n_past, n_outputs=n_outputs, sequences=sequences)
    read = sum(part.nbytes for part in todo) / profile.read_rate(working_set)
    total = sum(profile.seconds(part, working_set) for part in todo)
    return PassCost(profile.layer_s * (work.n_layer + _AROUND), read, max(total - read, 0.0))


def prefill_cost(profile: CostProfile, work: ModelWork, n_prompt: int) -> PassCost:
    """Return the time to evaluate a prompt, in micro-batches; its last token's logits give the first token."""
    total = PassCost(0.0, 0.0, 0.0)
    done = 0
    while done < n_prompt:
        n = min(MICRO_BATCH, n_prompt - done)
        done += n
        total += pass_cost(profile, work, n, done - n, n_outputs=1 if done == n_prompt else 0)
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


Basis = Literal["measured", "data sheet", "computed", "estimate", "given"]
Kind = Literal["desktop", "server", "dual socket", "cloud", "apple", "here"]
Scenario = Literal["low", "value", "high"]
SCENARIOS: tuple[Scenario, ...] = ("low", "value", "high")
USUAL_GHZ = 3.0
"""Clock under load where it is not known."""
_BARRIERS = 20  # per layer
_FULL, _MANY = 16, 112  # cores up to which rates add up, and at which `scaling` holds
_TOKENS = (1, 2, 4, 8, 16, 32)  # from the last one on kernels compute at their full rate
_OVERLAP = 6.0
"""Exponent p of (read^p + compute^p)^(1/p), the time of both. On a Xeon E5-2683v4 with a 70B model, 6 is within 5 % for
passes over 1 to 16 tokens."""
_BY_FEATURE = (
    ("AMX_INT8", "granite-rapids"),
    ("AVX512_VNNI", "zen4"),
    ("AVX_VNNI", "zen4"),
    ("AVX2", "zen3"),
    ("AVX", "x86-64"),
    ("MATMUL_INT8", "ampereone"),
)
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
Text = Annotated[str, msgspec.Meta(max_length=400)]


class Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A number with its range (0: none), its source, and what that source is."""

    value: Positive
    low: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    high: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    basis: Basis = "estimate"
    source: Text = ""

    def __post_init__(self) -> None:
        if (self.low and self.low > self.value) or (self.high and self.high < self.value):
            raise ValueError("low, value and high: must be in rising order")

    def at(self, scenario: Scenario) -> float:
        """Return `low`, `value` or `high`; `value` where there is no range."""
        return (getattr(self, scenario) if scenario != "value" else 0.0) or self.value


class _CPU(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`int8` with llama.cpp's kernels, `own` with cpuchat's (None: they do not run there)."""

    int8: Figure
    own: Figure | None = None


class Usual(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of cpus.toml."""

    cpu: dict[str, _CPU]
    few: Figure
    few_own: Figure
    f16: Figure
    attention: Figure
    typical: Figure
    decode: dict[Kind, Figure]
    scaling: Figure
    barrier_us: Figure


@cache
def usual() -> Usual:
    """Return what is usual of CPUs and kinds of machines."""
    text = Path(__file__).with_name("cpus.toml").read_text(encoding="utf-8")
    return msgspec.convert(toml.loads(text), prepared(Usual))


def cpu_of(features: Collection[str]) -> str:
    """Return the name in cpus.toml whose rates are nearest to those of a CPU with these instructions."""
    return next((name for feature, name in _BY_FEATURE if feature in features), "arm64")


def int8_tops(
    cpu: str,
    cores: float,
    clock_ghz: float = USUAL_GHZ,
    *,
    sockets: int = 1,
    scenario: Scenario = "value",
    own: bool = True,
) -> float:
    """Return tera-operations per second in products of quantized matrices, all cores together; `own`: with cpuchat's
    kernels where they run."""
    found, each = usual(), cores / sockets
    beyond = min(max(math.log(each / _FULL) / math.log(_MANY / _FULL), 0.0), 1.0) if each > _FULL else 0.0
    rates = found.cpu[cpu]
    rate = rates.own if own and rates.own is not None else rates.int8
    return cores * found.scaling.value**beyond * clock_ghz * rate.at(scenario) / 1e3


def usual_profile(
    cpu: str,
    cores: float,
    decode: float,
    *,
    clock_ghz: float = USUAL_GHZ,
    l3_bytes: float = 0.0,
    sockets: int = 1,
    scenario: Scenario = "value",
    own: Collection[str] = (),
) -> CostProfile:
    """Return the profile of a machine with `cores` cores.

    Args:
        decode: bytes per second that decoding reads from memory; twice as many where the weights stay in L3.
        l3_bytes: of all L3 caches; 0: not known.
        own: types that cpuchat's kernels compute, where they run.
    """
    found = usual()
    tops = partial(int8_tops, cpu, cores, clock_ghz, sockets=sockets, scenario=scenario)
    barrier = found.barrier_us.value * 1e-6 * math.log2(2 * cores) * sockets

    def rate(kind: str, n: int) -> float:
        is_own = kind in own and found.cpu[cpu].own is not None
        single = found.few_own if is_own else found.few
        few = single.value ** (1 - math.log(n) / math.log(_TOKENS[-1]))
        is_float = BITS[kind] >= BITS["F16"]
        full = tops(own=is_own) * (found.f16.value if is_float else 1.0)
        computing = n * 8 / BITS[kind] / (few * full * 1e12 / 2)
        return (decode**-_OVERLAP + computing**_OVERLAP) ** (-1 / _OVERLAP)

    return CostProfile(
        bandwidth=decode,
        products=tuple(ProductRate(kind, tuple((float(n), rate(kind, n)) for n in _TOKENS)) for kind in BITS),
        attention=((1.0, found.attention.value * tops(own=False) * 1e12 / 2),),
        layer_s=_BARRIERS * barrier,
        l3_bytes=l3_bytes,
    )
