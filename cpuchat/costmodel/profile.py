"""Describes a machine as far as the time of a pass depends on it."""

from __future__ import annotations

import bisect
import math

import msgspec

from cpuchat.costmodel.work import ACTIVATIONS, KV, ROUTED

Points = tuple[tuple[float, float], ...]

BITS = {
    "F32": 32.0, "F16": 16.0, "BF16": 16.0, "Q8_0": 8.5, "Q8_K": 9.1, "Q6_K": 6.56, "Q5_0": 5.5, "Q5_1": 6.0,
    "Q5_K": 5.5, "Q4_0": 4.5, "Q4_1": 5.0, "Q4_K": 4.5, "IQ4_NL": 4.5, "IQ4_XS": 4.25, "MXFP4": 4.25, "Q3_K": 3.44,
    "Q2_K": 2.63, KV: 16.0,
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
