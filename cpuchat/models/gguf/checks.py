"""Finds contradictions in a header on which llama.cpp would abort, by an assertion or an uncaught exception.

The rules are those of llama.cpp of llama-cpp-python 0.3.36 for all architectures; tests/models/gguf/test_checks.py
verifies them there. Assertions of single architectures (src/models/*.cpp) are left to the process boundary. What
llama.cpp rejects by itself is not checked, nor are the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

from cpuchat.errors import ModelDamaged
from cpuchat.models.gguf.arrays import LazyArray
from cpuchat.models.gguf.header import GGUFHeader
from cpuchat.models.gguf.vocabulary import Vocabulary, vocabulary

_MAX_LAYERS = 512  # LLAMA_MAX_LAYERS in llama-hparams.h
_MAX_EXPERTS = 1024  # LLAMA_MAX_EXPERTS
_ROPE_SCALINGS = frozenset({"none", "linear", "yarn", "longrope"})  # LLAMA_ROPE_SCALING_TYPES in llama-model.cpp
# LLAMA_ROPE_TYPE_NONE in llama_model_rope_type; the last two have a type but ignore the header: published files of
# deepseek2-ocr have 0 dimensions.
_WITHOUT_ROPE = frozenset(
    {"gpt2", "gptj", "mpt", "refact", "bloom", "mamba", "mamba2", "jamba", "jina-bert-v2", "t5", "t5encoder", "jais",
     "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7", "wavtokenizer-dec", "nemotron_h", "nemotron_h_moe", "kimi-linear",
     "kimi-k3", "glm5-next", "deepseek2-ocr", "starcoder"}
)  # fmt: skip
# Kinds of vocabulary that add bos or eos to a text (llama_vocab::impl::tokenize).
_ADDING = {"bos": frozenset({"BPE", "SPM", "UGM", "WPM"}), "eos": frozenset({"BPE", "SPM", "UGM"})}
_BYTE_TOKEN = 6  # LLAMA_TOKEN_TYPE_BYTE
_MOST_COMPARED = 3 << 17  # tokens: 1.5 times the largest vocabulary of a chat model
_BLOCK = 4096  # tokens checked together: much faster than one by one
_SHOWN_BYTES = 32


def check_header(header: GGUFHeader) -> None:
    """Refuse a model on which llama.cpp would abort. Under 0.1 s for 150k tokens.

    Raises:
        ModelDamaged: the message has the first contradiction.
    """
    for problem in problems_of(header):
        raise ModelDamaged(
            f"{header.path.name} cannot be loaded: {problem}.",
            "Download the file again; if that does not help, use one from another publisher.",
        )


def problems_of(header: GGUFHeader) -> Iterator[str]:
    """Yield the contradictions as clauses, those of the model first.

    None for other files: a projector, a vocabulary without weights, an image model without layers.
    """
    if header.other or header.value("block_count") is None:
        return
    yield from _layers(header)
    yield from _experts(header)
    yield from _attention(header)
    yield from _positions(header)
    yield from _epsilons(header)
    yield from _vocabulary(vocabulary(header), header)


def _layers(header: GGUFHeader) -> Iterator[str]:
    """Check layers and experts (llama_model_base::load_hparams)."""
    claimed, extra = header.number("block_count"), header.number("nextn_predict_layers")
    if not 0 < claimed <= _MAX_LAYERS:
        yield f"it has {claimed} layers"
    elif extra > claimed:
        yield f"{extra} of its {claimed} layers are for multi-token prediction"


def _experts(header: GGUFHeader) -> Iterator[str]:
    """Check layers and experts (llama_model_base::load_hparams)."""
    count, used = header.number("expert_count"), header.number("expert_used_count")
    groups, groups_used = header.number("expert_group_count"), header.number("expert_group_used_count")
    if header.architecture in ("hunyuan_vl", "hunyuan-dense") and count <= 1:  # these are not mixtures
        return
    if count > _MAX_EXPERTS or used > count or (count and not used):
        yield f"a token would use {used} of {count} experts"
    elif groups and groups >= count:
        yield f"its {count} experts would form {groups} groups"
    elif groups > 1 and (count % groups or not 0 < groups_used < groups):
        yield f"a token would use {groups_used} of {groups} groups of {count} experts"


def _attention(header: GGUFHeader) -> Iterator[str]:
    """Check that K and V can be repeated for all heads (ggml_can_mul_mat)."""
    for layer, (q, kv) in enumerate(zip(header.per_layer("attention.head_count", 0), header.heads_kv, strict=True)):
        if q and kv and q % kv:
            yield f"layer {layer} has {q} attention heads, not a multiple of its {kv} KV heads"
            return
    if header.architecture == "deepseek2" and header.number("attention.key_length_mla"):
        # What llama_model_deepseek2::graph writes to the KV cache (ggml_set_rows).
        latent = header.number("attention.kv_lora_rank") + header.number("rope.dimension_count")
        if header.key_length != latent:
            yield f"its latent keys have {latent} values, the KV cache rows only {header.key_length}"


def _positions(header: GGUFHeader) -> Iterator[str]:
    """Check positions (llama_model_base::load_hparams, and ggml_compute_forward_rope_flt, which never ends with 0
    dimensions).
    """
    scaling = header.value("rope.scaling.type", "linear")
    if isinstance(scaling, str) and scaling not in _ROPE_SCALINGS:
        yield f"unknown RoPE scaling {scaling[:_SHOWN_BYTES]!r}"
    heads = header.per_layer("attention.head_count", 0)
    if header.architecture in _WITHOUT_ROPE or not heads or not heads[0]:
        return
    length = header.number("attention.key_length") or header.n_embd // heads[0]
    rotated = header.number("rope.dimension_count", length)
    if not 0 < rotated <= length or rotated % 2:
        yield f"RoPE would rotate {rotated} of the {length} values of an attention head"
    if header.number("full_attention_interval", 1) == 0:  # a division in the loaders of Qwen 3.5 and its kind
        yield "its full-attention interval is 0"


def _epsilons(header: GGUFHeader) -> Iterator[str]:
    """Check epsilons (ggml_compute_forward_rms_norm_f32, ggml_compute_forward_norm_f32)."""
    for key in ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"):
        epsilon = header.value(key, 0.0)
        if isinstance(epsilon, float) and not epsilon >= 0:
            yield f"{key} is {epsilon:g}"


def _vocabulary(vocab: Vocabulary, header: GGUFHeader) -> Iterator[str]:
    """Check the vocabulary (llama_vocab::impl::load, and assertions of the tokenizer)."""
    if vocab.tokens is None:
        return
    if vocab.n_tokens <= _MOST_COMPARED and (repeated := _repeated(vocab.tokens)):
        yield repeated
    for name, adds, token in (("bos", vocab.add_bos, vocab.bos), ("eos", vocab.add_eos, vocab.eos)):
        if adds and token < 0 and vocab.kind in _ADDING[name]:
            yield f"it adds a {name} token to every text, but has none"
    types = header.metadata.get("tokenizer.ggml.token_type")
    if vocab.kind == "WPM" and isinstance(types, LazyArray) and _BYTE_TOKEN in types:
        yield "its WPM vocabulary has byte tokens"


def _repeated(tokens: LazyArray) -> str:
    """Return a clause about a duplicate token; "" when there is none."""
    seen: set[int] = set()  # hashes: tokens can be long
    count = 0
    for block in _blocks(tokens):
        seen.update(map(hash, block))
        count += len(block)
        if len(seen) < count:
            return _twice(tokens, frozenset(block))
    return ""


def _twice(tokens: LazyArray, suspects: frozenset[bytes]) -> str:
    first: dict[bytes, int] = {}
    for i, word in enumerate(chain.from_iterable(_blocks(tokens))):
        if word in suspects and first.setdefault(word, i) != i:
            shown = word[:_SHOWN_BYTES].decode("utf-8", "replace")
            return f"tokens {first[word]} and {i} of its vocabulary are both {shown!r}"
    return ""


def _blocks(tokens: LazyArray) -> Iterator[list[bytes]]:
    """Yield blocks of tokens as llama.cpp stores them: up to a NUL, and empty ones by their number."""
    words = tokens.raw_strings()
    for start in range(0, len(tokens), _BLOCK):
        block = list(islice(words, _BLOCK))
        if b"" in block or b"\0" in b"".join(block):
            block = [word.partition(b"\0")[0] or b"[EMPTY_%d]" % i for i, word in enumerate(block, start)]
        yield block
