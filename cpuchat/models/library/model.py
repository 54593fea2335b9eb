"""One model on this machine, as plain data."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from cpuchat.costmodel.work import ModelWork

Source = Literal["demo", "huggingface", "folder"]


class HeaderSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a model's header for lists. Sizes in bytes, of all parts of a split model.

    `n_params_active` are the parameters that one token uses: all of them, except for experts that it is not sent to.
    `work` is that of its passes. A "head" only predicts further tokens for a model in
    another file. `damaged`: what is wrong with it, or why it cannot be loaded. `name` "": not a language model.
    """

    name: str = ""
    architecture: str = ""
    quantization: str = ""
    n_params: int = 0
    n_params_active: int = 0
    n_expert: int = 0
    n_expert_used: int = 0
    n_ctx_train: int = 0
    has_template: bool = False
    size: int = 0
    work: ModelWork | None = None
    kind: Literal["model", "head"] = "model"
    damaged: str | None = None


class LocalModel(HeaderSummary, frozen=True, kw_only=True):
    """One model on this machine.

    `path` is its first file, `parts` how many there are, `projector` the multimodal projector beside it. `repo` is
    "owner/name" for files of the Hugging Face cache, else "". `unfinished`: the share of a partial download (always
    `damaged`, too) that is here, 0 to 1; -1 when that is not known.

    `last_used` is when it was loaded last, in seconds since 1970 (0: never). `measured_tok_s` is what plain decoding
    last reached here, `drafted_tok_s` an answer with drafts (0: not measured).
    """

    path: Path
    source: Source
    repo: str = ""
    parts: int = 1
    projector: Path | None = None
    unfinished: float | None = None
    last_used: float = 0.0
    measured_tok_s: float = 0.0
    drafted_tok_s: float = 0.0
