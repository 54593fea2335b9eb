"""What is to be expected of a model before it is loaded, in the few words that a list or a pane has room for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpuchat.telemetry import units
from cpuchat.telemetry.units import tokens

if TYPE_CHECKING:
    from cpuchat.models.prediction import Prediction


def verdict(outlook: Prediction) -> str:
    """`fits`, `tight`, `too large`; `≈ fits` where only the size of the file is known."""
    return outlook.verdict if outlook.exact else f"≈ {outlook.verdict}"


def speed(outlook: Prediction) -> str:
    """`≈41 tok/s`, `≈7.3 tok/s`, "" when it can't be told."""
    return f"≈{units.about(outlook.tok_s)} tok/s" if outlook.tok_s is not None else ""


def speed_and_why(outlook: Prediction) -> str:
    """The same, and what it rests on, or why there is none."""
    return ": ".join(filter(None, (speed(outlook), outlook.basis.removeprefix("≈ "))))


def context(outlook: Prediction) -> str:
    """`8k tokens; up to 32k would fit`; "" when that is not known."""
    if not outlook.n_ctx or not outlook.exact:
        return ""
    more = outlook.context_that_fits
    return f"{tokens(outlook.n_ctx)} tokens" + (f"; up to {tokens(more)} would fit" if more > outlook.n_ctx else "")
