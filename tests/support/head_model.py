"""Models of Qwen3.5's architecture with a head that predicts a further token: right on a known share of the tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from cpuchat.models.gguf.parse import BY_NAME
from cpuchat.models.synthetic.model import (
    FIRST_WORD,
    Shape,
    TensorSource,
    from_array,
    generator,
    metadata,
    random_tensor,
    write_gguf,
)
from tests.support.pair_files import draft_token_table, inverse_of, next_token_table, sign_tensor, write_pair

_CONV = 4


@dataclass(frozen=True)
class HybridShape:
    """Sizes of a model in which one of `every` so many layers has attention; the others have a recurrent state of
    `n_state_head` heads with `state` values each. `n_mtp`: MTP layers."""

    n_layer: int = 2
    n_embd: int = 256
    n_ff: int = 256
    n_vocab: int = 2048
    n_head: int = 4
    n_head_kv: int = 4
    head: int = 64
    every: int = 2
    n_state_head: int = 4
    state: int = 32
    n_mtp: int = 1


TINY = HybridShape()


def write_head_model(
    path: Path,
    alpha: float,
    *,
    head_path: Path | None = None,
    shape: HybridShape = TINY,
    quant: str = "F32",
    weight: float = 1e-3,
    left_out: bool = False,
) -> Path:
    """Write a model whose next token is `next_token_table(n_vocab)` of the last one, and whose head predicts
    `draft_token_table(n_vocab, alpha)` of the token that it is given. Layers add `weight` times noise. `quant`: the
    type of matrices. `head_path`: the head goes into a file of its own; `left_out`: into none, and the model's header
    still names it."""
    table, n_embd = next_token_table(shape.n_vocab), shape.n_embd
    codes = generator(0, "head model").integers(0, 256, (shape.n_vocab + FIRST_WORD, n_embd // 8), dtype=np.uint8)
    aliases = np.arange(shape.n_vocab)
    aliases[:FIRST_WORD] = inverse_of(table)[table[:FIRST_WORD]]  # as `pair_files`: specials lead into the cycle
    plain = _plain_shape(shape)

    def leading_to(name: str, tokens: np.ndarray) -> TensorSource:
        """Return the output matrix that gives the token `tokens[t]` after t."""
        rows = inverse_of(tokens)
        rows[rows < 0] = shape.n_vocab + np.arange(np.sum(rows < 0))  # nothing leads to these
        return sign_tensor(name, plain, quant, codes, rows, n_embd**-0.5)

    both = [
        sign_tensor("token_embd.weight", plain, quant, codes, aliases, 1.0),
        from_array("output_norm.weight", np.ones(n_embd, np.float32)),
        leading_to("output.weight", table),
    ]
    layers = [_layer(i, shape, quant, weight, has_attention=i % shape.every == shape.every - 1)
              for i in range(shape.n_layer)]  # fmt: skip
    tensors = [*both, *(tensor for layer in layers for tensor in layer)]
    join = np.concatenate([np.eye(n_embd), np.zeros((n_embd, n_embd))], axis=1)
    of_head: list[TensorSource] = []
    for layer in range(shape.n_layer, shape.n_layer + shape.n_mtp):
        nextn = f"blk.{layer}.nextn"
        of_head += [
            *_layer(layer, shape, quant, weight, has_attention=True),
            from_array(f"{nextn}.eh_proj.weight", join.astype(np.float16), "F16"),
            from_array(f"{nextn}.enorm.weight", np.ones(n_embd, np.float32)),
            from_array(f"{nextn}.hnorm.weight", np.ones(n_embd, np.float32)),
            leading_to(f"{nextn}.shared_head_head.weight", draft_token_table(shape.n_vocab, alpha)),
        ]
    if head_path is None:
        return write_gguf(path, _metadata(shape, quant, shape.n_mtp), tensors if left_out else [*tensors, *of_head])
    write_gguf(head_path, _metadata(shape, quant, shape.n_mtp), [*both, *of_head])
    return write_gguf(path, _metadata(shape, quant), tensors)


def _plain_shape(shape: HybridShape, n_mtp: int = 0) -> Shape:
    return Shape(
        name="head", architecture="qwen35", n_layer=shape.n_layer + n_mtp, n_embd=shape.n_embd,  # type: ignore[arg-type]
        n_head=shape.n_head, n_head_kv=shape.n_head_kv, n_ff=shape.n_ff, n_vocab=shape.n_vocab, head=shape.head,
    )  # fmt: skip


def _metadata(shape: HybridShape, quant: str, n_mtp: int = 0) -> dict[str, Any]:
    more: dict[str, Any] = {
        "full_attention_interval": shape.every,
        "rope.dimension_sections": np.array([shape.head // 2, 0, 0, 0], np.int32),
        "ssm.conv_kernel": _CONV, "ssm.inner_size": shape.n_state_head * shape.state, "ssm.state_size": shape.state,
        "ssm.time_step_rank": shape.n_state_head, "ssm.group_count": shape.n_state_head,
    }  # fmt: skip
    if n_mtp:
        more["nextn_predict_layers"] = n_mtp
    found = metadata(_plain_shape(shape, n_mtp), quant, "head")
    return found | {f"qwen35.{key}": value for key, value in more.items()}


def write_eagle_pair(path: Path, head_path: Path, alpha: float, *, n_vocab: int = 2048, n_said: int = 0) -> None:
    """Write a model of Llama's architecture, and an EAGLE-3 head for it whose first token is right with rate `alpha`;
    `n_said`: which says only every other token, of the first so many, as trained heads with few of their own (`d2t`).
    The model's hidden state at p is the code of the token there, so the head's output matrix leads two tokens on. Fed
    its own hidden state, it says the same again: further tokens are wrong."""
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

    zeros, rows = np.zeros((n_embd, n_embd), np.float32), _matching(codes, twice)
    said = np.arange(0, n_said, 2)
    output = [from_array("output.weight", rows[said] if n_said else rows)]
    output += [from_array("d2t", said, "I64")] if n_said else []
    tensors = [
        from_array("fc.weight", np.concatenate([zeros, np.eye(n_embd, dtype=np.float32), zeros], axis=1)),
        ones("output_norm.weight"), *output,
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


def _layer(i: int, shape: HybridShape, quant: str, weight: float, *, has_attention: bool) -> Iterator[TensorSource]:
    h, inner, q = shape.n_embd, shape.n_state_head * shape.state, shape.n_head * shape.head
    kv = shape.n_head_kv * shape.head
    norms = {"attn_norm.weight": h, "post_attention_norm.weight": h}
    matrices = {"ffn_gate": (h, shape.n_ff), "ffn_up": (h, shape.n_ff), "ffn_down": (shape.n_ff, h)}
    if has_attention:
        norms |= {"attn_q_norm.weight": shape.head, "attn_k_norm.weight": shape.head}
        matrices |= {"attn_q": (h, 2 * q), "attn_k": (h, kv), "attn_v": (h, kv), "attn_output": (q, h)}
    else:
        norms |= {"ssm_norm.weight": shape.state, "ssm_dt.bias": shape.n_state_head}
        matrices |= {"attn_qkv": (h, 3 * inner), "attn_gate": (h, inner), "ssm_out": (inner, h)}
        matrices |= {name: (h, shape.n_state_head) for name in ("ssm_beta", "ssm_alpha")}
        matrices["ssm_conv1d"] = (_CONV, 3 * inner)
        yield from_array(f"blk.{i}.ssm_a", -np.ones(shape.n_state_head, np.float32))
    for name, n in norms.items():
        yield from_array(f"blk.{i}.{name}", np.ones(n, np.float32))
    for name, size in matrices.items():
        scale = weight if name in ("attn_output", "ssm_out", "ffn_down") else 1.0
        kind = "F32" if size[0] % BY_NAME[quant].block else quant
        yield random_tensor(f"blk.{i}.{name}.weight", size, kind, 0, scale / size[0] ** 0.5)
