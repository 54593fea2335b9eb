"""The files that are measured: synthetic models of real shapes, made once and kept in work/models."""

from __future__ import annotations

from pathlib import Path

from common import WORK, say

from tests.support.pair_files import write_pair
from tests.support.shapes import shape_of, word

FOLDER = WORK / "models"


def model(shape: str, quantization: str) -> Path:
    """A model whose next token is a fixed function of the current one, round a cycle of words.

    Such a model never ends by itself, so every answer has the length that is asked for, and its logits have one clear
    winner, so nothing depends on rounding.
    """
    file = FOLDER / f"cycle-{shape}-{quantization}.gguf"
    if not file.is_file():
        say(f"writing {file.name}")
        file.parent.mkdir(parents=True, exist_ok=True)
        write_pair(file, None, 1.0, target=shape_of(shape), quant=quantization)
    return file


def words(count: int, salt: int) -> str:
    """A prompt of exactly `count` tokens, another one from the first word on for each `salt` (nothing is reused)."""
    return "".join(word(1000 + (salt * 7919 + i * 13) % 100_000) for i in range(count))
