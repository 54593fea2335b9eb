"""Models of Qwen3.5's architecture with a head that predicts a further token: right on a known share of the tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from cpuchat.models.synthetic.model import (
    FIRST_WORD,
    Shape,
    TensorSource,
    from_array,
    generator,
    metadata,
    write_gguf,
)
from tests.support.pair_files import draft_token_table, inverse_of, next_token_table, write_pair

_CONV, _STATE = 4, 32


def write_head_model(
    path: Path,
    alpha: float,
    *,
    head_path: Path | None = None,
    n_embd: int = 256,
    n_layer: int = 2,
    n_vocab: int = 2048,
    weight: float = 1e-3,
) -> Path:
    """Write a model whose next token is `next_token_table(n_vocab)` of the last one, and whose head predicts
    `draft_token_table(n_vocab, alpha)` of the token that it is given. Layers add `weight` times noise.
    `head_path`: the head goes into a file of its own."""
    table, drafted = next_token_table(n_vocab), draft_token_table(n_vocab, alpha)
    rng = generator(0, "head model")
    codes = rng.choice(np.array([-1, 1], np.float32), (n_vocab, n_embd))
    codes[:FIRST_WORD] = codes[inverse_of(table)[table[:FIRST_WORD]]]  # as `pair_files`: specials lead into the cycle
    head = np.concatenate([np.eye(n_embd, dtype=np.float32), np.zeros((n_embd, n_embd), np.float32)], axis=1)
    both = [
        from_array("token_embd.weight", codes),
        from_array("output_norm.weight", np.ones(n_embd, np.float32)),
        from_array("output.weight", _matching(codes, table)),
    ]
    layers = [_layer(i, rng, n_embd, weight, has_attention=i % 2 == 1) for i in range(n_layer)]
    tensors = [*both, *(tensor for layer in layers for tensor in layer)]
    nextn = f"blk.{n_layer}.nextn"
    of_head = [
        *_layer(n_layer, rng, n_embd, weight, has_attention=True),
        from_array(f"{nextn}.eh_proj.weight", head),
        from_array(f"{nextn}.enorm.weight", np.ones(n_embd, np.float32)),
        from_array(f"{nextn}.hnorm.weight", np.ones(n_embd, np.float32)),
        from_array(f"{nextn}.shared_head_head.weight", _matching(codes, drafted)),
    ]
    if head_path is None:
        return write_gguf(path, _metadata(n_embd, n_layer, n_vocab, n_head_layer=1), [*tensors, *of_head])
    write_gguf(head_path, _metadata(n_embd, n_layer, n_vocab, n_head_layer=1), [*both, *of_head])
    return write_gguf(path, _metadata(n_embd, n_layer, n_vocab), tensors)


def _metadata(n_embd: int, n_layer: int, n_vocab: int, n_head_layer: int = 0) -> dict[str, Any]:
    shape = Shape(
        name="head", architecture="qwen35", n_layer=n_layer + n_head_layer, n_embd=n_embd,  # type: ignore[arg-type]
        n_head=4, n_head_kv=4, n_ff=256, n_vocab=n_vocab, head=n_embd // 4,
    )  # fmt: skip
    more: dict[str, Any] = {
        "full_attention_interval": 2, "rope.dimension_sections": np.array([n_embd // 8, 0, 0, 0], np.int32),
        "ssm.conv_kernel": _CONV, "ssm.inner_size": 4 * _STATE, "ssm.state_size": _STATE, "ssm.time_step_rank": 4,
        "ssm.group_count": 4,
    }  # fmt: skip
    if n_head_layer:
        more["nextn_predict_layers"] = n_head_layer
    return metadata(shape, "F32", "head") | {f"qwen35.{key}": value for key, value in more.items()}


def write_eagle_pair(path: Path, head_path: Path, alpha: float, *, n_vocab: int = 2048) -> None:
    """Write a model of Llama's architecture, and an EAGLE-3 head for it whose first token is right with rate `alpha`.

    The model's hidden state at p is the code of the token there, so the head's output matrix leads two tokens on. Fed
    its own hidden state, it says the same again: further tokens are wrong.
    """
    shape = Shape(
        name="tiny-llama", architecture="llama", n_layer=2, n_embd=256, n_head=4, n_head_kv=2, n_ff=512, n_vocab=n_vocab
    )
    write_pair(path, None, 1.0, target=shape, quant="F32", n_vocab=n_vocab)
    table = next_token_table(n_vocab)
    n_embd, rng = shape.n_embd, generator(1, "eagle")
    codes = next(one for one in gguf.GGUFReader(path).tensors if one.name == "token_embd.weight").data
    twice = draft_token_table(n_vocab, alpha)[table]
    own = {
        "general.architecture": "eagle3", "general.name": "eagle", "general.file_type": 0,
        "eagle3.context_length": 4096, "eagle3.block_count": 1, "eagle3.embedding_length": n_embd,
        "eagle3.feed_forward_length": 512, "eagle3.attention.head_count": 4, "eagle3.attention.head_count_kv": 2,
        "eagle3.rope.dimension_count": n_embd // 4, "eagle3.rope.freq_base": 1e6,
        "eagle3.attention.layer_norm_rms_epsilon": 1e-6, "eagle3.target_hidden_size": n_embd,
        "eagle3.target_layers": np.array([0, 1, 1], np.int32),
    }  # fmt: skip
    vocabulary = {key: value for key, value in metadata(shape, "F32", "").items() if key.startswith("tokenizer.")}

    def noise(name: str, *sizes: int) -> TensorSource:
        return from_array(name, (1e-3 * rng.standard_normal(sizes) / sizes[-1] ** 0.5).astype(np.float32))

    def ones(name: str) -> TensorSource:
        return from_array(name, np.ones(n_embd, np.float32))

    zeros = np.zeros((n_embd, n_embd), np.float32)
    tensors = [
        from_array("fc.weight", np.concatenate([zeros, np.eye(n_embd, dtype=np.float32), zeros], axis=1)),
        ones("output_norm.weight"), from_array("output.weight", _matching(codes, twice)),
        ones("blk.0.attn_norm.weight"), ones("blk.0.attn_norm_2.weight"),
        noise("blk.0.attn_q.weight", n_embd, 2 * n_embd),
        noise("blk.0.attn_k.weight", 128, 2 * n_embd), noise("blk.0.attn_v.weight", 128, 2 * n_embd),
        noise("blk.0.attn_output.weight", n_embd, n_embd), ones("blk.0.ffn_norm.weight"),
        noise("blk.0.ffn_gate.weight", 512, n_embd), noise("blk.0.ffn_up.weight", 512, n_embd),
        noise("blk.0.ffn_down.weight", n_embd, 512),
    ]  # fmt: skip
    write_gguf(head_path, own | vocabulary, tensors)


def _matching(codes: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Return the output matrix that gives the token `table[t]` after the code of t."""
    rows = codes[inverse_of(table)] / codes.shape[1] ** 0.5
    rows[:FIRST_WORD] = 0.0  # nothing leads to these
    return rows.astype(np.float32)


