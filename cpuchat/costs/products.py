"""How fast kernels multiply weights of a tensor type, as measured with matrices that caches do not hold."""

from __future__ import annotations

import math
from itertools import pairwise

import msgspec

Points = tuple[tuple[float, float], ...]


class ProductRate(msgspec.Struct, frozen=True):
    """The speed of one tensor type ("Q4_K") on the threads of a placement.

    `points` are pairs of tokens in a pass and bytes of weights per second, by rising tokens. A saved one without any,
    or with others than positive numbers, is damaged (ValueError).
    """

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
