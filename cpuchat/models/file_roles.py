"""What a GGUF file of a repository is, as its name tells: the model, or something that is used with it. Pure.

Heads predict further tokens from what the model computes, and cannot answer by themselves. Publishers put them beside
the model, mostly with a prefix (`eagle3-gpt-oss-20b-Q8_0`, `mtp-Qwen3.5-27B-Q8_0`: ggml-org) or into a folder (`MTP/`).
A model that holds such a head itself has `MTP` further behind in its name and is a model.
"""

from __future__ import annotations

import re
from typing import Literal

from cpuchat.models.quantization_names import quantization_of

Role = Literal["model", "head", "projector", "imatrix"]

_HEAD = re.compile(r"mtp(?![a-z0-9])|(?:.*[^a-z0-9])?(?:eagle-?3|dflash|dspark)(?![a-z0-9])", re.IGNORECASE)
_HEADS = frozenset({"mtp", "eagle3", "eagle-3", "dflash", "dspark"})


def role_of(path: str) -> Role:
    """Of the file at `path` in its repository, with or without `.gguf`. "projector": the image or audio part of a
    model; "imatrix": weights for quantizing."""
    *folders, name = path.lower().removesuffix(".gguf").split("/")
    if "mmproj" in name:
        return "projector"
    if "imatrix" in name and not quantization_of(path):
        return "imatrix"
    if _HEAD.match(name) or _HEADS.intersection(folders):
        return "head"
    return "model"
