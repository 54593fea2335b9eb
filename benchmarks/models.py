"""The files that are measured: synthetic models of real shapes, made once and kept in work/models."""

from __future__ import annotations

from pathlib import Path

import msgspec
from common import WORK, say

from cpuchat.models.synthetic.model import shape_of, word, write_model
from cpuchat.models.synthetic.pair import write_pair

FOLDER = WORK / "models"
SHAPES = ("0.5b", "1.5b")
QUANTIZATIONS = ("Q4_K_M", "Q8_0")


def model(shape: str, quantization: str, *, llama: bool = False) -> Path:
    """A model whose next token is a fixed function of the current one, round a cycle of words.

    Such a model never ends by itself, so every answer has the length that is asked for, and its logits have one clear
    winner, so nothing depends on rounding.
    It is a Qwen2, of which llama.cpp gives no hidden states to a draft head; with `llama` a Llama of the same sizes.
    """
    file = FOLDER / f"cycle-{shape}{'-llama' * llama}-{quantization}.gguf"
    if not file.is_file():
        say(f"writing {file.name}")
        file.parent.mkdir(parents=True, exist_ok=True)
        target = shape_of(shape)
        if llama:
            target = msgspec.structs.replace(target, architecture="llama")
        write_pair(file, None, 1.0, target=target, quant=quantization)
    return file


def noise_model(shape: str, quantization: str) -> Path:
    """A model of random weights; its logits are noise, which is the most work for a sampler."""
    file = FOLDER / f"noise-{shape}-{quantization}.gguf"
    if not file.is_file():
        say(f"writing {file.name}")
        file.parent.mkdir(parents=True, exist_ok=True)
        write_model(file, shape, quantization)
    return file


def words(count: int, salt: int) -> str:
    """A prompt of exactly `count` tokens, another one from the first word on for each `salt` (nothing is reused)."""
    return "".join(word(1000 + (salt * 7919 + i * 13) % 100_000) for i in range(count))
