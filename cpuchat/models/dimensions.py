"""Estimates the work of a model of which only sizes are known, from the published configurations in dimensions.toml."""

from __future__ import annotations

import fnmatch
import functools
from pathlib import Path

import msgspec

from cpuchat import toml
from cpuchat.costmodel.profile import BITS
from cpuchat.costmodel.work import ALIKE, Attention, ModelWork, Weights
from cpuchat.models.file_names import without_prefix
from cpuchat.models.gguf.types import BY_NAME

_LARGEST_HEAD = 0.45  # share of the parameters, for models that are scaled from a larger one
_USUAL_BITS = 4.85  # of Q4_K_M
_MATRICES, _OF_EXPERT = 7, 3  # of a layer (q, k, v, output, gate, up, down), and of an expert
_MIXED = 1.08  # files named after a K type have some tensors of larger types
_SIZES = (
    (0.5e9, "qwen2.5-0.5b"), (1.5e9, "qwen2.5-1.5b"), (4e9, "qwen3-4b"), (8e9, "llama-3.1-8b"),
    (14.8e9, "qwen3-14b"), (32.8e9, "qwen3-32b"), (70.6e9, "llama-3.3-70b"), (122e9, "mistral-large"),
    (405e9, "llama-3.1-405b"),
)  # fmt: skip
_MIXTURES = (
    (16e9, "deepseek-v2-lite"), (30e9, "qwen3-30b-a3b"), (117e9, "gpt-oss-120b"), (235e9, "qwen3-235b-a22b"),
    (671e9, "deepseek-r1"), (1030e9, "kimi-k2"),
)  # fmt: skip


class Dimensions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The configuration of models, as in dimensions.toml."""

    ids: tuple[str, ...] = ()
    layers: int
    embd: int
    heads: int
    kv_heads: int
    head: int
    vocab: int
    tied: bool = False
    experts: int = 0
    used: int = 0
    kv_row: int = 0
    window: int = 0
    full: int = 0

    @property
    def kv_values(self) -> int:
        """Return the values of K and V that a layer keeps for a token."""
        return self.kv_row or 2 * self.kv_heads * self.head


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: tuple[Dimensions, ...]


@functools.cache
def dimensions() -> tuple[Dimensions, ...]:
    """Return the known configurations."""
    text = Path(__file__).with_name("dimensions.toml").read_text(encoding="utf-8")
    return msgspec.convert(toml.loads(text), _File).model


def dimensions_of(id: str) -> Dimensions | None:
    """Return the configuration of a model of the catalog; None when it is not known."""
    return next((one for one in dimensions() if any(fnmatch.fnmatch(id, pattern) for pattern in one.ids)), None)


def typical_work(
    size: float,
    quantization: str,
    *,
    params: float = 0.0,
    active: float = 1.0,
    id: str = "",
    dims: Dimensions | None = None,
) -> ModelWork:
    """Return the work of a model with a file of `size` bytes.

    Args:
        params: 0: as many as such a file usually has.
        active: share of the parameters that a token uses, of a mixture of experts.
        id: of the catalog; "" for others, whose parts are scaled from the nearest known configuration.
        dims: its configuration, in the place of that by `id`.
    """
    kind = main_type(quantization)
    params = params or 8 * size / usual_bits(quantization)
    known = dims or dimensions_of(id) or _nearest(params, mixture=active < 1)
    per_value = size / params
    head = min(known.vocab * known.embd, _LARGEST_HEAD * params)
    rest = max(params - head - (0 if known.tied else head), 0.1 * params)
    routed = 0.0
    if active < 1 and known.experts > known.used > 0:
        routed = min((1 - active) * params / (1 - known.used / known.experts), 0.995 * rest)
    return ModelWork(
        n_layer=known.layers,
        dense=(_weights(kind, rest - routed, per_value, known, _MATRICES * known.layers),),
        head=(_weights(kind, head, per_value, known, 1),),
        experts=(_weights(kind, routed, per_value, known, _OF_EXPERT * known.layers * known.experts),)
        if routed
        else (),
        n_expert=known.experts if routed else 0,
        n_expert_used=known.used if routed else 0,
        alike=ALIKE,
        attention=tuple(
            Attention(2.0 * layers * known.kv_values, layers * known.heads * 2 * known.head, window)
            for layers, window in ((known.full, 0), (known.layers - known.full, known.window))
            if layers
        ),
    )


def _weights(kind: str, values: float, per_value: float, known: Dimensions, matrices: int) -> Weights:
    """Return matrices that have one side of the embedding's width."""
    return Weights(kind, values * per_value, values, values / known.embd + matrices * known.embd)


def main_type(quantization: str) -> str:
    """Return the tensor type of most matrices of such a file: `Q4_K` for `UD-Q4_K_XL`; the name if it does not say."""
    name = without_prefix(quantization)
    return next((kind for kind in (name, name.rpartition("_")[0]) if kind in BY_NAME), name)


def usual_bits(quantization: str) -> float:
    """Return the bits per weight of a file of that quantization."""
    name = without_prefix(quantization)
    if name in BITS and not name.endswith("_K"):
        return BITS[name]
    return _MIXED * BITS[main_type(name)] if main_type(name) in BITS else _USUAL_BITS


def _nearest(params: float, *, mixture: bool) -> Dimensions:
    """Return the configuration of the known model with the nearest number of parameters, on a ratio scale."""
    _, name = min(_MIXTURES if mixture else _SIZES, key=lambda one: abs(one[0] / params - params / one[0]))
    return next(one for one in dimensions() if any(fnmatch.fnmatch(name, pattern) for pattern in one.ids))
