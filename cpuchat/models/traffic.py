"""Computes what a pass of a model reads from memory, from its header; `telemetry.traffic` turns it into bytes per pass.

Follows llama.cpp of llama-cpp-python 0.3.36: which tensors a graph of src/models/*.cpp uses, and which cells of the
KV cache its attention reads. With flash attention on a CPU, cells that are masked are not read at all
(ggml_compute_forward_flash_attn_ext_f16_one_chunk in ops.cpp), so a sliding window saves traffic although the engine
keeps the whole cache. Without it the whole cache is multiplied, in steps of 256 cells (llama_kv_cache::get_n_kv).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from cpuchat.model_info import KVTraffic, Traffic
from cpuchat.models import fit
from cpuchat.models.gguf.arrays import LazyArray
from cpuchat.models.gguf.header import GGUFHeader
from cpuchat.models.gguf.parse import TensorInfo

# Tables of which a pass reads one row per token.
TABLES = frozenset({"token_embd.weight", "per_layer_token_embd.weight", "position_embd.weight"})
# Not used for text decoding: encoders, vision, audio, blocks that predict further tokens.
_OTHER = re.compile(r"^(enc|v|a|mm|nextn)\.")
_NO_FLASH_ATTENTION = frozenset({"grok"})  # llama_init_from_model switches it off for these


class _Window(NamedTuple):
    """`every` so many layers one has no window, the last of them unless `full_first`; 0: all have one. `size` is the
    window when the header names none, `fixed` the one whatever it names."""

    every: int
    full_first: bool = False
    size: int = 0
    fixed: int = 0


# load_swa_pattern(...) and n_swa in src/models/*.cpp. Other architectures have the pattern of the header, or no windows
# even where the header names one. Chunks (llama4) count as windows of their full length.
_WINDOWS = {
    "afmoe": _Window(4),
    "cohere2": _Window(4),
    "cohere2moe": _Window(4, full_first=True),
    "exaone-moe": _Window(4, size=128),
    "exaone4": _Window(4, size=4096),
    "gemma2": _Window(2, size=4096),
    "gemma3": _Window(6),
    "gemma3n": _Window(5),
    "gpt-oss": _Window(2),
    "laguna": _Window(4, full_first=True),
    "lfm2": _Window(0),
    "lfm2moe": _Window(0),
    "llama4": _Window(4, size=8192, fixed=8192),
    "mellum": _Window(4),
    "muse-glimmer": _Window(4),
    "olmo2": _Window(4),
    "plamo3": _Window(8),
    "smallthinker": _Window(4, full_first=True, fixed=4096),
}
_NONE = _Window(1)
_NO_WINDOWS = frozenset({"phi3", "phimoe"})  # their pattern is not used
_EXAONE4_LAYERS = 64  # only the model of that size has windows


def traffic_of(
    header: GGUFHeader, *, type_k: str = "f16", type_v: str = "f16", n_experts: int = 0, flash_attn: bool = True
) -> Traffic:
    """Return what a pass of the model of `header` (of `read_model`) reads.

    `type_k`, `type_v` are the types of its KV cache, `n_experts` how many experts a token uses (0: as trained).
    """
    n_expert = header.number("expert_count")
    tied = not any(t.name == "output.weight" for t in header.tensors)
    weights = experts = row = 0
    for tensor in header.tensors:
        if not is_used(header, tensor):
            continue
        if tensor.name in TABLES:
            row += tensor.nbytes // max(tensor.shape[1] if len(tensor.shape) > 1 else 1, 1)
        if n_expert and tensor.is_routed:
            experts += tensor.nbytes
        elif tensor.name not in TABLES or (tied and tensor.name == "token_embd.weight"):
            weights += tensor.nbytes
    return Traffic(
        weights=weights,
        experts=experts,
        n_expert=n_expert,
        n_expert_used=min(n_experts or header.number("expert_used_count") or n_expert, n_expert),
        row=row,
        state=fit.state_bytes(header),
        kv=_kv(header, type_k, type_v, flash_attn and header.architecture not in _NO_FLASH_ATTENTION),
    )


def is_used(header: GGUFHeader, tensor: TensorInfo) -> bool:
    if _OTHER.match(tensor.name):
        return False
    layer = tensor.name.split(".")[1] if tensor.name.startswith("blk.") else ""
    return not layer.isdecimal() or int(layer) < _layers(header)


def _layers(header: GGUFHeader) -> int:
    """Return the number of decoding layers: those that predict further tokens come last (llama_hparams::n_layer)."""
    extra = header.number("nextn_predict_layers")
    return header.n_layer - extra if extra < header.n_layer else header.n_layer


def _kv(header: GGUFHeader, type_k: str, type_v: str, flash_attn: bool) -> tuple[KVTraffic, ...]:
    windows = windows_of(header)
    rows = fit.kv_rows(header)
    own = header.n_layer - header.number("attention.shared_kv_layers")
    totals: dict[int, int] = {}
    for layer in range(min(_layers(header), len(rows))):
        # Layers without a cache of their own read that of the last layer of their kind (llama-model.cpp, `reuse`).
        owner = layer if layer < own or own < 2 else own - (2 if windows[layer] else 1)
        window = windows[layer] if flash_attn else 0
        totals[window] = totals.get(window, 0) + fit.row_bytes(rows[owner], type_k, type_v)
    step = 1 if flash_attn else fit.CONTEXT_STEP
    return tuple(KVTraffic(bytes_per_token=n, window=w, step=step) for w, n in sorted(totals.items()) if n)


def attention_madds(header: GGUFHeader, *, flash_attn: bool = True) -> dict[int, int]:
    """Return the multiply-adds of attention for a token of a pass and one of its context, by window as in
    `traffic_of(...).kv`.
    """
    flash_attn = flash_attn and header.architecture not in _NO_FLASH_ATTENTION
    windows, rows = windows_of(header), fit.kv_rows(header)
    totals: dict[int, int] = {}
    for layer in range(min(_layers(header), len(rows))):
        if any(rows[layer]):
            window = windows[layer] if flash_attn else 0
            # q·k and p·v. With latent attention the compressed row stands for both.
            each = rows[layer][0] * 2 if not rows[layer][1] else header.key_length + header.value_length
            totals[window] = totals.get(window, 0) + header.n_head * each
    return totals


def windows_of(header: GGUFHeader) -> list[int]:
    """Return the attention window of each layer in tokens, the current one included; 0: all tokens."""
    known = _WINDOWS.get(header.architecture, _NONE)
    if header.architecture == "exaone4" and header.n_layer != _EXAONE4_LAYERS:
        known = _NONE
    size = header.number("attention.sliding_window", known.size)
    size = known.fixed if size and known.fixed else size
    pattern = header.value("attention.sliding_window_pattern")
    every = pattern if isinstance(pattern, int) and pattern >= 0 and known is not _NONE else known.every
    if isinstance(pattern, LazyArray) and header.architecture not in _NO_WINDOWS:
        flags = [bool(flag) for flag in pattern.first(header.n_layer)]
        flags += [False] * (header.n_layer - len(flags))
    else:
        full = 0 if known.full_first else every - 1
        flags = [every == 0 or layer % every != full for layer in range(header.n_layer)]
    return [size if flag else 0 for flag in flags]
