"""Computes the profile of a machine from measured passes, those of a probe.

A probe brings, for every tensor type, passes over several numbers of tokens with weights that caches do not hold; and
of one narrow model, which takes little time for its products, passes with and without a long context.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

import msgspec
from msgspec.structs import replace

from cpuchat.costs.model import ACTIVATIONS, KV, CostProfile, PassPart, Points, ProductRate, parts, pass_cost
from cpuchat.costs.usual import usual
from cpuchat.protocol.model_info import ModelWork

_LONG = 1000  # tokens of context from which a pass tells what attention takes
_MIN = 0.2  # share of a pass that its largest part takes at least: measurements scatter
_ROUNDS = 2  # in which the parts of a pass are told from each other
_CACHES = 1e9  # more than a narrow model has: it stays in caches, also where their size is not known


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """A measured pass: `seconds` for `n_tokens` tokens after `n_past`; the other fields are those of `parts`.

    `cpu_wait`: share of them for which its threads waited for other programs."""

    work: ModelWork
    n_tokens: float
    seconds: float
    n_past: float = 0.0
    n_outputs: float | None = None
    cpu_wait: float = 0.0

    @property
    def parts(self) -> list[PassPart]:
        return parts(self.work, self.n_tokens, self.n_past, n_outputs=self.n_outputs)

    @property
    def main(self) -> PassPart:
        """Return the part that reads most."""
        return max(self.parts, key=lambda part: part.nbytes)


@lru_cache(maxsize=8)
def fit(start: CostProfile, seen: tuple[Observation, ...]) -> CostProfile:
    """Return the profile of the machine on which these passes were measured; `start` holds for what they do not tell.
    Takes 50 ms for those of a probe. Raises ValueError: a time that is not positive."""
    if any(not one.seconds > 0 for one in seen):
        raise ValueError("measured times must be positive")
    if not seen:
        return start
    short = [one for one in seen if one.n_past < _LONG] or list(seen)
    profile = start
    for _ in range(_ROUNDS):
        known = {one.type: one for one in profile.products} | {one.type: one for one in _products(profile, short)}
        profile = replace(profile, products=tuple(known.values()))
        profile = _beside_products(profile, short)
        profile = replace(profile, attention=_attention(seen) or start.attention)
    fastest = max((one.points[0][1] for one in profile.products), default=0.0)
    maximum = start.bandwidth / usual().decode["here"].value  # the read bandwidth
    return replace(profile, bandwidth=min(max(fastest, start.bandwidth), maximum))


def _products(profile: CostProfile, seen: Sequence[Observation]) -> list[ProductRate]:
    """Return the rates of the types that most of some model is of, by the passes of the largest such model. None counts
    as longer than one over more tokens: it was disturbed then."""
    by_type: dict[str, list[Observation]] = defaultdict(list)
    for one in seen:
        by_type[one.main.type].append(one)
    found: list[ProductRate] = []
    for kind, passes in by_type.items():
        largest = max(one.work.weight_bytes for one in passes)
        points: dict[float, float] = {}
        maximum = math.inf  # seconds per byte of a longer pass
        for one in sorted(passes, key=lambda one: one.n_tokens, reverse=True):
            if one.work.weight_bytes == largest:
                others = pass_cost(profile, one.work, one.n_tokens, one.n_past, n_outputs=one.n_outputs).seconds
                seconds = max(one.seconds - others + profile.seconds(one.main, largest), _MIN * one.seconds)
                maximum = min(maximum, seconds / one.main.nbytes)
                points[one.main.batch] = 1 / maximum
        found.append(ProductRate(kind, tuple(sorted(points.items()))))
    return found


def _beside_products(profile: CostProfile, seen: Sequence[Observation]) -> CostProfile:
    """Return the profile with what a layer and activations take, by the passes of the smallest model."""
    smallest = min(one.work.weight_bytes for one in seen)
    passes = sorted((one for one in seen if one.work.weight_bytes == smallest), key=lambda one: one.n_tokens)
    cached = replace(profile, layer_s=0.0, activations=0.0, l3_bytes=_CACHES)
    one, many = passes[0], passes[-1]

    def left(one: Observation) -> float:
        cost = pass_cost(cached, one.work, one.n_tokens, one.n_past, n_outputs=one.n_outputs)
        return max(one.seconds - cost.seconds, 0.0)

    fixed = max(left(one), _MIN * one.seconds)
    between = sum(part.madds for part in many.parts if part.type == ACTIVATIONS)
    rest = left(many) - fixed
    return replace(
        profile,
        layer_s=fixed / pass_cost(replace(profile, layer_s=1.0), one.work).fixed,
        activations=between / rest if rest > 0 else 0.0,
    )


def _attention(seen: Sequence[Observation]) -> Points:
    """Return what attention computes, by passes of a model with and without a long context."""
    found: dict[float, float] = {}
    for far in (one for one in seen if one.n_past >= _LONG):
        near = next(
            (one for one in seen if one.n_past < _LONG and (one.work, one.n_tokens) == (far.work, far.n_tokens)), None
        )
        if near is not None and far.seconds > near.seconds:
            madds, before = (sum(part.madds for part in one.parts if part.type == KV) for one in (far, near))
            found[far.n_tokens] = (madds - before) / (far.seconds - near.seconds)
    return tuple(sorted(found.items()))
