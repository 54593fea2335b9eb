"""Tells which layers of a model attend to a sliding window only, from its header.

Follows llama.cpp of llama-cpp-python 0.3.36: `load_swa_pattern(...)`, `is_swa_impl` and `n_swa` in src/models/*.cpp.
Both the memory of such layers (`fit`) and what they read (`traffic`) depend on it.
"""

from __future__ import annotations

from typing import NamedTuple

from cpuchat.models.gguf.arrays import LazyArray
from cpuchat.models.gguf.header import GGUFHeader


class _Window(NamedTuple):
    """`every` so many layers one has no window, the last of them unless `full_first`; 0: all have one. `size` is the
    window when the header names none, `fixed` the one whatever it names."""

    every: int
    full_first: bool = False
    size: int = 0
    fixed: int = 0


_BY_HEADER = _Window(1)
"""Architectures that read the pattern of the header and have no default."""
# Other architectures have no windows, even where the header names one. Chunks (llama4) count as windows of their full
# length. The windows of deepseek4 are not here: its cache is of a kind of its own (llama_kv_cache_dsv4).
_WINDOWS = {
    "afmoe": _Window(4),
    "cohere2": _Window(4),
    "cohere2moe": _Window(4, full_first=True),
    "dflash": _BY_HEADER,
    "dots3note": _BY_HEADER,
    "exaone-moe": _Window(4, size=128),
    "exaone4": _Window(4, size=4096),
    "gemma2": _Window(2, size=4096),
    "gemma3": _Window(6),
    "gemma3n": _Window(5),
    "gemma4": _BY_HEADER,
    "gemma4-assistant": _BY_HEADER,
    "gpt-oss": _Window(2),
    "granite_swa": _BY_HEADER,
    "laguna": _Window(4, full_first=True),
    "lfm2": _Window(0),
    "llama4": _Window(4, size=8192, fixed=8192),
    "maple": _BY_HEADER,
    "mellum": _Window(4),
    "mimo2": _BY_HEADER,
    "muse-glimmer": _Window(4),
    "olmo2": _Window(4),
    "plamo3": _Window(8),
    "smallthinker": _Window(4, full_first=True, fixed=4096),
    "spark2_5": _BY_HEADER,
    "step35": _BY_HEADER,
}
_EXAONE4_LAYERS = 64  # only the model of that size has windows


def decoding_layers(header: GGUFHeader) -> int:
    """Return the number of decoding layers: those that predict further tokens come last (llama_hparams::n_layer)."""
    extra = header.number("nextn_predict_layers")
    return header.n_layer - extra if extra < header.n_layer else header.n_layer


def windows_of(header: GGUFHeader) -> list[int]:
    """Return the attention window of each layer in tokens, the current one included; 0: all tokens."""
    n_layer, known = header.n_layer, _WINDOWS.get(header.architecture)
    if known is None or (header.architecture == "exaone4" and decoding_layers(header) != _EXAONE4_LAYERS):
        return [0] * n_layer
    size = header.number("attention.sliding_window", known.size)
    size = known.fixed if size and known.fixed else size
    pattern = header.value("attention.sliding_window_pattern")
    if isinstance(pattern, LazyArray):
        flags = [bool(flag) for flag in pattern.first(n_layer)]
    else:
        every = pattern if isinstance(pattern, int) and pattern >= 0 else known.every
        full = 0 if known.full_first else every - 1
        flags = [every == 0 or layer % every != full for layer in range(decoding_layers(header))]
    return [size if flag else 0 for flag in flags] + [0] * (n_layer - len(flags))
