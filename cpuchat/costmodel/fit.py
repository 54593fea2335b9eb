"""Fits the profile of a machine to measured passes: those of a probe, or of real chats.

The fit is a maximum a posteriori estimate: every parameter starts from a value with a tolerance, every measurement
pulls with its weight. So what was not measured keeps its start, and one strange chat moves little. All parameters and
times are fitted as logarithms (nothing becomes negative, and errors are relative), by Levenberg-Marquardt steps with
Huber weights: passes that were disturbed by other load count less.

A probe should bring, on quiet cores: models of at least two numbers of layers (for the cost of a layer) and, for every
tensor type, passes over `KNOTS` tokens, of weights larger than the caches and smaller. Types have kernels of their own:
Q5_0, which replaces Q4_K in rows that 256 does not divide, is slower than Q4_K.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np

from cpuchat.costmodel.passes import cost_of
from cpuchat.costmodel.profile import CostProfile, Rate
from cpuchat.costmodel.work import ModelWork, parts

KNOTS = (1, 2, 4, 5, 8, 12, 16, 32, 128, 512)
"""Tokens of the passes to measure: kernels change between 1 and 32 (8 tokens can cost less than 6); above 128 the rate
hardly does."""

NOISE = 0.05
"""Standard deviation of a measurement of weight 1, relative: repeated passes on quiet cores."""
_TOLERANCE = {"pass": 1.5, "layer": 1.5, "bandwidth": 1.0, "rate": 1.0, "overlap": 1.0, "model": 0.25}
"""Standard deviations of the start, as logarithms: e^1.5 = 4.5 times more or less. "model": by how much chats with one
model differ from what a probe says of it (kernels, shapes of matrices, other load)."""
_HUBER = 2.0  # standard deviations from which a measurement counts as an outlier
_SMALLEST_S = 1e-7  # of fixed costs, so that they have a logarithm
_ROUNDS, _ENOUGH = 60, 1e-6
_LARGEST_OVERLAP = 20.0

Vector = np.ndarray[Any, np.dtype[np.float64]]


class Observation(msgspec.Struct, frozen=True, kw_only=True):
    """A measured pass: `seconds` for `n_tokens` tokens after `n_past`; the other fields are those of `parts`.

    `weight` 1 is one careful measurement of a probe; the mean of an answer of a real chat deserves about as much where
    nothing else ran, and less beside other load. `model` names what a chat ran with (its fingerprint; "" in a probe):
    it gets a factor of its own, so that what is odd about one model does not change the others.
    """

    work: ModelWork
    n_tokens: float
    seconds: float
    n_past: float = 0.0
    n_outputs: float | None = None
    weight: float = 1.0
    model: str = ""


class Fitted(msgspec.Struct, frozen=True):
    """The fitted profile; `error` is the median of |predicted / measured - 1| over the `n` observations.

    `factors`: by how much longer than by the profile each named model takes.
    """

    profile: CostProfile
    error: float
    n: int
    factors: dict[str, float] = {}


def fit(start: CostProfile, observations: Iterable[Observation], *, trust: float = 1.0) -> Fitted:
    """Return the profile that explains the measured passes best.

    Args:
        start: the values before, and which points of the bandwidth and the rates there are.
        trust: how much tighter than that of a guess the tolerance of `start` is; above 1 for a measured profile.

    Raises:
        ValueError: a measurement that is not positive.
    """
    seen = list(observations)
    if any(not one.seconds > 0 or one.weight < 0 for one in seen):
        raise ValueError("measured times must be positive, weights not negative")
    if not seen:
        return Fitted(start, 0.0, 0)
    todo = [parts(one.work, one.n_tokens, one.n_past, n_outputs=one.n_outputs) for one in seen]
    sets = [one.work.weight_bytes for one in seen]
    layers = [one.work.n_layer for one in seen]
    measured = np.log([one.seconds for one in seen])
    precision = np.sqrt([one.weight for one in seen]) / NOISE
    names = list(dict.fromkeys(one.model for one in seen if one.model))
    own = np.array([[one.model == name for name in names] for one in seen], np.float64).reshape(len(seen), len(names))
    known = _vector(start)
    begin = np.concatenate([known, np.zeros(len(names))])
    tolerance = np.concatenate([_tolerances(start) / trust, np.full(len(names), _TOLERANCE["model"])])

    def predicted(values: Vector) -> Vector:
        profile = _profile(start, values[: len(known)])
        every = zip(todo, layers, sets, strict=True)
        return np.log([cost_of(profile, one, n, size).seconds for one, n, size in every]) + own @ values[len(known) :]

    def residuals(values: Vector) -> Vector:
        return np.concatenate([(predicted(values) - measured) * precision, (values - begin) / tolerance])

    values = _minimized(residuals, begin, len(seen))
    error = np.median(np.abs(np.expm1(predicted(values) - measured)))
    factors = dict(zip(names, np.exp(values[len(known) :]).tolist(), strict=True))
    return Fitted(_profile(start, values[: len(known)]), float(error), len(seen), factors)


def _minimized(residuals: Any, begin: Vector, n_measured: int) -> Vector:
    """Return the values with the least sum of squares, the first `n_measured` residuals with Huber weights."""
    values, damping = begin.copy(), 1e-2
    now = residuals(values)
    for _ in range(_ROUNDS):
        jacobian = _jacobian(residuals, values, now)
        weights = np.ones(len(now))
        weights[:n_measured] = np.minimum(1.0, _HUBER / np.maximum(np.abs(now[:n_measured]), 1e-9))
        normal = jacobian.T @ (weights[:, None] * jacobian)
        slope = jacobian.T @ (weights * now)
        before = _loss(now, n_measured)
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -slope)
        tried = residuals(values + step)
        if _loss(tried, n_measured) < before:
            values, now, damping = values + step, tried, max(damping / 5, 1e-9)
            if before - _loss(now, n_measured) < _ENOUGH * before:
                break
        elif damping > 1e6:
            break
        else:
            damping *= 8
    return values


def _loss(residuals: Vector, n_measured: int) -> float:
    size = np.abs(residuals[:n_measured])
    huber = np.where(size <= _HUBER, size**2, 2 * _HUBER * size - _HUBER**2)
    return float(huber.sum() + (residuals[n_measured:] ** 2).sum())


def _jacobian(residuals: Any, values: Vector, now: Vector, step: float = 1e-4) -> Vector:
    columns = []
    for index in range(len(values)):
        moved = values.copy()
        moved[index] += step
        columns.append((residuals(moved) - now) / step)
    return np.stack(columns, axis=1)


def _vector(profile: CostProfile) -> Vector:
    """Return the parameters of a profile as logarithms."""
    found = [max(profile.pass_s, _SMALLEST_S), max(profile.layer_s, _SMALLEST_S), max(profile.overlap - 1, 1e-2)]
    found += [rate for _, rate in profile.bandwidth]
    found += [value for rate in profile.rates for _, value in rate.points]
    return np.log(np.array(found, np.float64))


def _tolerances(profile: CostProfile) -> Vector:
    names = ["pass", "layer", "overlap", *("bandwidth" for _ in profile.bandwidth)]
    names += ["rate" for rate in profile.rates for _ in rate.points]
    return np.array([_TOLERANCE[name] for name in names])


def _profile(like: CostProfile, values: Vector) -> CostProfile:
    """Return the profile with these parameters, at the points of `like`."""
    pass_s, layer_s, beyond, *rest = np.exp(values).tolist()
    bandwidth = tuple((at, rate) for (at, _), rate in zip(like.bandwidth, rest, strict=False))
    left = iter(rest[len(bandwidth) :])
    rates = tuple(Rate(rate.type, tuple((at, next(left)) for at, _ in rate.points)) for rate in like.rates)
    return CostProfile(
        bandwidth=bandwidth,
        rates=rates,
        pass_s=pass_s,
        layer_s=layer_s,
        overlap=1 + min(beyond, _LARGEST_OVERLAP),
    )


def knots(types: Sequence[str], rate: float) -> tuple[Rate, ...]:
    """Return rates at `KNOTS` to start a fit from."""
    return tuple(Rate(kind, tuple((n, rate) for n in KNOTS)) for kind in types)