def _layer(i: int, rng: np.random.Generator, n_embd: int, weight: float, *, has_attention: bool) -> list[TensorSource]:
    def noise(name: str, *shape: int, scale: float = 1.0) -> TensorSource:
        values = rng.standard_normal(shape) * scale / shape[-1] ** 0.5
        return from_array(f"blk.{i}.{name}", values.astype(np.float32))

    def ones(name: str, n: int) -> TensorSource:
        return from_array(f"blk.{i}.{name}.weight", np.ones(n, np.float32))

    found = [ones("attn_norm", n_embd), ones("post_attention_norm", n_embd)]
    if has_attention:
        head = n_embd // 4
        found += [
            noise("attn_q.weight", 2 * n_embd, n_embd), noise("attn_k.weight", n_embd, n_embd),
            noise("attn_v.weight", n_embd, n_embd), noise("attn_output.weight", n_embd, n_embd, scale=weight),
            ones("attn_q_norm", head), ones("attn_k_norm", head),
        ]  # fmt: skip
    else:
        inner = 4 * _STATE
        found += [
            noise("attn_qkv.weight", 3 * inner, n_embd), noise("attn_gate.weight", inner, n_embd),
            noise("ssm_conv1d.weight", 3 * inner, _CONV), from_array(f"blk.{i}.ssm_dt.bias", np.ones(4, np.float32)),
            from_array(f"blk.{i}.ssm_a", -np.ones(4, np.float32)), noise("ssm_beta.weight", 4, n_embd),
            noise("ssm_alpha.weight", 4, n_embd), ones("ssm_norm", _STATE),
            noise("ssm_out.weight", n_embd, inner, scale=weight),
        ]  # fmt: skip
    return [
        *found, noise("ffn_gate.weight", 256, n_embd), noise("ffn_up.weight", 256, n_embd),
        noise("ffn_down.weight", n_embd, 256, scale=weight),
    ]  # fmt: skip
