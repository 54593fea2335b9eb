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

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from cpuchat.costs.model import CostProfile, Rate, parts, shares
from cpuchat.costs.observations import Fitted, Observation

NOISE = 0.05
"""Standard deviation of a measurement of weight 1, relative: repeated passes on quiet cores."""
_TOLERANCE = {
    "pass": 1.5, "layer": 1.5, "bandwidth": 1.0, "memory": 0.2, "rate": 1.0, "overlap": 1.0, "model": 0.25,
}  # fmt: skip
"""Standard deviations of the start, as logarithms: e^1.5 = 4.5 times more or less. "memory": of the bandwidth of the
largest weights, which was measured by reading; so a small model that reaches little of it is explained by its fixed
costs. "model": by how much chats with one model differ from what a probe says of it (kernels, shapes of matrices, other
load)."""
_QUIET = 0.5  # weight beyond which nothing else ran
_APART = 0.5
"""By how much the rates at neighboring points move apart, as a logarithm: what was not measured follows."""
_OTHERS = 3  # parameters before those of the bandwidth
_HUBER = 2.0  # standard deviations from which a measurement counts as an outlier
_SMALLEST_S = 1e-7  # of fixed costs, so that they have a logarithm
_ROUNDS, _TRIES, _ENOUGH = 200, 400, 1e-6
"""Accepted steps, steps at all, and the share by which a step lowers the loss at the end."""
_LONGEST_STEP = 1.0
"""Of a parameter in a round, as a logarithm: where computing hides behind reading it hardly matters, and one step would
move it by any factor. Back there, only the start would pull, a little each round."""
_LARGEST_OVERLAP = 20.0

Vector = np.ndarray[Any, np.dtype[np.float64]]


def fit(start: CostProfile, observations: Iterable[Observation]) -> Fitted:
    """Return the profile that explains the measured passes best.

    Args:
        start: the values before, and which points of the bandwidth and the rates there are.

    Raises:
        ValueError: a measurement that is not positive.
    """
    seen = list(observations)
    if any(not one.seconds > 0 or one.weight < 0 for one in seen):
        raise ValueError("measured times must be positive, weights not negative")
    if not seen:
        return Fitted(start, error=0.0, n=0)
    passes = _Passes(start, seen)
    measured = np.log([one.seconds for one in seen])
    precision = np.sqrt([one.weight for one in seen]) / NOISE
    names = list(dict.fromkeys(one.model for one in seen if one.model))
    own = np.array([[one.model == name for name in names] for one in seen], np.float64).reshape(len(seen), len(names))
    known = _vector(start)
    begin = np.concatenate([known, np.zeros(len(names))])
    tolerance = np.concatenate([_tolerances(start), np.full(len(names), _TOLERANCE["model"])])
    steps = _steps(start)

    def residuals(values: Vector) -> tuple[Vector, Vector]:
        """Return the residuals of the passes, of the start and of neighboring points, and their derivatives."""
        logs, slopes = passes.logs(values[: len(known)])
        off = (logs + own @ values[len(known) :] - measured) * precision
        return np.concatenate([off, fixed @ (values - begin)]), np.vstack(
            [np.hstack([slopes, own]) * precision[:, None], fixed]
        )

    fixed = np.vstack([np.diag(1 / tolerance), np.pad(steps / _APART, ((0, 0), (0, len(names))))])
    values = _minimized(residuals, begin, len(seen))
    off = np.abs(np.expm1(residuals(values)[0][: len(seen)] / np.maximum(precision, 1e-9)))
    quiet = off[np.array([one.weight > _QUIET for one in seen])]
    factors = dict(zip(names, np.exp(values[len(known) :]).tolist(), strict=True))
    return Fitted(
        _profile(start, values[: len(known)]),
        error=float(np.median(off)),
        n=len(seen),
        factors=factors,
        error_90=float(np.quantile(quiet if len(quiet) else off, 0.9)),
        farthest=float(np.exp(np.abs(values - begin)[_OTHERS : len(known)].max(initial=0.0))),
    )


