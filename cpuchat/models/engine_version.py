"""All that the program knows of the pinned llama.cpp without asking it: layouts, defaults, names, texts of its log.

Plain data, as processes that never load the engine read it, too. Types of tensors and files are in `gguf.parse`,
vocabularies in `gguf.header`, architectures without a chat in unsupported.toml, prototypes in `engine.llama.bindings`.
Tests compare all of it with the installed headers and libraries (tests/engine/llama/test_engine_version.py);
docs/engine.md says what else a change of version must check.
"""

from __future__ import annotations

import re
from typing import Final, Literal

PINNED_VERSION: Final = "0.3.36"
"""Of llama-cpp-python."""
GGML_VERSION: Final = "0.25.3"
"""Of the ggml in it, which any libllama can tell before a struct is passed to it."""

# What a load relies on

STRUCTS: Final = {
    "llama_model_params": (80, "load_mtp", 77),
    "llama_context_params": (160, "ctx_other", 152),
    "llama_batch": (56, "logits", 48),
    "llama_model_quantize_params": (64, "max_buf_size", 56),
    "llama_model_kv_override": (264, "value", 136),
}
"""Bytes, last field and its offset of structs that are passed."""
DEFAULTS: Final[dict[str, dict[str, object]]] = {
    "llama_model_params": {"n_gpu_layers": -1, "load_mode": -1, "lazy_mode": 1, "use_extra_bufts": True},
    "llama_context_params": {
        "n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "n_outputs_max": 0, "n_threads": 4,
        "flash_attn_type": -1, "type_k": 1, "type_v": 1, "no_perf": True, "swa_full": True,
    },
    "ggml_threadpool_params": {"n_threads": 3, "prio": 0, "poll": 50, "strict_cpu": False, "paused": False},
    "llama_model_quantize_params": {"output_tensor_type": 43, "token_embedding_type": 43, "max_buf_size": 8 << 30},
}  # fmt: skip
"""Default parameters by struct (of a pool of 3 threads): where one differs, its meaning or its place has changed."""
CXX_NAMES: Final = {
    "llama_set_embeddings_nextn": "_Z26llama_set_embeddings_nextnP13llama_contextbb",
    "llama_get_embeddings_nextn": "_Z26llama_get_embeddings_nextnP13llama_context",
    "llama_get_embeddings_nextn_ith": "_Z30llama_get_embeddings_nextn_ithP13llama_contexti",
    "llama_set_embeddings_layer_inp": "_Z30llama_set_embeddings_layer_inpP13llama_contextjb",
    "llama_get_embeddings_layer_inp": "_Z30llama_get_embeddings_layer_inpP13llama_contextj",
    "llama_internal_get_tensor_map": "_Z29llama_internal_get_tensor_mapB5cxx11PK11llama_model",
}
"""Symbols of functions of src/llama-ext.h, which are exported as C++; some are plain C from llama.cpp 1.0 on."""
TENSOR_PAIR: Final = 40
"""Bytes of an entry of the tensor map: a std::pair<std::string, ggml_tensor *> of libstdc++, the pointer last."""

# Architectures, by their names in headers (src/llama-arch.cpp)

