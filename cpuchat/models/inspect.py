"""Describes a model from its header, for users who want to know it before using it.

Texts are those of the file: clean them before display.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from cpuchat.base.text import cut
from cpuchat.costs.model import N_PAST, bytes_read
from cpuchat.models import fit
from cpuchat.models.cpu_modules import engine_cpu
from cpuchat.models.fit import HeadSize, windows_of
from cpuchat.models.gguf.header import GGUFHeader, Vocabulary, vocabulary
from cpuchat.models.gguf.parse import LazyArray
from cpuchat.models.hub.repository import ModelData
from cpuchat.models.support import scalar_types, why_unsupported
from cpuchat.models.traffic import model_work, table_bytes
from cpuchat.protocol.messages import LoadOptions

# A template that writes any role verbatim supports system messages.
_FEATURES = {
    "system": re.compile(r"\bsystem\b|\{\{[^{}]*\brole\b"),
    "tools": re.compile(r"\btools\b"),
    "thinking": re.compile(r"\b(enable_thinking|thinking|reasoning_content|reasoning_effort)\b|<think>"),
    "images": re.compile(r"\bimages?\b"),
}
_MAX_TEMPLATE = 1 << 20  # characters searched for features
_SHOWN_VALUES = 4
_SHOWN_TEXT = 120
_MAX_LISTED = 16


class TensorKind(ModelData, frozen=True):
    """All tensors of one type. `nbytes` of their data."""

    type: str
    count: int
    n_params: int
    nbytes: int


class Experts(ModelData, frozen=True):
    """A mixture of experts: a token is sent to `used` of `count` experts, and to all `shared` ones."""

    count: int
    used: int
    shared: int


class Template(ModelData, frozen=True):
    """A chat template. `features`: what it supports, by its words, of "system", "tools", "thinking", "images"."""

    name: str
    text: str
    features: tuple[str, ...]


class Inspection(ModelData, frozen=True):
    """The description of a model by its `header`.

    `kind`: "model", or what it is instead ("an adapter of a model"). Sizes in bytes. `bytes_per_token` of a plain pass
    behind `N_PAST` tokens; `tables` are read one row at a time; `kv_per_token` what a token of context takes,
    `kv_windowed` what layers with a sliding window take beside that, both as F16, and `state` a recurrent model's
    state, as F32. `heads_kv` is the largest number of all layers. `window`: the sliding window of `windowed_layers`
    layers, in tokens, 0 for none. `head`: the size of the MTP head in it. `problem`: why the engine cannot run it, ""
    when it can, and `scalar_types`, both as of `support`."""

    header: GGUFHeader
    kind: str
    heads_kv: int
    window: int
    windowed_layers: int
    kv_per_token: int
    kv_windowed: int
    state: int
    bytes_per_token: int
    tables: int
    experts: Experts | None
    head: HeadSize | None
    tensors: tuple[TensorKind, ...]
    tokenizer: Vocabulary | None
    templates: tuple[Template, ...]
    license: str
    base_models: tuple[str, ...]
    settings: tuple[tuple[str, str], ...]
    problem: str
    scalar_types: frozenset[str]


def inspect(header: GGUFHeader) -> Inspection:
    """Describe the model of `header` (of all parts, from `read_model`). About 0.1 s for 150k tokens."""
    windows = [window for window in windows_of(header) if window]
    kv_per_token, kv_windowed = fit.kv_growth(header, LoadOptions())
    experts = None
    if n_experts := header.number("expert_count"):
        # Some models give the size of their shared expert but not the number, which is 1 then.
        has_shared = any("_shexp." in tensor.name for tensor in header.tensors)
        shared = header.number("expert_shared_count") or int(has_shared)
        experts = Experts(count=n_experts, used=header.number("expert_used_count"), shared=shared)
    vocab = vocabulary(header)
    totals: dict[str, tuple[int, int, int]] = {}
    for tensor in header.tensors:
        count, n_params, nbytes = totals.get(tensor.type, (0, 0, 0))
        totals[tensor.type] = count + 1, n_params + tensor.n_elements, nbytes + tensor.nbytes
    kinds = [TensorKind(type=name, count=c, n_params=n, nbytes=b) for name, (c, n, b) in totals.items()]
    return Inspection(
        header=header,
        kind=header.other or "model",
        heads_kv=max(header.heads_kv, default=0),
        window=max(windows, default=0),
        windowed_layers=len(windows),
        kv_per_token=kv_per_token,
        kv_windowed=kv_windowed,
        state=fit.state_bytes(header),
        bytes_per_token=round(bytes_read(model_work(header), 1, N_PAST)),
        tables=table_bytes(header),
        experts=experts,
        head=fit.head_size(header, LoadOptions()),
        tensors=tuple(sorted(kinds, key=lambda kind: -kind.nbytes)),
        tokenizer=msgspec.structs.replace(vocab, tokens=None) if vocab.n_tokens else None,
        templates=_templates(header),
        license=header.text("general.license"),
        base_models=_base_models(header),
        settings=tuple((key, _brief(value)) for key, value in header.metadata.items()),
        problem=why_unsupported(header),
        scalar_types=scalar_types(engine_cpu()),
    )


def _templates(header: GGUFHeader) -> tuple[Template, ...]:
    """Return the default template (name "") first, then those for special purposes."""
    base = "tokenizer.chat_template"
    names = sorted(key for key in header.metadata if key.startswith(f"{base}.") and header.text(key))
    found: list[Template] = []
    for key in [*([base] if header.chat_template else []), *names]:
        text = header.text(key)
        features = (name for name, pattern in _FEATURES.items() if pattern.search(text, 0, _MAX_TEMPLATE))
        found.append(Template(name=key.removeprefix(base).lstrip("."), text=text, features=tuple(features)))
    return tuple(found)


def _base_models(header: GGUFHeader) -> tuple[str, ...]:
    """Return `general.base_model.0.repo_url` and the like, as `owner/name` where there is a URL."""
    count = header.metadata.get("general.base_model.count", 0)
    names: list[str] = []
    for i in range(min(count, _MAX_LISTED) if isinstance(count, int) else 0):
        url = header.text(f"general.base_model.{i}.repo_url")
        name = "/".join(url.rstrip("/").split("/")[-2:]) if url else header.text(f"general.base_model.{i}.name")
        if name:
            names.append(name)
    return tuple(names)


def _brief(value: Any) -> str:
    """Shorten a metadata value: the first of an array, the beginning of a text."""
    if isinstance(value, LazyArray):
        shown = ", ".join(_brief(item) for item in value.first(_SHOWN_VALUES))
        return f"{len(value):,} values: {shown}{', …' if len(value) > _SHOWN_VALUES else ''}"
    if isinstance(value, str):
        return cut(value, _SHOWN_TEXT)
    return f"{value:g}" if isinstance(value, float) else str(value)
