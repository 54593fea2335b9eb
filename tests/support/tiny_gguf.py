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
import numpy.typing as npt

from tests.support import tiny_attention
from tests.support.tiny_layers import D_CONV, D_STATE, DELTA, DT_RANK, Layers, add_sizes

Architecture = Literal["llama", "mamba", "jamba", "lfm2", "nemotron_h", "qwen35", "gemma3", "deepseek2"]

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

MERGES = ("t h", "th e", "Ġ the", "i n", "a n", "e r", "r e", "o n", "l l", "h e", "e l")
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")

_LIKELY, _NEVER = 0.0, -1e3


def byte_symbols() -> list[str]:
    """Return the 256 printable stand-ins of GPT-2's byte-level BPE, by byte value."""
    kept = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    stand_ins = iter(range(0x100, 0x200))
    return [chr(b) if b in kept else chr(next(stand_ins)) for b in range(256)]


def vocabulary() -> list[str]:
    """Return all tokens in the order of their ids: bytes 0-255, merged tokens, special tokens."""
    return [*byte_symbols(), *(m.replace(" ", "") for m in MERGES), *SPECIALS]


def write_tiny_gguf(
    path: Path,
    *,
    with_template: bool = True,
    template: str = CHATML,
    arch: Architecture = "llama",
    n_ctx_train: int = 4096,
    n_embd: int = 64,
    n_layer: int = 2,
    n_head: int = 4,
    n_ff: int = 128,
    eos_bias: float = _NEVER,
    likely: str | None = None,
    window: int = tiny_attention.WINDOW,
    gain: float | None = None,
) -> Path:
    """Write a model to `path` and return it.

    `arch` "mamba" makes a recurrent one (its state cannot be rolled back), the others hybrids of attention and Mamba
    ("jamba"), short convolutions ("lfm2"), Mamba-2 ("nemotron_h") or gated delta nets ("qwen35"). "gemma3" has sliding
    windows of `window` tokens, "deepseek2" latent attention and a mixture of experts. `eos_bias` 0 makes `<|im_end|>`
    as likely as a letter. `likely` names the only characters that it writes (default: printable ASCII). With a `gain`
    of 2 to 4 the layers outweigh the newest token and their states fade slowly: answers depend on the whole context.
    Larger `n_embd`/`n_layer` make it slow enough to be stopped in the middle of something."""
    rng = np.random.default_rng(0)
    tokens = vocabulary()
    n_vocab = len(tokens)
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("tiny")
    writer.add_context_length(n_ctx_train)
    writer.add_embedding_length(n_embd)
    writer.add_block_count(n_layer)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_vocab_size(n_vocab)

    embeddings = (rng.standard_normal((n_vocab, n_embd)) * 0.5).astype(np.float32)
    embeddings[:, 0] = 8.0
    writer.add_tensor("token_embd.weight", embeddings)
    norm = "token_embd_norm" if arch == "lfm2" else "output_norm"
    writer.add_tensor(f"{norm}.weight", np.ones(n_embd, dtype=np.float32))
    output = (rng.standard_normal((n_vocab, n_embd)) * 0.6).astype(np.float32)
    output[:, 0] = _biases(tokens, likely, eos_bias)
    writer.add_tensor("output.weight", output)

    layers = Layers(writer, rng, n_embd, n_ff, n_head, DELTA, gain)
    if arch == "gemma3":
        writer.add_sliding_window(window)
    _ARCHITECTURES[arch](writer, layers, n_layer, n_embd, n_head, n_ff)

    _add_tokenizer(writer, tokens)
    if with_template:
        writer.add_chat_template(template)

    finish(writer)
    return path


def _biases(tokens: list[str], likely: str | None, eos_bias: float) -> npt.NDArray[np.float32]:
    """Return how likely each token is whatever the context."""
    biases = np.full(len(tokens), _NEVER, np.float32)
    letters = [likely is None or s in likely for s in map(chr, range(32, 127))]
    biases[32:127] = np.where(letters, _LIKELY, _NEVER)
    if likely is None:
        biases[256 : 256 + len(MERGES)] = _LIKELY
    biases[tokens.index("<|im_end|>")] = eos_bias
    return biases


