"""PyTorch weights to GGUF: F32 for checks and for llama.cpp's own quantizer, Q8_0 directly."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from tokenizers import Tokenizer

from demo.model import Model
from demo.tokenizer import CHAT_TEMPLATE, END_OF_TEXT, IM_END, PRE, SPECIAL

FILE_TYPES = {Type.F32: gguf.LlamaFileType.ALL_F32, Type.Q8_0: gguf.LlamaFileType.MOSTLY_Q8_0}


@dataclass(frozen=True)
class Card:
    """What the header says about a model."""

    name: str
    size_label: str
    description: str


TARGET_CARD = Card(
    "cpuchat demo 8M",
    "8M",
    "A toy that knows cpuchat's own manual, the basics of CPU inference, small sums and a few stories. "
    "Trained from scratch on text written for cpuchat. Not a general assistant.",
)
DRAFT_CARD = Card(
    "cpuchat demo draft 1M",
    "1M",
    "The draft model for cpuchat demo 8M: it guesses the tokens that the larger toy then checks. "
    "Distilled from it. Of no use alone.",
)


def write_gguf(model: Model, tokenizer: Tokenizer, card: Card, path: Path, kind: Type) -> None:
    """Writes `model` to `path`; matrices as `kind`, norms always as F32."""
    shape = model.shape
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(card.name)
    writer.add_description(card.description)
    writer.add_size_label(card.size_label)
    writer.add_author("cpuchat")
    writer.add_license("MIT")
    writer.add_languages(["en"])
    writer.add_tags(["cpuchat", "demo", "toy", "text-generation"])
    writer.add_file_type(FILE_TYPES[kind])
    if kind != Type.F32:
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.dim)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ff)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_layer_norm_rms_eps(shape.eps)
    writer.add_vocab_size(shape.vocab)
    _add_tokenizer(writer, tokenizer)
    for name, array in tensors(model).items():
        if array.ndim == 1 or kind == Type.F32:
            writer.add_tensor(name, array)
        else:
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors(model: Model) -> dict[str, np.ndarray]:
    """llama.cpp's tensor names to float32 arrays. The tied table is written once, as token_embd."""
    shape = model.shape
    found = {"token_embd.weight": model.embed.weight, "output_norm.weight": model.norm.weight}
    for i, block in enumerate(model.blocks):
        found |= {
            f"blk.{i}.attn_norm.weight": block.attn_norm.weight,
            f"blk.{i}.attn_q.weight": _pairs(block.q.weight, shape.heads),
            f"blk.{i}.attn_k.weight": _pairs(block.k.weight, shape.kv_heads),
            f"blk.{i}.attn_v.weight": block.v.weight,
            f"blk.{i}.attn_output.weight": block.o.weight,
            f"blk.{i}.ffn_norm.weight": block.ffn_norm.weight,
            f"blk.{i}.ffn_gate.weight": block.gate.weight,
            f"blk.{i}.ffn_up.weight": block.up.weight,
            f"blk.{i}.ffn_down.weight": block.down.weight,
        }
    return {name: tensor.detach().float().cpu().contiguous().numpy() for name, tensor in found.items()}


def _pairs(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows from "two halves per head" to neighbouring pairs, the order in which llama.cpp rotates."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    model = json.loads(tokenizer.to_str())["model"]
    by_id = sorted(model["vocab"], key=model["vocab"].__getitem__)
    kinds = [gguf.TokenType.CONTROL if token in SPECIAL else gguf.TokenType.NORMAL for token in by_id]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(PRE)
    writer.add_token_list(by_id)
    writer.add_token_types(kinds)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in model["merges"]])
    writer.add_bos_token_id(END_OF_TEXT)
    writer.add_eos_token_id(IM_END)
    writer.add_eot_token_id(IM_END)
    writer.add_pad_token_id(END_OF_TEXT)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)
