"""Computes what a pass of a model reads and computes, from its header, or from its sizes and dimensions.toml.

Follows llama.cpp of llama-cpp-python 0.3.36: which tensors a graph of src/models/*.cpp uses, and which cells of the
KV cache its attention reads. With flash attention on a CPU, cells that are masked are not read at all
(ggml_compute_forward_flash_attn_ext_f16_one_chunk in ops.cpp). Without it all cells are multiplied, in steps of 256
(llama_kv_cache::get_n_kv): of a layer with a sliding window, also those of one batch beyond it.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from cpuchat.base.decoding import prepared
from cpuchat.costs.model import ALIKE, BITS, by_type
from cpuchat.models import fit
from cpuchat.models.engine_version import NO_FLASH_ATTENTION
from cpuchat.models.file_names import without_prefix
from cpuchat.models.gguf.header import GGUFHeader
from cpuchat.models.gguf.parse import BY_NAME, TensorInfo
from cpuchat.models.heads import layers_of
from cpuchat.protocol.messages import LoadOptions
from cpuchat.protocol.model_info import Attention, ModelWork, Weights
from cpuchat.protocol.options import UNQUANTIZED, EngineOptions

# Tables of which a pass reads rows (GGML_OP_GET_ROWS of LLM_TENSOR_INFOS in llama-arch.cpp): size, not traffic.
_OWN_MATRIX = ".nextn.shared_head_head.weight"
_TABLE = re.compile(
    r"(?:blk\.\d+\.nextn\.embed_tokens|token_embd|per_layer_token_embd|position_embd|token_types|blk\.\d+\.ffn_gate_tid2eid)\.weight"
)
# Not used for text decoding: encoders, vision, audio, blocks that predict further tokens.
_OTHER = re.compile(r"^(enc|v|a|mm|nextn)\.")
_DEFAULTS = EngineOptions()


def model_work(
    header: GGUFHeader, options: EngineOptions = _DEFAULTS, *, alike: float = 0.0, of_head: bool = False
) -> ModelWork:
    """Return the work of a pass of the model of `header` (of `read_model`), loaded with `options`. `alike` as of
    `ModelWork`: 0 for random tokens, `ALIKE` for text. `of_head`: of the draft head in this file instead."""
    n_expert, layers = header.number("expert_count"), layers_of(header) if of_head else range(header.decoding_layers)
    parts: dict[str, list[Weights]] = {"dense": [], "head": [], "experts": []}
    row = 0
    for part, tensor in _read_tensors(header, of_head):
        columns, rows, n = (*tensor.shape, 1, 1)[:3]
        if is_table(tensor):
            # One row for a token, of n-grams several (`ple_n_heads` in qwen4exp.cpp).
            ngrams = (header.number("ple.ngram_size") - 1) * header.number("ple.heads_per_ngram")
            row += max(ngrams if tensor.name == fit.LAYER_TABLE else 1, 1) * tensor.nbytes // max(rows, 1)
        if part != "dense" or not is_table(tensor):
            parts[part].append(Weights(tensor.type, tensor.nbytes, tensor.n_elements, (columns + rows) * n))
    return ModelWork(
        n_layer=len(layers),
        dense=by_type(parts["dense"]),
        head=by_type(parts["head"]),
        experts=by_type(parts["experts"]),
        n_expert=n_expert,
        n_expert_used=min(header.number("expert_used_count") or n_expert, n_expert),
        alike=alike,
        row=row,
        on_disk=fit.lazy_bytes(header),
        state=0 if of_head else fit.state_bytes(header),
        attention=_attention(header, options, layers),
    )


def _read_tensors(header: GGUFHeader, of_head: bool) -> Iterator[tuple[str, TensorInfo]]:
    """Yield the tensors that a pass of the model, or of its draft head, uses, with their part of `ModelWork`."""
    layers, n_expert, head = range(header.decoding_layers), header.number("expert_count"), header.output_matrix
    if of_head:
        layers = layers_of(header)
        head = next((one.name for one in header.tensors if one.name.endswith(_OWN_MATRIX)), head)
    for tensor in header.tensors:
        layer = tensor.name.split(".")[1] if tensor.name.startswith("blk.") else ""
        if _OTHER.match(tensor.name) or (layer.isdecimal() and int(layer) not in layers):
            continue
        if tensor.name == header.output_matrix != head:  # the model's; its head has one of its own
            continue
        yield "head" if tensor.name == head else "experts" if n_expert and tensor.is_routed else "dense", tensor


def is_table(tensor: TensorInfo) -> bool:
    """Return whether rows of the tensor are looked up: embeddings of tokens, of layers, of n-grams."""
    return _TABLE.fullmatch(tensor.name) is not None


def table_bytes(header: GGUFHeader) -> int:
    """Return the bytes of the tables of which a token reads rows only."""
    head = header.output_matrix
    return sum(tensor.nbytes for tensor in header.tensors if is_table(tensor) and tensor.name != head)


_UNTILED = 4.0
"""`Attention.wide` of a quantized cache: a prompt's token takes 13.1 ms for each 1,000 tokens of a Q8_0 cache, and
3.3 ms of an F16 one (Qwen2.5 Coder 1.5B, two cores of a Zen 3); decoding takes the same with both."""


def _attention(header: GGUFHeader, options: EngineOptions, layers: range) -> tuple[Attention, ...]:
    """Return what attention reads of the cache and computes for each token of it, by window (0: none), widest last."""
    flash_attn = options.flash_attn != "off" and header.architecture not in NO_FLASH_ATTENTION
    rows = fit.kv_rows(header)
    own = header.n_layer - header.number("attention.shared_kv_layers")
    nbytes, madds = Counter[int](), Counter[int]()
    for layer, row in list(enumerate(rows))[layers.start : layers.stop] or enumerate(rows):
        # Layers without a cache of their own read that of the last layer of their kind (llama-model.cpp, `reuse`).
        owner = layer if layer < own or own < 2 else own - (2 if row.window else 1)
        # Without flash attention, also the cells of one batch beyond the window.
        window = row.window if flash_attn or not row.window else row.window + LoadOptions().n_ubatch
        nbytes[window] += rows[owner].nbytes(options.type_k, options.type_v)
        if row.k or row.v:
            # q·k and p·v. With latent attention the compressed row stands for both.
            each = row.k * 2 if not row.v else header.key_length + header.value_length
            madds[window] += header.n_head * each
    step = 1 if flash_attn else fit.CONTEXT_STEP
    wide = 1.0 if {options.type_k, options.type_v} <= {*UNQUANTIZED} else _UNTILED
    return tuple(Attention(n, madds[window], window, step, wide) for window, n in sorted(nbytes.items()) if n)


_LARGEST_HEAD = 0.45  # share of the parameters, for models that are scaled from a larger one
_USUAL_BITS = 4.85  # of Q4_K_M
_MATRICES, _OF_EXPERT = 7, 3  # of a layer (q, k, v, output, gate, up, down), and of an expert
_MIXED = 1.08  # files named after a K type have some tensors of larger types


class Dimensions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The configuration of models, as in dimensions.toml."""

    ids: tuple[str, ...] = ()
    params: float = 0.0
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
    looked_up: float = 0.0


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: tuple[Dimensions, ...]


