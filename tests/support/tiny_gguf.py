"""Writes small GGUF models with random weights: real files for a real llama.cpp, made in milliseconds.

The vocabulary is byte-level (one token for each byte, a few merges, ChatML markers, `<think>`), so every text can be
tokenised and a text can be tokenised in more than one way. Dimension 0 of the residual stream is held positive, and
the output layer uses it as a bias: only printable ASCII is ever likely, and the end of generation never is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import gguf
import numpy as np

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

MERGES = ("t h", "th e", "Ġ the", "i n", "a n", "e r", "r e", "o n", "l l", "h e", "e l")
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")

_LIKELY, _NEVER = 0.0, -1e3


def byte_symbols() -> list[str]:
    """The 256 printable stand-ins of GPT-2's byte-level BPE, by byte value."""
    kept = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    stand_ins = iter(range(0x100, 0x200))
    return [chr(b) if b in kept else chr(next(stand_ins)) for b in range(256)]


def vocabulary() -> list[str]:
    """All tokens in the order of their ids: bytes 0-255, merged tokens, special tokens."""
    return [*byte_symbols(), *(m.replace(" ", "") for m in MERGES), *SPECIALS]


def write_tiny_gguf(
    path: Path,
    *,
    with_template: bool = True,
    template: str = CHATML,
    arch: Literal["llama", "mamba"] = "llama",
    n_ctx_train: int = 4096,
    n_embd: int = 64,
    n_layer: int = 2,
    n_head: int = 4,
    n_ff: int = 128,
    seed: int = 0,
    eos_bias: float = _NEVER,
    likely: str | None = None,
    name: str = "tiny",
    extra: dict[str, int] | None = None,
) -> Path:
    """Write a model to `path` and return it.

    `arch` "mamba" makes a recurrent one (its state cannot be rolled back). `eos_bias` 0 makes `<|im_end|>` as likely
    as a letter. `likely` names the only characters that it writes (default: printable ASCII).
    `extra` adds integer header values.
    Larger `n_embd`/`n_layer` make it slow enough to be stopped in the middle of something.
    """
    rng = np.random.default_rng(seed)
    tokens = vocabulary()
    n_vocab = len(tokens)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name(name)
    writer.add_context_length(n_ctx_train)
    writer.add_embedding_length(n_embd)
    writer.add_block_count(n_layer)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_vocab_size(n_vocab)
    for key, value in (extra or {}).items():
        writer.add_uint32(key, value)

    def add(tensor: str, *shape: int, scale: float = 0.3) -> None:
        writer.add_tensor(tensor, (rng.standard_normal(shape) * scale).astype(np.float32))

    embeddings = (rng.standard_normal((n_vocab, n_embd)) * 0.5).astype(np.float32)
    embeddings[:, 0] = 8.0
    writer.add_tensor("token_embd.weight", embeddings)
    writer.add_tensor("output_norm.weight", np.ones(n_embd, dtype=np.float32))
    output = (rng.standard_normal((n_vocab, n_embd)) * 0.6).astype(np.float32)
    output[:, 0] = _NEVER
    letters = [likely is None or s in likely for s in map(chr, range(32, 127))]
    output[32:127, 0] = np.where(letters, _LIKELY, _NEVER)
    if likely is None:
        output[256 : 256 + len(MERGES), 0] = _LIKELY
    output[tokens.index("<|im_end|>"), 0] = eos_bias
    writer.add_tensor("output.weight", output)

    if arch == "llama":
        writer.add_head_count(n_head)
        writer.add_head_count_kv(n_head)
        writer.add_feed_forward_length(n_ff)
        writer.add_rope_dimension_count(n_embd // n_head)
        for i in range(n_layer):
            writer.add_tensor(f"blk.{i}.attn_norm.weight", np.ones(n_embd, dtype=np.float32))
            writer.add_tensor(f"blk.{i}.ffn_norm.weight", np.ones(n_embd, dtype=np.float32))
            for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
                add(f"blk.{i}.{part}.weight", n_embd, n_embd, scale=1.2 / n_embd**0.5)
            add(f"blk.{i}.ffn_gate.weight", n_ff, n_embd, scale=1.0 / n_embd**0.5)
            add(f"blk.{i}.ffn_up.weight", n_ff, n_embd, scale=1.0 / n_embd**0.5)
            add(f"blk.{i}.ffn_down.weight", n_embd, n_ff, scale=1.0 / n_ff**0.5)
    else:
        d_conv, d_inner, d_state, dt_rank = 4, 2 * n_embd, 16, 8
        writer.add_feed_forward_length(0)
        writer.add_head_count(0)
        writer.add_ssm_conv_kernel(d_conv)
        writer.add_ssm_inner_size(d_inner)
        writer.add_ssm_state_size(d_state)
        writer.add_ssm_time_step_rank(dt_rank)
        for i in range(n_layer):
            writer.add_tensor(f"blk.{i}.attn_norm.weight", np.ones(n_embd, dtype=np.float32))
            add(f"blk.{i}.ssm_in.weight", 2 * d_inner, n_embd, scale=1.0 / n_embd**0.5)
            add(f"blk.{i}.ssm_conv1d.weight", d_inner, d_conv)
            add(f"blk.{i}.ssm_conv1d.bias", d_inner)
            add(f"blk.{i}.ssm_x.weight", dt_rank + 2 * d_state, d_inner, scale=1.0 / d_inner**0.5)
            add(f"blk.{i}.ssm_dt.weight", d_inner, dt_rank)
            add(f"blk.{i}.ssm_dt.bias", d_inner)
            decay = -np.tile(np.arange(1, d_state + 1, dtype=np.float32), (d_inner, 1))
            writer.add_tensor(f"blk.{i}.ssm_a", decay)
            writer.add_tensor(f"blk.{i}.ssm_d", np.ones(d_inner, dtype=np.float32))
            add(f"blk.{i}.ssm_out.weight", n_embd, d_inner, scale=1.0 / d_inner**0.5)

    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_merges(list(MERGES))
    special = gguf.TokenType.CONTROL
    writer.add_token_types([special if t in SPECIALS else gguf.TokenType.NORMAL for t in tokens])
    writer.add_bos_token_id(tokens.index("<|endoftext|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_add_bos_token(False)
    if with_template:
        writer.add_chat_template(template)

    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
