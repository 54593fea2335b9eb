"""Cost profiles of machines on which only one thing takes time, and models of which only the size matters."""

from __future__ import annotations

from cpuchat.costs.model import BITS, CostProfile, ProductRate
from cpuchat.protocol.model_info import Attention, ModelWork, Weights


def reading(bytes_per_s: float) -> CostProfile:
    """Return a machine on which only reading takes time."""
    at_once = ProductRate("Q8_0", ((1.0, 1e18), (1e6, 1e18)))
    return CostProfile(bandwidth=bytes_per_s, products=(at_once,))


def work_of_size(nbytes: float, kv: float = 0) -> ModelWork:
    """Return the work of a model with `nbytes` of weights and `kv` bytes of KV cache per token."""
    weights = Weights("Q8_0", nbytes, 8 * nbytes / BITS["Q8_0"])
    return ModelWork(n_layer=1, dense=(weights,), attention=(Attention(kv, kv / 2),) if kv else ())