@functools.cache
def dimensions() -> tuple[Dimensions, ...]:
    """Return the known configurations."""
    return msgspec.toml.decode(Path(__file__).with_name("dimensions.toml").read_bytes(), type=prepared(_File)).model


def typical_work(
    size: float,
    quantization: str,
    *,
    params: float = 0.0,
    active: float = 1.0,
    id: str = "",
    dims: Dimensions | None = None,
    of_head: bool = False,
) -> ModelWork:
    """Return the work of a model with a file of `size` bytes.

    `params`: 0: as many as such a file usually has. `active`: share of the parameters that a token uses, of a mixture
    of experts. `id`: of the catalog; "" for others, whose parts are scaled from the nearest known configuration; `dims`
    is its configuration, in the place of that by `id`. `of_head`: of the MTP head that such a model usually contains
    instead: one more layer, which attends to all tokens, after a matrix that joins the token's embedding and the hidden
    state."""
    kind = main_type(quantization)
    params = params or 8 * size / usual_bits(quantization)
    named = (one for one in dimensions() if any(fnmatch.fnmatch(id, pattern) for pattern in one.ids))
    known = dims or next(named, None)
    if known is None:  # that with the nearest number of parameters, on a ratio scale
        alike = [one for one in dimensions() if one.params and (one.experts > 0) == (active < 1)]
        known = min(alike, key=lambda one: abs(1e9 * one.params / params - params / (1e9 * one.params)))
    per_value = size / params
    kv_values = known.kv_row or 2 * known.kv_heads * known.head
    tables = min(known.looked_up, 0.9 * params)
    active, params = active * params, params - tables
    active /= params
    head = min(known.vocab * known.embd, _LARGEST_HEAD * params)
    rest = max(params - head - (0 if known.tied else head), 0.1 * params)
    routed = 0.0
    if active < 1 and known.experts > known.used > 0:
        routed = min((1 - active) * params / (1 - known.used / known.experts), 0.995 * rest)
    if of_head:
        rest, routed = rest / known.layers + 2 * known.embd**2, routed / known.layers
        known, tables = msgspec.structs.replace(known, layers=1, full=1), 0.0
    return ModelWork(
        n_layer=known.layers,
        dense=(_weights_of_blocks(kind, rest - routed, per_value, known, _MATRICES * known.layers),),
        head=(_weights_of_blocks(kind, head, per_value, known, 1),),
        experts=(_weights_of_blocks(kind, routed, per_value, known, _OF_EXPERT * known.layers * known.experts),)
        if routed
        else (),
        n_expert=known.experts if routed else 0,
        n_expert_used=known.used if routed else 0,
        alike=ALIKE,
        on_disk=tables * per_value if tables * per_value > fit.LAZY_BYTES else 0,
        attention=tuple(
            Attention(2.0 * layers * kv_values, layers * known.heads * 2 * known.head, window)
            for layers, window in ((known.full, 0), (known.layers - known.full, known.window))
            if layers
        ),
    )


def _weights_of_blocks(kind: str, values: float, per_value: float, known: Dimensions, matrices: int) -> Weights:
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
