"""Draft heads: parts of a model, or files beside it, that predict its next tokens from its hidden states.

Whether a head fits is decided by the keys that llama.cpp reads: `target_hidden_size` and `target_layers` of EAGLE-3 and
DFlash (src/models of llama.cpp; a layer that the target lacks ends the process with GGML_ABORT), `nextn_predict_layers`
of MTP.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from cpuchat.base.errors import DraftMismatch
from cpuchat.base.text import clean_line
from cpuchat.models.engine_version import GIVES_HIDDEN, GIVES_INPUTS, HEADS, MTP, SEVERAL_MTP, HeadKind
from cpuchat.models.file_names import role_of
from cpuchat.models.gguf.header import GGUFHeader
from cpuchat.models.gguf.parse import LazyArray
from cpuchat.models.ollama import file_name

TITLES: dict[HeadKind, str] = {"eagle3": "EAGLE-3", "mtp": "MTP", "dflash": "DFlash"}

_KINDS: dict[str, HeadKind] = {"eagle3": "eagle3", "mtp": "mtp", "dflash": "dflash", "dspark": "dflash"}
_NAMED = re.compile(r"(?<![a-z0-9])(?P<kind>mtp|eagle-?3|dflash|dspark)(?![a-z0-9])", re.IGNORECASE)
MAX_SIZE_DIFFERENCE = 128
"""Tokens by which the vocabularies of a target and of a draft model or head may differ."""
_MTP_TENSOR = re.compile(r"blk\.(\d{1,6})\.nextn\.").match
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
    return HEADS.get(header.architecture, "mtp") if header.is_head else None


def is_own(target: Path, draft: Path) -> bool:
    """Return whether both are one file, whatever links lead to it: the head is the one that the target contains."""
    return os.path.realpath(target) == os.path.realpath(draft)


def layers_of(header: GGUFHeader) -> range:
    """Return the layers of `header` that draft: of several MTP layers the first one; of other heads all."""
    first = min((int(one[1]) for tensor in header.tensors if (one := _MTP_TENSOR(tensor.name))), default=-1)
    return range(first, first + 1) if first >= 0 else range(header.n_layer if header.is_head else 0)


def included_layers(header: GGUFHeader) -> int:
    """Return how many MTP layers a model contains: `nextn_predict_layers`, unless their tensors were left out."""
    n_layers = header.number("nextn_predict_layers")
    if not n_layers or header.is_head:
        return 0
    return n_layers if any(".nextn." in tensor.name for tensor in header.tensors) else 0


def usable_layers(header: GGUFHeader) -> int:
    """Return `included_layers` where the engine can draft with them, else 0."""
    n_layers = included_layers(header)
    return 0 if unusable("mtp", header.architecture, n_layers=n_layers) else n_layers


def difference(target: GGUFHeader, head: GGUFHeader) -> str:
    """Return why `head` does not fit `target`, as a clause; "" when it does. The target's own MTP layers fit."""
    if is_own(target.path, head.path):
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
        n_layer = target.decoding_layers
        if not reason and last > n_layer:
            reason = f"it reads layer {last}, the target has {n_layer}"
        elif not reason and last == n_layer and target.architecture not in GIVES_HIDDEN:
            name = clean_line(target.architecture)
            reason = f"it reads the last hidden states, which this engine does not give of {name}"
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
    return DraftMismatch(f"{file_name(draft)} cannot draft for {file_name(target)}: {reason}.", hint)


def require_head(target: GGUFHeader, draft: GGUFHeader) -> HeadKind | None:
    """Return the kind of head that `draft` is, or has for itself as the target; None for a draft model. Raises
    DraftMismatch: a head that does not fit `target`, or that the engine cannot use."""
    n_layers = included_layers(draft) if is_own(target.path, draft.path) else 0
    kind = "mtp" if n_layers else kind_of(draft)
    if kind is None:
        return None
    if not n_layers and (reason := difference(target, draft)):
        raise mismatch(target.path, draft.path, reason, "Choose a head made for this model.")
    n_layers = n_layers or draft.number("nextn_predict_layers")
    if reason := unusable(kind, target.architecture, draft.architecture, n_layers):
        raise mismatch(target.path, draft.path, reason, SERVER_RECIPE)
    return kind


SERVER_RECIPE = "Start `llama-server --spec-type draft-…` with it, and `cpuchat --server` for that."


def unusable(kind: HeadKind, target: str = "", head: str = "", n_layers: int = 1) -> str:
    """Return why the engine cannot draft with a head of this kind, with `n_layers` MTP layers, as a clause; "" where it
    can. `target` and `head` are architectures of the model ("": any) and of the head."""
    if kind == "dflash":
        return "DFlash and DSpark heads draft whole blocks, which only llama-server does so far"
    if head == "gemma4-assistant":
        return "a head that reads the model's own KV cache works only in llama-server so far"
    known = MTP if kind == "mtp" else GIVES_INPUTS
    if target and target not in known:
        return f"this engine gives the hidden states of no {clean_line(target)}"
    if kind == "mtp" and n_layers > 1 and target and target not in SEVERAL_MTP:
        return f"this engine drafts with one MTP layer of {clean_line(target)}, not with {n_layers}"
    return ""


def title(kind: HeadKind) -> str:
    """Return `EAGLE-3 head`."""
    return f"{TITLES[kind]} head"
