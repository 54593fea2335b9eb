"""Headers of published models are not refused: unusual shapes, as the converter of llama.cpp writes them."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest

from cpuchat.models.gguf.header import GGUFHeader, problems_of
from cpuchat.models.gguf.parse import LazyArray, TensorInfo

Shape = dict[str, int | str | list[int]]


def shape(layers: int, embd: int, heads: int | list[int], kv: int | list[int] | None, **more: int | str) -> Shape:
    """Return a header; `rope` and `key`: rotated and all dimensions of a head; `experts`, `used`, `groups`,
    `groups_used`."""
    names = {
        "rope": "rope.dimension_count", "key": "attention.key_length", "experts": "expert_count",
        "used": "expert_used_count", "groups": "expert_group_count", "groups_used": "expert_group_used_count",
        "scaling": "rope.scaling.type", "every": "full_attention_interval", "further": "nextn_predict_layers",
    }  # fmt: skip
    found: Shape = {"block_count": layers, "embedding_length": embd, "attention.head_count": heads}
    if kv is not None:
        found["attention.head_count_kv"] = kv
    return found | {names[name]: value for name, value in more.items()}


def some(layers: int, every: int, number: int, first: int = 0) -> list[int]:
    """Return `number` for one in so many layers, from layer `first` on; 0 for the others."""
    return [number if layer % every == first else 0 for layer in range(layers)]


PUBLISHED: dict[str, tuple[str, Shape]] = {
    "Llama 3.2 3B": ("llama", shape(28, 3072, 24, 8, rope=128, key=128)),
    "SmolLM2 135M": ("llama", shape(30, 576, 9, 3, rope=64)),
    "Mixtral 8x7B": ("llama", shape(32, 4096, 32, 8, rope=128, experts=8, used=2)),
    "Mistral Nemo": ("llama", shape(40, 5120, 32, 8, rope=128, key=128)),
    "Llama 4 Scout": ("llama4", shape(48, 5120, 40, 8, rope=128, key=128, experts=16, used=1)),
    "Nemotron 49B": ("deci", shape(4, 8192, [64, 0, 64, 64], [8, 0, 8, 0], rope=128)),
    "Qwen2.5 0.5B": ("qwen2", shape(24, 896, 14, 2)),
    "Qwen3 0.6B": ("qwen3", shape(28, 1024, 16, 8, key=128)),
    "Qwen3 30B A3B": ("qwen3moe", shape(48, 2048, 32, 4, key=128, experts=128, used=8)),
    "Qwen3 Next 80B": ("qwen3next", shape(48, 2048, 16, 2, rope=64, key=256, experts=512, used=10, every=4)),
    "Qwen3.5 35B A3B": ("qwen35moe", shape(41, 2048, 16, 2, rope=64, key=256, experts=256, used=8, every=4, further=1)),
    "Gemma 3 1B": ("gemma3", shape(26, 1152, 4, 1, key=256)),
    "Gemma 3n E4B": ("gemma3n", shape(35, 2048, 8, 2, key=256)),
    "Gemma 4 26B": (
        "gemma4",
        shape(
            30, 2816, 16, [2 if layer % 6 == 5 else 8 for layer in range(30)], rope=512, key=512, experts=128, used=8
        ),
    ),
    "Phi 2": ("phi2", shape(32, 2560, 32, 32, rope=32)),
    "Phi 4 mini": ("phi3", shape(32, 3072, 24, 8, rope=96, scaling="longrope")),
    "StableLM 2 12B": ("stablelm", shape(40, 5120, 32, 8, rope=40)),
    "DeepSeek V2 lite": ("deepseek2", shape(27, 2048, 16, 1, rope=64, key=576, experts=64, used=6, scaling="yarn")),
    "DeepSeek V2 before MLA": ("deepseek2", shape(27, 2048, 16, 16, rope=64, key=192, experts=64, used=6)),
    "DeepSeek V3": (
        "deepseek2",
        shape(61, 7168, 128, 1, rope=64, key=576, experts=256, used=8, groups=8, groups_used=4, scaling="yarn"),
    ),
    "Kimi K2": (
        "deepseek2",
        shape(61, 7168, 64, 1, rope=64, key=576, experts=384, used=8, groups=1, groups_used=1, scaling="yarn"),
    ),
    "DeepSeek OCR": ("deepseek2-ocr", shape(12, 1280, 10, 10, rope=0, experts=64, used=6)),
    "Kimi Linear": ("kimi-linear", shape(27, 2304, 32, some(27, 4, 1, 3), rope=64, key=576, experts=256, used=8)),
    "GLM 4 9B": ("chatglm", shape(40, 4096, 32, 2, rope=64)),
    "GLM 4.5 Air": (
        "glm4moe",
        shape(47, 4096, 96, 8, rope=64, key=128, experts=128, used=8, groups=1, groups_used=1, further=1),
    ),
    "MiniCPM 3": ("minicpm3", shape(62, 2560, 40, 40, rope=32, key=96, scaling="longrope")),
    "MiniMax M2": ("minimax-m2", shape(62, 3072, 48, 8, rope=64, key=128, experts=256, used=8)),
    "gpt-oss 20B": ("gpt-oss", shape(24, 2880, 64, 8, rope=64, key=64, experts=32, used=4, scaling="yarn")),
    "Step 3.5": ("step35", shape(4, 4096, [64, 96, 96, 96], 8, key=128, experts=288, used=8)),
    "Hunyuan dense": ("hunyuan-dense", shape(32, 4096, 32, 8, key=128, experts=1, used=1)),
    "Falcon 7B": ("falcon", shape(32, 4544, 71, 1)),
    "Falcon H1 3B": ("falcon-h1", shape(32, 2560, 10, 2, key=128)),
    "StarCoder": ("starcoder", shape(40, 6144, 48, 1)),
    "GPT-2": ("gpt2", shape(12, 768, 12, None)),
    "BLOOM": ("bloom", shape(30, 4096, 32, 32)),
    "OpenELM 270M": ("openelm", shape(3, 1280, [12, 16, 20], [3, 4, 5], rope=64, key=64)),
    "Granite 4 H": ("granitehybrid", shape(40, 1536, 12, some(40, 10, 4, 5), experts=0, used=0)),
    "Jamba": ("jamba", shape(32, 4096, 32, some(32, 8, 8, 4), experts=16, used=2)),
    "Nemotron H": ("nemotron_h", shape(52, 4096, 32, some(52, 13, 8, 7), rope=128)),
    "LFM2": ("lfm2", shape(16, 2048, 32, some(16, 3, 8, 2))),
    "PLaMo 2": ("plamo2", shape(16, 2048, some(16, 2, 16, 1), some(16, 2, 1, 1))),
    "Mamba": ("mamba", shape(48, 1536, 0, None)),
    "RWKV 7": ("rwkv7", shape(24, 2048, 0, None)),
    "T5": ("t5", shape(12, 768, 12, None, key=64)),
    "BGE small": ("bert", shape(12, 384, 12, None)),
}


def header(arch: str, values: Shape) -> GGUFHeader:
    metadata: dict[str, Any] = {"general.architecture": arch}
    for key, value in values.items():
        array = isinstance(value, list)
        metadata[f"{arch}.{key}"] = LazyArray(5, len(value), struct.pack(f"<{len(value)}i", *value)) if array else value
    layers = values["block_count"]
    assert isinstance(layers, int)
    tensors = [TensorInfo(f"blk.{i}.attn_norm.weight", (32,), "F32", 128 * i, 128) for i in range(layers)]
    return GGUFHeader(3, metadata, tensors, 0, 0, 32, Path("m.gguf"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes_are_let_through(name: str) -> None:
    assert list(problems_of(header(*PUBLISHED[name]))) == []