HeadKind = Literal["eagle3", "mtp", "dflash"]
HEADS: Final[dict[str, HeadKind]] = {"eagle3": "eagle3", "dflash": "dflash", "gemma4-assistant": "mtp"}
"""Those that read the hidden states of another model, and what kind of head they are."""
# What a head asks of a model that is not in these lists ends the process with GGML_ABORT, or is garbage.
MTP: Final = frozenset(
    {"bailingmoe3", "cohere2moe", "deepseek2", "deepseek32", "deepseek4", "glm-dsa", "glm4moe", "hy_v3", "mimo2",
     "nemotron_h_moe", "qwen35", "qwen35moe", "qwen3next", "step35"}
)  # fmt: skip
"""Those with a graph for MTP layers (`graph_mtp` in src/models)."""
SEVERAL_MTP: Final = frozenset({"hy_v3", "mimo2", "step35"})
"""Those among them that choose one of several MTP layers (`nextn_layer_offset`); others assert n_layer_nextn == 1."""
GIVES_INPUTS: Final = frozenset(
    {"bailingmoe3", "deepseek4", "gemma4", "gpt-oss", "lfm2", "llama", "mimo2", "minimax-m2", "muse-glimmer",
     "nanbeige", "nemotron_h", "qwen3", "qwen35", "qwen35moe", "qwen3moe", "qwen3next"}
)  # fmt: skip
"""Those whose graphs give the inputs of their layers (`t_layer_inp`)."""
GIVES_HIDDEN: Final = (MTP | {"gemma4", "gpt-oss", "nemotron_h"}) - {"deepseek4"}
"""Those that give their last hidden states (`t_h_nextn`); the rows of deepseek4 are wider than these."""
RECURRENT: Final = frozenset(
    {"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7", "jamba", "falcon-h1", "plamo2", "granitehybrid",
     "lfm2", "lfm2moe", "nemotron_h", "nemotron_h_moe", "qwen3next", "kimi-linear", "bailingmoe3", "kimi-k3",
     "glm5-next", "qwen35", "qwen35moe", "qwen4exp", "deepseek4", "minimax-01"}
)  # fmt: skip
"""Those with a recurrent state beside or instead of a KV cache (llm_arch_is_recurrent and llm_arch_is_hybrid)."""
SNAPSHOTS: Final = frozenset(
    {"kimi-k3", "qwen35", "qwen35moe", "qwen4exp", "deepseek4", "glm5-next", "nemotron_h", "nemotron_h_moe", "lfm2",
     "lfm2moe", "bailingmoe3"}
)  # fmt: skip
"""Those of which snapshots of the recurrent state can be kept (llm_arch_supports_rs_rollback)."""
COPIES_SNAPSHOTS: Final = frozenset({"qwen35", "qwen35moe", "qwen4exp", "kimi-k3", "glm5-next"})
"""Those among them that copy the convolution part of all snapshots in every pass, plain ones too (build_conv_state in
delta-net-base.cpp, and what stands for it in the files of these models)."""
NO_FLASH_ATTENTION: Final = frozenset({"grok"})
"""Those for which llama_init_from_model switches it off."""

# Texts of the log, and of errors, which it carries

LOG_ERROR, LOG_CONTINUED = 4, 5
"""Levels of lines (ggml_log_level)."""
NO_MEMORY: Final = ("failed to allocate", "unable to allocate", "out of memory", "Cannot allocate memory", "bad_alloc")
NOT_LOCKED: Final = "failed to mlock"
DAMAGED: Final = ("not within the file bounds", "corrupt", "invalid data")
QUANTIZE_FAILED: Final = "failed to quantize: "
LOAD_MODE: Final = re.compile(r"\(load_mode = ([^)]+)\)")
# One for each kind of layers: with a sliding window and without.
KV_SIZE: Final = re.compile(r"^llama_kv_cache\S*: size = +([0-9.]+) MiB .*K \((\S+)\): .*V \((\S+)\): ")
GRAPH_RESERVED: Final = re.compile(r"^graph_reserve: reserving a graph")
MASK_USER: Final = re.compile(r"kq_mask.*is used by node .* \((FLASH_ATTN_EXT|SOFT_MAX)\)$")
# llama_model_quantize_impl logs "[   1/ 291] blk.0.attn_k.weight - [...], type =    f16, " and then, in a dry run,
# "size = 1.00 MiB -> 0.28 MiB (q4_K)"; the second half is missing where a tensor stays as it is.
QUANTIZED_TENSOR: Final = re.compile(rb"\[ *\d+/ *\d+\] (.+?) +- \[[^\[]*type = *(\w+), $", re.DOTALL)
QUANTIZED_TO: Final = re.compile(rb"size = .*MiB \((\w+)\)\n$")
