"""The statistics of two models' next-token distributions over the same tokens.

Names and definitions are llama-perplexity's (tools/perplexity/README.md of llama.cpp): P is the base model's
distribution, Q the other's, `token` the one that the text has next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Self

import msgspec
import numpy as np

from cpuchat.measure.difference import student

Z95 = 1.959964
"""Two-sided 95 % quantile of the normal distribution."""
_Z_RANKED = 2.241403
"""That of 97.5 %: two figures may tell files apart, and 5 % is the chance that either does by accident."""
MIN_POSITIONS = 100
"""Fewer scored positions than this say nothing about a 99.9 % percentile, and little about anything."""


class Arrays(msgspec.Struct, frozen=True):
    """Arrays with an entry for each position."""

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in cls.__struct_fields__))


class Scores(Arrays, frozen=True):
    """One array per figure with an entry for each scored position, float32 of shape (n,).

    `kld` is KL(P‖Q) in nats, `base_nll` and `other_nll` are −ln of the probability of the text's token, `same_top` is 1
    where both models' most probable tokens are the same."""

    kld: np.ndarray
    base_nll: np.ndarray
    other_nll: np.ndarray
    same_top: np.ndarray

    def __len__(self) -> int:
        return len(self.kld)

    def packed(self) -> dict[str, bytes]:
        """Return the arrays by name, little-endian, as messages and files have them."""
        return {name: getattr(self, name).astype("<f4").tobytes() for name in self.__struct_fields__}


class Interval(msgspec.Struct, frozen=True):
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float


class Estimate(msgspec.Struct, frozen=True):
    """A mean with its standard error (of one window alone infinite), and half of its 95 % interval."""

    value: float
    error: float
    half: float

    @property
    def interval(self) -> Interval:
        return Interval(self.value, self.value - self.half, self.value + self.half)


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `summarize` over `n` positions.

    `same_top` is a share (0-1), `kld_*` are nats, `rms_dp` is the root mean square change of the probability of the
    text's token (0-1), `ppl_base` and `ppl_other` perplexities, `ln_ppl_ratio` is ln(PPL(Q)/PPL(P))."""

    n: int
    same_top: Interval
    kld: Estimate
    kld_median: float
    kld_99: float
    kld_999: float
    ppl_base: float
    ppl_other: float
    ln_ppl_ratio: Estimate
    rms_dp: Estimate


def summarize(windows: Sequence[Scores]) -> Summary:
    """Summarize the scored positions of at least one window. Standard errors are clustered by window: positions of one
    text go wrong together. llama-perplexity takes them as independent, and prints less than half of the error for
    KLD."""
    scores = Scores.joined(windows)
    kld, base, other = (array.astype(np.float64) for array in (scores.kld, scores.base_nll, scores.other_nll))
    sizes = [len(window) for window in windows]
    dp2 = _clustered((np.exp(-other) - np.exp(-base)) ** 2, sizes)
    rms = math.sqrt(dp2.value)
    halved = 2 * rms or math.inf  # delta method
    median, p99, p999 = np.percentile(kld, (50, 99, 99.9))
    return Summary(
        n=len(scores),
        same_top=clustered_share(scores.same_top, sizes),
        kld=_clustered(kld, sizes),
        kld_median=float(median),
        kld_99=float(p99),
        kld_999=float(p999),
        ppl_base=math.exp(base.mean()),
        ppl_other=math.exp(other.mean()),
        ln_ppl_ratio=_clustered(other - base, sizes),
        rms_dp=Estimate(rms, dp2.error / halved, dp2.half / halved) if len(sizes) > 1 else Estimate(rms, *_UNKNOWN),
    )


def wilson(p: float, n: float) -> Interval:
    """Return the share `p` of `n` with its 95 % score interval (Wilson 1927), which stays within 0 to 1."""
    z2 = Z95 * Z95
    middle = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return Interval(p, max(middle - half, 0.0), min(middle + half, 1.0))


def indistinguishable(a: Sequence[Scores], b: Sequence[Scores]) -> bool:
    """Return whether two files, measured against the same base over the same windows, must not be ranked: neither equal
    top tokens nor mean KLD differ. Among nearly lossless files KLD follows no benchmark (arXiv 2606.19558)."""
    sizes = [len(window) for window in a]
    if len(sizes) < 2:
        return True
    for name in ("kld", "same_top"):
        pairs = [getattr(one, name).astype(np.float64) - getattr(other, name) for one, other in zip(a, b, strict=True)]
        found = _clustered(np.concatenate(pairs), sizes, _Z_RANKED)
        if abs(found.value) > found.half:
            return False
    return True


_UNKNOWN = math.inf, math.inf  # error, and half of the interval, of one window


def _clustered(values: np.ndarray, sizes: Sequence[int], z: float = Z95) -> Estimate:
    """Return the mean over positions; `sizes` are those of the windows, in the order of `values`.

    The error is that of a ratio of sums over clusters (Cochran, Sampling Techniques, 1977, 2.29 and 11.4)."""
    n, windows = len(values), len(sizes)
    mean = float(values.mean())
    if windows < 2:
        return Estimate(mean, *_UNKNOWN)
    sums = np.add.reduceat(values - mean, np.cumsum([0, *sizes[:-1]]))
    error = math.sqrt(windows / (windows - 1) * float(sums @ sums)) / n
    return Estimate(mean, error, student(z, windows - 1) * error)


def clustered_share(same: np.ndarray, sizes: Sequence[int]) -> Interval:
    """Return a share (of `same`, 0 or 1) with the interval of as many independent positions as would have the same
    standard error; `sizes` are those of the clusters, in order."""
    found = _clustered(same.astype(np.float64), sizes)
    p, n = found.value, len(same)
    if len(sizes) < 2:
        return Interval(p, 0.0, 1.0)
    alone = p * (1 - p) / n
    wider = max(1.0, (found.half / Z95) ** 2 / alone) if alone else 1.0
    return wilson(p, n / wider)
