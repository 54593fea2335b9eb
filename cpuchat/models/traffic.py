"""Computes what a pass of a model reads from memory, from its header; `telemetry.traffic` turns it into bytes per pass.

Follows llama.cpp of llama-cpp-python 0.3.36: which tensors a graph of src/models/*.cpp uses, and which cells of the
KV cache its attention reads. With flash attention on a CPU, cells that are masked are not read at all
(ggml_compute_forward_flash_attn_ext_f16_one_chunk in ops.cpp). Without it all cells are multiplied, in steps of 256
(llama_kv_cache::get_n_kv): of a layer with a sliding window, also those of one batch beyond it.
"""

from __future__ import annotations

import re

from cpuchat.model_info import KVTraffic, Traffic
from cpuchat.models import fit
from cpuchat.models.gguf.header import GGUFHeader
from cpuchat.models.gguf.parse import TensorInfo
from cpuchat.models.windows import decoding_layers
from cpuchat.protocol import LoadOptions

# Tables of which a pass reads one row per token.
TABLES = frozenset({"token_embd.weight", "per_layer_token_embd.weight", "position_embd.weight"})
# Not used for text decoding: encoders, vision, audio, blocks that predict further tokens.
_OTHER = re.compile(r"^(enc|v|a|mm|nextn)\.")
_NO_FLASH_ATTENTION = frozenset({"grok"})  # llama_init_from_model switches it off for these


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
    return not layer.isdecimal() or int(layer) < decoding_layers(header)


def _kv(header: GGUFHeader, type_k: str, type_v: str, flash_attn: bool) -> tuple[KVTraffic, ...]:
    rows = fit.kv_rows(header)
    own = header.n_layer - header.number("attention.shared_kv_layers")
    totals: dict[int, int] = {}
    for layer in range(min(decoding_layers(header), len(rows))):
        # Layers without a cache of their own read that of the last layer of their kind (llama-model.cpp, `reuse`).
        owner = layer if layer < own or own < 2 else own - (2 if rows[layer].window else 1)
        window = _cells_read(rows[layer].window, flash_attn)
        totals[window] = totals.get(window, 0) + rows[owner].nbytes(type_k, type_v)
    step = 1 if flash_attn else fit.CONTEXT_STEP
    return tuple(KVTraffic(bytes_per_token=n, window=w, step=step) for w, n in sorted(totals.items()) if n)


def _cells_read(window: int, flash_attn: bool) -> int:
    """Return how many cells a token reads at most; 0: the whole context."""
    return window if flash_attn or not window else window + LoadOptions().n_ubatch


def attention_madds(header: GGUFHeader, *, flash_attn: bool = True) -> dict[int, int]:
    """Return the multiply-adds of attention for a token of a pass and one of its context, by window as in
    `traffic_of(...).kv`.
    """
    flash_attn = flash_attn and header.architecture not in _NO_FLASH_ATTENTION
    totals: dict[int, int] = {}
    for row in fit.kv_rows(header)[: decoding_layers(header)]:
        if row.k or row.v:
            window = _cells_read(row.window, flash_attn)
            # q·k and p·v. With latent attention the compressed row stands for both.
            each = row.k * 2 if not row.v else header.key_length + header.value_length
            totals[window] = totals.get(window, 0) + header.n_head * each
    return totals
