"""Models of `tiny_gguf` whose attention reads less than all of the KV cache: sliding windows, latent attention."""

from __future__ import annotations

import gguf

from tests.support.tiny_layers import Layers, add_sizes

WINDOW = 32
"""Gemma 3: tokens that every second layer attends to, unless told otherwise; the others attend to all."""
LATENT, ROPE, NOPE, VALUE = 32, 16, 16, 16
"""DeepSeek 2: the compressed row, the part of it with positions, and sizes of a K and a V head."""
EXPERTS, USED = 8, 2


def gemma3(writer: gguf.GGUFWriter, layers: Layers, n_layer: int, n_embd: int, n_head: int, n_ff: int) -> None:
    add_sizes(writer, n_embd, n_head, n_ff, names_heads=True)
    writer.add_sliding_window_pattern([i % 2 == 0 for i in range(n_layer)])
    for i in range(n_layer):
        for norm in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            layers.ones(f"blk.{i}.{norm}.weight", n_embd)
        layers.attention(i)
        layers.head_norms(i)
        layers.feed_forward(i)


def deepseek2(writer: gguf.GGUFWriter, layers: Layers, n_layer: int, n_embd: int, n_head: int, n_ff: int) -> None:
    """Add layers: the first one is dense, the others have shared and routed experts; the last one predicts further."""
    writer.add_head_count(n_head)
    writer.add_head_count_kv(1)
    writer.add_feed_forward_length(n_ff)
    writer.add_leading_dense_block_count(1)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(USED)
    writer.add_expert_shared_count(1)
    writer.add_expert_feed_forward_length(n_ff // 2)
    writer.add_nextn_predict_layers(1)
    writer.add_q_lora_rank(LATENT)
    writer.add_kv_lora_rank(LATENT)
    writer.add_key_length(LATENT + ROPE)
    writer.add_value_length(LATENT)
    writer.add_key_length_mla(NOPE + ROPE)
    writer.add_value_length_mla(VALUE)
    writer.add_rope_dimension_count(ROPE)
    for i in range(n_layer):
        layers.ones(f"blk.{i}.attn_norm.weight", n_embd)
        layers.ones(f"blk.{i}.ffn_norm.weight", n_embd)
        layers.latent_attention(i, n_head, LATENT, ROPE, NOPE, VALUE)
        if i == 0:
            layers.feed_forward(i)
        else:
            layers.experts(i, EXPERTS, n_ff // 2)
    layers.predict_further(n_layer - 1)
