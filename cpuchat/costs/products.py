"""How fast kernels multiply weights of a tensor type, as measured with matrices that caches do not hold."""

from __future__ import annotations

from typing import Literal

import msgspec

from cpuchat.costs.model import interpolated

Kernels = Literal["cpuchat", "llama.cpp"]


class ProductRate(msgspec.Struct, frozen=True):
    """The speed of one tensor type ("Q4_K") with one set of kernels on the threads of a placement.

    `points` are pairs of tokens in a pass and bytes of weights per second, by rising tokens.
    """

    type: str
    kernels: Kernels
    points: tuple[tuple[float, float], ...]

    def rate(self, n_tokens: float) -> float:
        """Return bytes of weights per second in a pass: straight lines between the points on logarithmic scales. Longer
        passes take as much time per token as the last one."""
        return interpolated(self.points, n_tokens) * min(1.0, self.points[-1][0] / n_tokens)
