"""Draft heads: parts of a model, or files beside it, that predict its next tokens from its hidden states.

cpuchat's own engine has no access to hidden states; llama-server does (`--spec-type draft-*`). Whether a head fits is
decided by the keys that llama.cpp reads: `target_hidden_size` and `target_layers` of EAGLE-3 and DFlash (src/models of
llama.cpp; a layer that the target lacks ends llama-server with GGML_ABORT), `nextn_predict_layers` of MTP.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Literal

from cpuchat.base.errors import DraftMismatch, EngineMissing
from cpuchat.base.text import clean_line
from cpuchat.models.file_names import role_of
from cpuchat.models.gguf.header import GGUFHeader, read_model
from cpuchat.models.gguf.parse import LazyArray

HeadKind = Literal["eagle3", "mtp", "dflash", "dspark"]

TITLES: dict[HeadKind, str] = {"eagle3": "EAGLE-3", "mtp": "MTP", "dflash": "DFlash", "dspark": "DSpark"}
ENGINE = "llama-server"
"""The engine that can use heads."""
ONLY_ENGINE = f"only {ENGINE} can use it"

_KINDS: dict[str, HeadKind] = {"eagle3": "eagle3", "mtp": "mtp", "dflash": "dflash", "dspark": "dspark"}
_NAMED = re.compile(r"(?<![a-z0-9])(?P<kind>mtp|eagle-?3|dflash|dspark)(?![a-z0-9])", re.IGNORECASE)
ARCHITECTURES: dict[str, HeadKind] = {"eagle3": "eagle3", "dflash": "dflash", "gemma4-assistant": "mtp"}
MAX_SIZE_DIFFERENCE = 128
"""Tokens by which the vocabularies of a target and of a draft model or head may differ."""
_MAX_LAYERS = 64  # of the target that a head reads: three to six are usual


def kind_named(path: str) -> HeadKind | None:
    """Return the kind that the path of a head in a repository names; None for a path that is not that of a head."""
    if role_of(path) != "head":
        return None
    for part in reversed(path.split("/")):
        if named := _NAMED.search(part):
            return _KINDS[named["kind"].lower().replace("-", "")]
    return None


def kind_of(header: GGUFHeader) -> HeadKind | None:
    """Return the kind of a head in a file of its own; None for any other file."""
    if not header.is_head:
        return None
    kind = ARCHITECTURES.get(header.architecture, "mtp")
    # A DSpark head is a DFlash one with more tensors; only its name says so.
    return "dspark" if kind == "dflash" and kind_named(header.path.name) == "dspark" else kind


def included_layers(header: GGUFHeader) -> int:
    """Return how many MTP layers a model contains: `nextn_predict_layers`, unless their tensors were left out."""
    n_layers = header.number("nextn_predict_layers")
    if not n_layers or header.is_head:
        return 0
    return n_layers if any(".nextn." in tensor.name for tensor in header.tensors) else 0


def difference(target: GGUFHeader, head: GGUFHeader) -> str:
    """Return why `head` does not fit `target`, as a clause; "" when it does. The target's own MTP layers fit."""
    if os.path.realpath(target.path) == os.path.realpath(head.path):
        return "" if included_layers(target) else "it contains no MTP layers"
    kind = kind_of(head)
    if kind is None:
        return "it is not a draft head"
    if kind == "mtp":  # the last layers of a model of the same architecture
        ours, theirs = clean_line(target.architecture), clean_line(head.architecture)
        is_gemma = theirs == "gemma4-assistant"
        if ours != theirs and not (is_gemma and ours.startswith("gemma4")):
            return f"it is an MTP head for {'Gemma 4' if is_gemma else theirs}, the target is {ours}"
        reason = "" if is_gemma else _width_difference(target.n_embd, head.n_embd)
    else:  # it reads the hidden states of some of the target's layers
        reason = _width_difference(target.n_embd, head.number("target_hidden_size"))
        layers = head.value("target_layers")
        layers = layers.first(_MAX_LAYERS) if isinstance(layers, LazyArray) else []
        last = max((layer for layer in layers if isinstance(layer, int)), default=0)
        if not reason and last > target.n_layer:
            reason = f"it reads layer {last}, the target has {target.n_layer}"
    tokens = head.metadata.get("tokenizer.ggml.tokens")  # where it has a vocabulary of its own
    if not reason and isinstance(tokens, LazyArray) and abs(len(tokens) - target.n_vocab) > MAX_SIZE_DIFFERENCE:
        return f"its vocabulary has {len(tokens):,} tokens against {target.n_vocab:,} of the target"
    return reason


def _width_difference(ours: int, theirs: int) -> str:
    if ours and theirs and ours != theirs:
        return f"it reads hidden states of {theirs:,} values, the target has {ours:,}"
    return ""


def mismatch(target: Path, draft: Path, reason: str, hint: str) -> DraftMismatch:
    """Return the error that says why a model or head cannot draft, `reason` being a clause."""
    return DraftMismatch(f"{clean_line(draft.name)} cannot draft for {clean_line(target.name)}: {reason}.", hint)


def require_head(target: Path, draft: Path) -> HeadKind | None:
    """Return the kind of head that `draft` is, or has for itself as the target; None for a draft model. Raises
    DraftMismatch: a head that does not fit `target`; ModelNotFound, ModelDamaged, ModelUnsupported: a file cannot be
    read."""
    head = read_model(draft)
    if os.path.realpath(target) == os.path.realpath(draft):
        return "mtp" if included_layers(head) else None
    kind = kind_of(head)
    if kind is not None and (reason := difference(read_model(target), head)):
        raise mismatch(target, draft, reason, "Choose a head made for this model.")
    return kind


def find_program() -> str:
    """Return the path of the llama-server to start. Raises EngineMissing: there is none on PATH."""
    program = shutil.which(ENGINE)
    if program is None:
        problem = "Draft heads need a llama-server, and there is none on PATH."
        raise EngineMissing(
            problem, "Install llama.cpp: `brew install llama.cpp`, or a release from its page on GitHub."
        )
    return program


def title(kind: HeadKind) -> str:
    """Return `EAGLE-3 head`."""
    return f"{TITLES[kind]} head"
