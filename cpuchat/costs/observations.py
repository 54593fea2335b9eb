"""Measured passes, and the profile fitted to them, as plain data: without numpy, which no start of the app loads."""

from __future__ import annotations

import msgspec

from cpuchat.costs.model import CostProfile
from cpuchat.protocol.model_info import ModelWork

KNOTS = (1, 2, 4, 5, 8, 12, 16, 32, 128, 256)
"""Tokens of the passes to measure: kernels change between 1 and 32 (8 tokens can cost less than 6); above 128 the rate
hardly does."""


_MOST_OFF, _FARTHEST = 0.5, 100.0
"""Limits of a plausible fit: on two cores of a Xeon nine tenths of the passes are within 5 %, and a rate is at most 15
times its start. Where a search ended far from any optimum, it was 2,500 times."""


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
    """The fitted profile; `error` is the median of |predicted / measured - 1| over the `n` observations, `error_90` the
    90th percentile over those that nothing disturbed.

    `factors`: by how much longer than by the profile each named model takes. `farthest`: the largest factor between a
    fitted rate or bandwidth and its start.
    """

    profile: CostProfile
    error: float
    n: int
    factors: dict[str, float] = {}
    error_90: float = 0.0
    farthest: float = 1.0

    @property
    def is_plausible(self) -> bool:
        """Return whether it explains the passes, by rates that such a machine may have."""
        return self.error_90 <= _MOST_OFF and self.farthest <= _FARTHEST
