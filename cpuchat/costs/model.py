"""How long a pass takes: of decoding, of verifying drafts, of a prompt, and of many chats together.

The work of a pass (`ModelWork`: bytes to read and multiply-adds, by tensor type) takes time on a machine, which
`CostProfile` describes as far as that time depends on it. Of a machine that was not measured, `usual_profile` computes
the profile from its bandwidth, its cores and the kind of its CPU; what cores compute is in cpus.toml, each figure with
its source.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec

from cpuchat.base import toml
from cpuchat.base.decoding import prepared
from cpuchat.protocol.model_info import ModelWork, Weights

COST_MODEL = 3
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
    found = [PassPart(one.type, one.nbytes, one.madds * whole, n_tokens) for one in work.dense]
    if outputs:
        found += [PassPart(one.type, one.nbytes, one.madds * outputs, outputs) for one in work.head]
    between = whole * sum(one.activations for one in work.dense)
    between += outputs * sum(one.activations for one in work.head)
    if work.is_moe:
        read = experts_read(work.n_expert, work.n_expert_used, n_tokens, sequences=sequences, alike=work.alike)
        used = whole * work.n_expert_used
        batch = max(n_tokens * work.n_expert_used / max(read, 1e-9), 1.0)
        found += [
            PassPart(one.type + ROUTED, one.nbytes * read / work.n_expert, one.madds * used / work.n_expert, batch)
            for one in work.experts
        ]
        between += used / work.n_expert * sum(one.activations for one in work.experts)
    if between:
        found.append(PassPart(ACTIVATIONS, 0.0, between, n_tokens))
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


Points = tuple[tuple[float, float], ...]

BITS = {
    "F32": 32.0, "F16": 16.0, "BF16": 16.0, "Q8_0": 8.5, "Q8_K": 9.1, "Q6_K": 6.56, "Q5_0": 5.5, "Q5_1": 6.0,
    "Q5_K": 5.5, "Q4_0": 4.5, "Q4_1": 5.0, "Q4_K": 4.5, "IQ4_NL": 4.5, "IQ4_XS": 4.25, "MXFP4": 4.25, "Q3_K": 3.44,
    "Q2_K": 2.63, "Q2_0": 2.25, KV: 16.0,
}  # fmt: skip
"""Bits of a value by type, to find the nearest type whose rate is known."""
_USUAL_BITS = 4.5  # of a type not named above: the others are low-bit formats
CACHED, UNCACHED = 64e6, 90e6
"""Bytes of weights up to which they count as cached, and from which they do not. On two cores of a Xeon with AMX, Q6_K
is computed at 41e9 multiply-adds per second when its 40 MB stay in the caches, and at 15e9 when 110 MB do not: reading
them alone would not take that long."""


class Rate(msgspec.Struct, frozen=True):
    """The arithmetic rate with one tensor `type`: `points` are (tokens in the pass, multiply-adds per second), by
    rising tokens. Kernels differ by the number of tokens, so it need not rise with it. `cached`: with weights that stay
    in the caches."""

    type: str
    points: Points
    cached: bool = False


class CostProfile(msgspec.Struct, frozen=True, kw_only=True):
    """A machine with the cores in use.

    `pass_s` and `layer_s`: seconds that a pass, and each of its layers, takes beyond reading and computing (barriers,
    graph, sampling). `bandwidth`: (bytes of weights, bytes per second), by rising bytes: small models stay in the
    caches. `overlap`: the exponent p of (read^p + compute^p)^(1/p); 1: one after the other, large: at the same time.
    On a Xeon E5-2683v4 with a 70B model, 6 is within 5 % for passes over 1 to 16 tokens.
    """

    bandwidth: Points
    rates: tuple[Rate, ...]
    pass_s: float = 0.0
    layer_s: float = 0.0
    overlap: float = 6.0

    def read_rate(self, working_set: float) -> float:
        """Return bytes per second for weights of `working_set` bytes."""
        return interpolated(self.bandwidth, working_set)

    def madd_rate(self, kind: str, batch: float, working_set: float = math.inf) -> float:
        """Return multiply-adds per second for `batch` tokens at once, with weights of `working_set` bytes; of the
        nearest type where `kind` is unknown. Activations take no time where their rate is unknown."""
        value = 1.0
        for rate, share in self.rates_of(kind, working_set):
            value *= interpolated(rate.points, batch) ** share
        return value if self.rates_of(kind) else math.inf

    def rates_of(self, kind: str, working_set: float = math.inf) -> list[tuple[Rate, float]]:
        """Return the rates whose logarithms make up that of a type, with their shares: of the type, else of the nearest
        by bits of a value; none for activations whose rate is unknown."""
        known = [rate for rate in self.rates if rate.type == kind]
        if not known:
            if kind == ACTIVATIONS:
                return []
            if kind.endswith(ROUTED):
                return self.rates_of(kind.removesuffix(ROUTED), working_set)
            others = [one for one in self.rates if one.type not in (KV, ACTIVATIONS) and not one.type.endswith(ROUTED)]
            bits = BITS.get(kind, _USUAL_BITS)
            nearest = min(
                others or self.rates, key=lambda rate: abs(math.log(BITS.get(rate.type, _USUAL_BITS) / bits))
            ).type
            known = [rate for rate in self.rates if rate.type == nearest]
        ways = [next((one for one in known if one.cached is cached), known[0]) for cached in (True, False)]
        return [(ways[index], share) for index, share in shares(((CACHED, 0.0), (UNCACHED, 0.0)), working_set)]


def interpolated(points: Points, at: float) -> float:
    """Return the value at `at`: straight lines through `points` on logarithmic scales, constant outside them."""
    (first, _), *more = shares(points, at)
    value = points[first][1]
    for index, share in more:
        value *= (points[index][1] / points[first][1]) ** share
    return value


def shares(points: Points, at: float) -> list[tuple[int, float]]:
    """Return the points whose logarithms make up the one at `at`, with their shares."""
    if len(points) == 1 or at <= points[0][0]:
        return [(0, 1.0)]
    if at >= points[-1][0]:
        return [(len(points) - 1, 1.0)]
    right = bisect.bisect_right(points, at, key=lambda point: point[0])
    x0, x1 = points[right - 1][0], points[right][0]
    share = math.log(at / x0) / math.log(x1 / x0)
    return [(right - 1, 1 - share), (right, share)]


def scaled(profile: CostProfile, speed: float) -> CostProfile:
    """Return a machine that is `speed` times as fast in everything."""
    return msgspec.structs.replace(
        on_other_cores(profile, read=speed, compute=speed),
        pass_s=profile.pass_s / speed,
        layer_s=profile.layer_s / speed,
    )


def on_other_cores(profile: CostProfile, *, read: float, compute: float) -> CostProfile:
    """Return other cores of the same machine, which read and compute so many times as fast; fixed costs stay."""
    return msgspec.structs.replace(
        profile,
        bandwidth=tuple((at, read * rate) for at, rate in profile.bandwidth),
        rates=tuple(
            Rate(one.type, tuple((n, compute * rate) for n, rate in one.points), one.cached) for one in profile.rates
        ),
    )


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
    """Return the time of one pass; the arguments are those of `parts`.

    Reading and computing overlap within matrices of one type, not across them: those are multiplied one after another.

    Args:
        beside: bytes of other weights that are read in turn with these, a draft model's: they share the caches.
    """
    working_set = work.weight_bytes + beside
    rate = profile.read_rate(working_set)
    fixed = profile.pass_s + profile.layer_s * work.n_layer
    read = compute = total = 0.0
    for part in parts(work, n_tokens, n_past, n_outputs=n_outputs, sequences=sequences):
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


def prefill_cost(profile: CostProfile, work: ModelWork, n_prompt: int) -> PassCost:
    """Return the time to evaluate a prompt, in micro-batches; its last token's logits give the first token."""
    total = PassCost(0.0, 0.0, 0.0, 0.0)
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


