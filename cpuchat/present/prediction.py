"""Formats a predicted fit and speed in the few words that a list or a pane has room for."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from cpuchat.telemetry.units import about, tokens

if TYPE_CHECKING:
    from cpuchat.models.catalog import CatalogModel
    from cpuchat.models.machine import Machine
    from cpuchat.models.prediction import Prediction

_PURPOSES = MappingProxyType(
    {"chat": "chat", "code": "code", "reasoning": "reasoning at length", "draft": "draft model, not for chat"}
)


def purpose(model: CatalogModel) -> str:
    """Return the purpose of a catalog model."""
    return _PURPOSES[model.use]


def verdict(prediction: Prediction | None) -> str:
    """Return `fits`, `tight`, `with RPC`, `too large`, or `too slow` to be of use; "" when unknown."""
    if prediction is None:
        return ""
    return "too slow" if prediction.too_slow else prediction.verdict


def fit(prediction: Prediction) -> str:
    """Return the verdict; `≈ fits` where only the file size is known."""
    return verdict(prediction) if prediction.exact else f"≈ {verdict(prediction)}"


def speed(prediction: Prediction | None) -> str:
    """`≈41 tok/s`, `≈7.3 tok/s`; "" when unknown."""
    return f"≈{about(prediction.tok_s)} tok/s" if prediction is not None and prediction.tok_s is not None else ""


def speed_with_basis(prediction: Prediction | None) -> str:
    """Return the speed and what it is based on, or why there is none."""
    if prediction is None:
        return ""
    return f"{speed(prediction) or 'n/a'}: {prediction.basis.removeprefix('≈ ')}"


def context(prediction: Prediction) -> str:
    """`8k tokens (up to 32k fit)`; "" when unknown."""
    if not prediction.n_ctx or not prediction.exact:
        return ""
    more = prediction.context_that_fits
    return f"{tokens(prediction.n_ctx)} tokens" + (f" (up to {tokens(more)} fit)" if more > prediction.n_ctx else "")


def doubt(machine: Machine | None, key: str) -> str:
    """Return why predicted speeds are missing or rough, and what to press; "" where passes were measured."""
    from cpuchat.models.machine import DISTURBED

    if machine is None or (machine.peak and machine.probed):
        return ""
    if machine.peak:
        return f"speeds are rough · press {key} for exact speeds"
    if machine.peak_source == DISTURBED:
        return f"no speeds: other programs disturbed the measurement · {key} repeats it"
    return f"{key} measures the read bandwidth to predict speeds"
