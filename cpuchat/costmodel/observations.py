"""Measured passes, and the profile fitted to them, as plain data: without numpy, which no start of the app loads."""

from __future__ import annotations

import msgspec

from cpuchat.costmodel.profile import CostProfile
from cpuchat.costmodel.work import ModelWork

KNOTS = (1, 2, 4, 5, 8, 12, 16, 32, 128, 256)
"""Tokens of the passes to measure: kernels change between 1 and 32 (8 tokens can cost less than 6); above 128 the rate
hardly does."""


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