def pair_costs(
    profile: CostProfile,
    target: ModelWork,
    draft: ModelWork,
    n_past: float,
    longest: int,
    drafting: CostProfile | None = None,
) -> PairCosts:
    """Return what a target with a draft model costs, for passes of up to `longest` tokens; `drafting` are the draft
    model's cores (None: the same)."""
    return PairCosts(
        tuple(pass_cost(profile, target, n, n_past, beside=draft.weight_bytes).seconds for n in range(1, longest + 1)),
        pass_cost(drafting or profile, draft, 1, n_past, beside=target.weight_bytes).seconds,
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


Basis = Literal["measured", "data sheet", "computed", "estimate", "given"]
Kind = Literal["desktop", "server", "dual socket", "cloud", "apple", "here"]
Scenario = Literal["low", "value", "high"]
SCENARIOS: tuple[Scenario, ...] = ("low", "value", "high")
USUAL_GHZ = 3.0
"""Clock under load where it is not known."""
_BARRIERS, _PASS_BARRIERS = 20, 40  # per layer, and per pass beside its layers
_FULL, _MANY = 16, 112  # cores up to which rates add up, and at which `scaling` holds
_OFF_BATCH = 32  # tokens from which kernels compute at their full rate
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
    int8: Figure


class Usual(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of cpus.toml."""

    cpu: dict[str, _CPU]
    few: Figure
    f16: Figure
    attention: Figure
    typical: Figure
    decode: dict[Kind, Figure]
    scaling: Figure
    barrier_us: Figure


@functools.cache
def usual() -> Usual:
    """Return what is usual of CPUs and kinds of machines."""
    text = Path(__file__).with_name("cpus.toml").read_text(encoding="utf-8")
    return msgspec.convert(toml.loads(text), prepared(Usual))


def cpu_of(features: Collection[str]) -> str:
    """Return the name in cpus.toml whose rates are nearest to those of a CPU with these instructions."""
    return next((name for feature, name in _BY_FEATURE if feature in features), "arm64")


def int8_tops(
    cpu: str, cores: float, clock_ghz: float = USUAL_GHZ, *, sockets: int = 1, scenario: Scenario = "value"
) -> float:
    """Return tera-operations per second in products of quantized matrices, all cores together."""
    found, each = usual(), cores / sockets
    beyond = min(max(math.log(each / _FULL) / math.log(_MANY / _FULL), 0.0), 1.0) if each > _FULL else 0.0
    return cores * found.scaling.value**beyond * clock_ghz * found.cpu[cpu].int8.at(scenario) / 1e3


def usual_profile(
    cpu: str,
    cores: float,
    decode: float,
    *,
    clock_ghz: float = USUAL_GHZ,
    l3_bytes: float = 0.0,
    sockets: int = 1,
    scenario: Scenario = "value",
) -> CostProfile:
    """Return the profile of a machine with `cores` cores.

    Args:
        decode: bytes per second that decoding reads from memory; twice as many where the weights stay in L3.
        l3_bytes: of all L3 caches; 0: not known.
    """
    found = usual()
    full = int8_tops(cpu, cores, clock_ghz, sockets=sockets, scenario=scenario) * 1e12 / 2
    barrier = found.barrier_us.value * 1e-6 * math.log2(2 * cores) * sockets
    curve = ((1.0, found.few.value * full), (float(_OFF_BATCH), full))
    return CostProfile(
        bandwidth=((l3_bytes / 2, 2 * decode), (2 * l3_bytes, decode)) if l3_bytes else ((1.0, decode),),
        rates=(
            Rate("Q4_K", curve),
            Rate("Q8_0", curve),
            Rate("F16", tuple((n, found.f16.value * rate) for n, rate in curve)),
            Rate(KV, ((1.0, found.attention.value * full),)),
        ),
        pass_s=_PASS_BARRIERS * barrier,
        layer_s=_BARRIERS * barrier,
    )
