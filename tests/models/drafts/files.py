"""Small model files with vocabularies to compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from cpuchat.base import paths
from cpuchat.models.synthetic.model import from_array, write_gguf

WORDS = [f"w{i}" for i in range(300)]


def header_file(
    path: Path,
    tokens: list[str] | None = None,
    *,
    weights: int = 8,
    kind: str = "F32",
    facts: dict[str, Any] | None = None,
    **more: Any,
) -> Path:
    """Write a file with a byte-pair vocabulary and one tensor of `weights` values, F32 or F16. `more` sets or (None)
    removes keys: `bos_token_id` is tokenizer.ggml.bos_token_id; `facts` are other keys."""
    architecture = more.pop("architecture", "llama")
    tokenizer: dict[str, Any] = {
        "model": "gpt2", "pre": "gpt-2", "tokens": WORDS if tokens is None else tokens, "merges": ["a b"],
        "bos_token_id": 1, "eos_token_id": 2, "add_bos_token": False,
    } | more  # fmt: skip
    metadata = {"general.architecture": architecture, "general.name": path.stem, f"{architecture}.block_count": 1}
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in tokenizer.items() if value is not None}
    metadata |= facts or {}
    return write_gguf(
        path, metadata, [from_array("output_norm.weight", np.ones(weights, f"<f{4 if kind == 'F32' else 2}"), kind)]
    )


def write_catalog(*models: tuple[str, str, float, list[str]]) -> Path:
    """Write the user's catalog with these models: (id, name, parameters in billions, drafts)."""
    entries = [
        f'[[model]]\nid = "{id}"\nname = "{name}"\nfamily = "Test"\nparams = {params}\n'
        f'repos = ["owner/{name}-GGUF"]\nsizes = {{ Q8_0 = 0.001 }}\ndrafts = {drafts}\n'
        for id, name, params, drafts in models
    ]
    file = paths.user_catalog()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(entries))
    return file