def _add_tokenizer(writer: gguf.GGUFWriter, tokens: list[str]) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_merges(list(MERGES))
    special = gguf.TokenType.CONTROL
    writer.add_token_types([special if t in SPECIALS else gguf.TokenType.NORMAL for t in tokens])
    writer.add_bos_token_id(tokens.index("<|endoftext|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_add_bos_token(False)


def finish(writer: gguf.GGUFWriter) -> None:
    """Write everything that was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _llama(writer: gguf.GGUFWriter, layers: Layers, n_layer: int, n_embd: int, n_head: int, n_ff: int) -> None:
    add_sizes(writer, n_embd, n_head, n_ff)
    for i in range(n_layer):
        layers.ones(f"blk.{i}.attn_norm.weight", n_embd)
        layers.ones(f"blk.{i}.ffn_norm.weight", n_embd)
        layers.attention(i)
        layers.feed_forward(i)


def _mamba(writer: gguf.GGUFWriter, layers: Layers, n_layer: int, n_embd: int, n_head: int, n_ff: int) -> None:
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    _add_ssm(writer, n_embd)
    for i in range(n_layer):
        layers.ones(f"blk.{i}.attn_norm.weight", n_embd)
        layers.mamba(i)


def _jamba_or_lfm2(writer: gguf.GGUFWriter, layers: Layers, n_layer: int, n_embd: int, n_head: int, n_ff: int) -> None:
    """Add layers; every second one has attention, without positions in Jamba."""
    is_jamba = writer.arch == "jamba"
    writer.add_head_count(n_head)
    writer.add_head_count_kv([n_head * (i % 2) for i in range(n_layer)])
    writer.add_feed_forward_length(n_ff)
    if is_jamba:
        _add_ssm(writer, n_embd)
    else:
        writer.add_shortconv_l_cache(D_CONV)
    for i in range(n_layer):
        layers.ones(f"blk.{i}.attn_norm.weight", n_embd)
        layers.ones(f"blk.{i}.ffn_norm.weight", n_embd)
        if i % 2:
            layers.attention(i)
            if not is_jamba:
                layers.head_norms(i)
        elif is_jamba:
            layers.mamba(i, normed=True)
        else:
            layers.short_convolution(i)
        layers.feed_forward(i)


def _nemotron_h(writer: gguf.GGUFWriter, layers: Layers, n_layer: int, n_embd: int, n_head: int, n_ff: int) -> None:
    """Add layers of one block each: Mamba-2, attention and feed-forward in turn."""
    writer.add_head_count(n_head)
    writer.add_head_count_kv([n_head * (i % 3 == 1) for i in range(n_layer)])
    writer.add_feed_forward_length([n_ff * (i % 3 == 2) for i in range(n_layer)])
    writer.add_layer_norm_eps(1e-5)
    _add_ssm(writer, n_embd)
    writer.add_ssm_group_count(1)
    for i in range(n_layer):
        layers.ones(f"blk.{i}.attn_norm.weight", n_embd)
        match i % 3:
            case 0:
                layers.mamba2(i)
            case 1:
                layers.attention(i)
            case _:
                layers.feed_forward(i, gated=False)


def _qwen35(writer: gguf.GGUFWriter, layers: Layers, n_layer: int, n_embd: int, n_head: int, n_ff: int) -> None:
    """Add layers; every second one has attention."""
    add_sizes(writer, n_embd, n_head, n_ff, names_heads=True)
    writer.add_rope_dimension_sections([n_embd // n_head // 2, 0, 0, 0])
    writer.add_full_attention_interval(2)
    writer.add_ssm_conv_kernel(D_CONV)
    writer.add_ssm_inner_size(layers.delta_heads * layers.delta_dim)
    writer.add_ssm_state_size(layers.delta_dim)
    writer.add_ssm_time_step_rank(layers.delta_heads)
    writer.add_ssm_group_count(layers.delta_heads)
    for i in range(n_layer):
        layers.ones(f"blk.{i}.attn_norm.weight", n_embd)
        layers.ones(f"blk.{i}.post_attention_norm.weight", n_embd)
        if i % 2:
            layers.gated_attention(i)
        else:
            layers.delta_net(i)
        layers.feed_forward(i)


def _add_ssm(writer: gguf.GGUFWriter, n_embd: int) -> None:
    writer.add_ssm_conv_kernel(D_CONV)
    writer.add_ssm_inner_size(2 * n_embd)
    writer.add_ssm_state_size(D_STATE)
    writer.add_ssm_time_step_rank(DT_RANK)


_ARCHITECTURES = {
    "llama": _llama,
    "mamba": _mamba,
    "jamba": _jamba_or_lfm2,
    "lfm2": _jamba_or_lfm2,
    "nemotron_h": _nemotron_h,
    "qwen35": _qwen35,
    "gemma3": tiny_attention.gemma3,
    "deepseek2": tiny_attention.deepseek2,
}
