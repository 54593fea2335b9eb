"""The statistics of two models' next-token distributions over the same tokens.

Names and definitions are llama-perplexity's (tools/perplexity/README.md of llama.cpp): P is the base model's
distribution, Q the other's, `token` the one that the text has next. Published losses by quantization were measured on
other texts, mostly Wikitext-2, so they give only the order of magnitude.
"""

from __future__ import annotations

import importlib.resources
import math
import re
from collections.abc import Iterator, Sequence
from typing import Self

import msgspec
import numpy as np

from cpuchat.base import toml
from cpuchat.models.file_names import without_prefix

Z95 = 1.959964
"""Two-sided 95 % quantile of the normal distribution."""
MIN_POSITIONS = 100
"""Fewer scored positions than this say nothing about a 99.9 % percentile, and little about anything."""


class Scores(msgspec.Struct, frozen=True):
    """One array per figure with an entry for each scored position, float32 of shape (n,).

    `kld` is KL(P‖Q) in nats, `base_nll` and `other_nll` are −ln of the probability of the text's token, `same_top` is 1
    where both models' most probable tokens are the same.
    """

    kld: np.ndarray
    base_nll: np.ndarray
    other_nll: np.ndarray
    same_top: np.ndarray

    def __len__(self) -> int:
        return len(self.kld)

    @classmethod
    def joined(cls, parts: Sequence[Scores]) -> Self:
        """Concatenate; no parts give arrays of length 0."""
        return cls(
            *(np.concatenate([getattr(part, name) for part in parts] or [_EMPTY]) for name in cls.__struct_fields__)
        )


_EMPTY = np.empty(0, np.float32)


class Interval(msgspec.Struct, frozen=True):
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float

    def overlaps(self, other: Interval) -> bool:
        return self.low <= other.high and other.low <= self.high


class Estimate(msgspec.Struct, frozen=True):
    """A mean with its standard error."""

    value: float
    error: float

    @property
    def interval(self) -> Interval:
        return Interval(self.value, self.value - Z95 * self.error, self.value + Z95 * self.error)


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `summarize` over `n` positions.

    `same_top` is a share (0-1), `kld_*` are nats, `rms_dp` is the root mean square change of the probability of the
    text's token (0-1), `ppl_base` and `ppl_other` perplexities, `ln_ppl_ratio` is ln(PPL(Q)/PPL(P)).
    """

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


def summarize(scores: Scores) -> Summary:
    """Summarize at least one position.

    Standard errors take positions as independent, as llama-perplexity's do, so that both can be compared.
    """
    n = len(scores)
    kld, base, other = (array.astype(np.float64) for array in (scores.kld, scores.base_nll, scores.other_nll))
    dp2 = (np.exp(-other) - np.exp(-base)) ** 2
    mean_dp2 = _mean(dp2)
    rms = math.sqrt(mean_dp2.value)
    median, p99, p999 = np.percentile(kld, (50, 99, 99.9))
    return Summary(
        n=n,
        same_top=wilson(int(np.count_nonzero(scores.same_top)), n),
        kld=_mean(kld),
        kld_median=float(median),
        kld_99=float(p99),
        kld_999=float(p999),
        ppl_base=math.exp(base.mean()),
        ppl_other=math.exp(other.mean()),
        ln_ppl_ratio=_mean(other - base),
        rms_dp=Estimate(rms, mean_dp2.error / (2 * rms) if rms else 0.0),  # delta method
    )


def wilson(successes: int, n: int) -> Interval:
    """Return a share with its 95 % score interval (Wilson 1927), which stays within 0 to 1."""
    p, z2 = successes / n, Z95 * Z95
    middle = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return Interval(p, max(middle - half, 0.0), min(middle + half, 1.0))


def indistinguishable(a: Summary, b: Summary) -> bool:
    """Return whether two files, measured against the same base, must not be ranked: the intervals of both the share
    of equal top tokens and the mean KLD overlap. Among nearly lossless files KLD does not follow benchmark scores
    at all (arXiv 2606.19558)."""
    return a.same_top.overlaps(b.same_top) and a.kld.interval.overlaps(b.kld.interval)


def _mean(values: np.ndarray) -> Estimate:
    n = len(values)
    return Estimate(float(values.mean()), float(values.std(ddof=1) / math.sqrt(n)) if n > 1 else math.inf)


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """Published losses of a quantization against F16 or BF16. None: not published.

    `kld_mean` and `kld_999` (the 99.9th percentile) in nats, `same_top` in percent of the tokens, `ppl_delta` as PPL
    minus the base's. `imatrix`: quantized with an importance matrix; None: not stated. `same_family`: it is about the
    model that was asked for, not another one in the same quantization.
    """

    model: str
    quantization: str
    kld_mean: float
    kld_999: float | None = None
    same_top: float | None = None
    ppl_delta: float | None = None
    imatrix: bool | None = None
    source: str
    same_family: bool = False


# In names of files, repositories and headers: "Meta-Llama-3-8B-Instruct", "Llama 2 7B Chat", "llama3:8b". Llama 3.1 and
# Qwen3-4B of April 2025 were retrained and are different models.
_MATCHERS = {
    "Llama-3-8B": re.compile(r"(?i)llama[-_. ]?3[-_.: ]8b(?![a-z0-9])"),
    "Llama-2-7B": re.compile(r"(?i)llama[-_. ]?2[-_.: ]7b(?![a-z0-9])"),
    "Qwen3-4B-2507": re.compile(r"(?i)qwen[-_. ]?3[-_.: ]4b(?:[-_. ](?:instruct|thinking))?[-_. ]2507(?!\d)"),
    "Qwen3.6-27B": re.compile(r"(?i)qwen[-_. ]?3\.6[-_.: ]27b(?![a-z0-9])"),
}


def _read() -> Iterator[Published]:
    text = (importlib.resources.files("cpuchat.quality") / "published.toml").read_text(encoding="utf-8")
    for table in toml.loads(text)["table"]:
        columns, rows = table.pop("columns"), table.pop("rows")
        for row in rows:  # the last column may be missing
            yield msgspec.convert({**table, **dict(zip(columns, row, strict=False))}, Published)


PUBLISHED = tuple(_read())


def published_for(name: str, quantization: str) -> list[Published]:
    """Return the published values of a quantization, those of the same family first, marked `same_family`.

    Args:
        name: of the model, its file or its repository; the quantization in it is ignored.
        quantization: `Q4_K_M`, in any case; `UD-` and `QAT-` formats are other ones, so none is published for them.
    """
    wanted = quantization.upper()
    if without_prefix(wanted) != wanted:
        return []
    family = next((model for model, matcher in _MATCHERS.items() if matcher.search(name)), "")
    found = [
        msgspec.structs.replace(row, same_family=row.model == family) for row in PUBLISHED if row.quantization == wanted
    ]
    return sorted(found, key=lambda row: not row.same_family)