class _Passes:
    """The parts of measured passes as arrays, so that the time of all passes is one expression: rates between two
    points are straight lines in logarithms, whose shares do not change while the rates are fitted."""

    def __init__(self, like: CostProfile, seen: Sequence[Observation]) -> None:
        n_known = len(_vector(like))
        self.n_sets = len(like.bandwidth)
        first: dict[Rate, int] = {}
        at = _OTHERS + len(like.bandwidth)
        for rate in like.rates:
            first[rate] = at
            at += len(rate.points)
        self.layers = np.array([one.work.n_layer for one in seen], np.float64)
        self.reading = np.zeros((len(seen), n_known))
        todo = [parts(one.work, one.n_tokens, one.n_past, n_outputs=one.n_outputs) for one in seen]
        sets = [one.work.weight_bytes for one in seen]
        rates = [
            (number, part, like.rates_of(part.type, sets[number]))
            for number, found in enumerate(todo)
            for part in found
        ]
        every = [one for one in rates if one[2]]
        self.number = np.array([number for number, _, _ in every])
        self.nbytes = np.array([part.nbytes for _, part, _ in every], np.float64)
        self.madds = np.array([part.madds for _, part, _ in every], np.float64)
        self.members = (self.number == np.arange(len(seen))[:, None]).astype(np.float64)
        self.computing = np.zeros((len(every), n_known))
        for number, one in enumerate(seen):
            for index, share in shares(like.bandwidth, one.work.weight_bytes):
                self.reading[number, _OTHERS + index] = share
        for row, (_, part, mixed) in enumerate(every):
            for rate, of_rate in mixed:
                for index, share in shares(rate.points, part.batch):
                    self.computing[row, first[rate] + index] += of_rate * share  # one rate may count twice

    def logs(self, values: Vector) -> tuple[Vector, Vector]:
        """Return the logarithms of the seconds of each pass with these parameters, as `passes.cost_of`; and their
        derivatives by the parameters."""
        sets = slice(_OTHERS, _OTHERS + self.n_sets)
        lasting = _falling(values[sets])
        reading = self.reading.copy()
        reading[:, sets] = 0.0
        np.add.at(reading.T, _OTHERS + lasting, self.reading[:, sets].T)
        read = self.nbytes / np.exp(reading @ values)[self.number]
        compute = self.madds / np.exp(self.computing @ values)
        longer, shorter = np.maximum(read, compute), np.minimum(read, compute)
        beyond = min(float(np.exp(values[2])), _LARGEST_OVERLAP)
        overlap, share = 1 + beyond, shorter / np.maximum(longer, 1e-30)
        both = 1 + share**overlap
        together = longer * both ** (1 / overlap)
        of_read = together * np.where(read >= compute, 1.0, share**overlap) / both
        fixed = np.exp(values[0]), np.exp(values[1]) * self.layers
        seconds = fixed[0] + fixed[1] + np.bincount(self.number, together, len(self.layers))
        slopes = -self.members @ ((together - of_read)[:, None] * self.computing)
        slopes -= np.bincount(self.number, of_read, len(self.layers))[:, None] * reading
        slopes[:, 0] += fixed[0]
        slopes[:, 1] += fixed[1]
        if beyond < _LARGEST_OVERLAP:
            by_overlap = share**overlap * np.log(np.maximum(share, 1e-30)) / both - np.log(both) / overlap
            slopes[:, 2] += np.bincount(self.number, together * by_overlap / overlap * beyond, len(self.layers))
        return np.log(seconds), slopes / seconds[:, None]


def _falling(bandwidths: Vector) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Return which of the bandwidths counts for each, so that they do not rise with the bytes of the weights: what is
    slower about few of them is their type."""
    found = np.arange(len(bandwidths))
    for index in range(len(bandwidths) - 2, -1, -1):
        if bandwidths[found[index + 1]] > bandwidths[index]:
            found[index] = found[index + 1]
    return found


def _steps(profile: CostProfile) -> Vector:
    """Return a matrix of the steps between neighboring points: what moves one of them moves the next ones, too."""
    rows: list[Vector] = []
    at = _OTHERS
    for points in (profile.bandwidth, *(rate.points for rate in profile.rates)):
        for index in range(at, at + len(points) - 1):
            row = np.zeros(len(_vector(profile)))
            row[index], row[index + 1] = 1.0, -1.0
            rows.append(row)
        at += len(points)
    return np.array(rows).reshape(len(rows), len(_vector(profile)))


def _minimized(residuals: Callable[[Vector], tuple[Vector, Vector]], begin: Vector, n_measured: int) -> Vector:
    """Return the values with the least sum of squares, the first `n_measured` residuals with Huber weights."""
    values, damping, rounds = begin.copy(), 1e-2, 0
    now, jacobian = residuals(values)
    for _ in range(_TRIES):
        weights = np.ones(len(now))
        weights[:n_measured] = np.minimum(1.0, _HUBER / np.maximum(np.abs(now[:n_measured]), 1e-9))
        normal = jacobian.T @ (weights[:, None] * jacobian)
        before = _loss(now, n_measured)
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -jacobian.T @ (weights * now))
        tried = values + np.clip(step, -_LONGEST_STEP, _LONGEST_STEP)
        then, slopes = residuals(tried)
        if (loss := _loss(then, n_measured)) < before:
            values, now, jacobian, damping, rounds = tried, then, slopes, max(damping / 5, 1e-9), rounds + 1
            if before - loss < _ENOUGH * before or rounds == _ROUNDS:
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


def _vector(profile: CostProfile) -> Vector:
    """Return the parameters of a profile as logarithms."""
    found = [max(profile.pass_s, _SMALLEST_S), max(profile.layer_s, _SMALLEST_S), max(profile.overlap - 1, 1e-2)]
    found += [rate for _, rate in profile.bandwidth]
    found += [value for rate in profile.rates for _, value in rate.points]
    return np.log(np.array(found, np.float64))


def _tolerances(profile: CostProfile) -> Vector:
    names = ["pass", "layer", "overlap", *("bandwidth" for _ in profile.bandwidth[1:]), "memory"]
    names += ["rate" for rate in profile.rates for _ in rate.points]
    return np.array([_TOLERANCE[name] for name in names])


def _profile(like: CostProfile, values: Vector) -> CostProfile:
    """Return the profile with these parameters, at the points of `like`."""
    pass_s, layer_s, beyond, *rest = np.exp(values).tolist()
    lasting = _falling(values[_OTHERS : _OTHERS + len(like.bandwidth)])
    bandwidth = tuple((at, rest[index]) for (at, _), index in zip(like.bandwidth, lasting, strict=True))
    left = iter(rest[len(bandwidth) :])
    rates = tuple(Rate(one.type, tuple((at, next(left)) for at, _ in one.points), one.cached) for one in like.rates)
    return CostProfile(
        bandwidth=bandwidth,
        rates=rates,
        pass_s=pass_s,
        layer_s=layer_s,
        overlap=1 + min(beyond, _LARGEST_OVERLAP),
    )
