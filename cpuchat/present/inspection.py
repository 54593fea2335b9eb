"""Formats the header of a model in sections of labelled lines."""

from __future__ import annotations

from cpuchat.models.inspect import Inspection
from cpuchat.telemetry import units
from cpuchat.telemetry.units import plural
from cpuchat.text import clean_line

Rows = list[tuple[str, str]]
_MOST_LABEL, _MOST_TEXT = 60, 400  # characters: a file can hold texts of any length


def sections(model: Inspection, *, settings: bool = True) -> list[tuple[str, Rows]]:
    """Return (heading, [(label, value)]) of everything but the templates' texts, shortened and cleaned.

    Labels may be "". Without `settings` the list of all metadata is left out.
    """
    writes = model.kind == "model"
    found: list[tuple[str, Rows]] = [
        ("Problems", [("", f"{problem[:1].upper()}{problem[1:]}.") for problem in model.problems]),
        ("Model", _model(model) if writes else _other(model)),
        ("Memory", _memory(model) if writes else []),
        ("Tensors", _tensors(model)),
        ("Tokenizer", _tokenizer(model) if writes or model.tokenizer else []),
        ("Chat template", _templates(model) if writes or model.templates else []),
        ("Origin", _origin(model)),
        ("Metadata", list(model.settings) if settings else []),
    ]
    shown = [
        (heading, [(_short(label, _MOST_LABEL), _short(text, _MOST_TEXT)) for label, text in rows if text])
        for heading, rows in found
    ]
    return [(heading, rows) for heading, rows in shown if rows]


def _short(text: str, most: int) -> str:
    return clean_line(text if len(text) <= most else f"{text[: most - 1]}…")


def _model(model: Inspection) -> Rows:
    active = f", {units.parameters(model.n_params_active)} active" if model.n_params_active < model.n_params else ""
    heads = f"{model.heads} query, {model.heads_kv} KV, head size {model.key_length}" if model.heads else ""
    return [
        ("name", model.name),
        ("architecture", model.architecture),
        ("parameters", units.parameters(model.n_params) + active),
        ("quantization", f"{model.quantization}, {model.bits_per_weight:.2f} bits per weight"),
        ("trained context", plural(model.n_ctx_train, "token") if model.n_ctx_train else ""),
        ("layers", f"{model.n_layer}, embedding {model.n_embd:,}, feed-forward {model.n_ff:,}"),
        ("attention heads", heads),
        ("sliding window", _window(model)),
        ("experts", _experts(model)),
        ("file", f"GGUF version {model.version}" + (f", {model.parts} parts" if model.parts > 1 else "")),
    ]


def _other(model: Inspection) -> Rows:
    """Return rows of a file that is not a language model."""
    return [
        ("name", model.name),
        ("kind", model.kind),
        ("architecture", model.architecture),
        ("parameters", units.parameters(model.n_params) if model.n_params else ""),
        ("size", units.size(model.file_size)),
    ]


def _window(model: Inspection) -> str:
    layers = f"{model.windowed_layers} of {plural(model.n_layer, 'layer')}"
    return f"{plural(model.window, 'token')} in {layers}" if model.window else ""


def _experts(model: Inspection) -> str:
    if model.experts is None:
        return ""
    shared = f" and {model.experts.shared} shared" if model.experts.shared else ""
    return f"{model.experts.used} of {model.experts.count}{shared} per token"


def _memory(model: Inspection) -> Rows:
    return [
        ("size", f"{units.size(model.file_size)}, tensors {units.size(model.size)}"),
        ("read per token", f"{units.size(model.bytes_per_token)} without the KV cache"),
        ("KV cache", kv_growth(model.kv_per_token, model.kv_windowed, " as F16")),
        ("recurrent state", f"{units.size(model.state)}, independent of the context" if model.state else ""),
    ]


def kv_growth(per_token: int, windowed: int, kind: str = "") -> str:
    """Format what a KV cache takes, in bytes: `82 kB per token of context as F16 + 654 MB for sliding windows`."""
    parts = [f"{units.size(per_token)} per token of context{kind}" if per_token else ""]
    parts.append(f"{units.size(windowed)} for sliding windows" if windowed else "")
    return " + ".join(filter(None, parts))


def _tensors(model: Inspection) -> Rows:
    return [
        (kind.type, f"{plural(kind.count, 'tensor')}, {units.parameters(kind.n_params)} parameters of "
         f"{kind.bits_per_weight:.4g} bits, {units.size(kind.nbytes)} ({100 * kind.nbytes / max(model.size, 1):.1f} %)")
        for kind in model.tensors
    ]  # fmt: skip


def _tokenizer(model: Inspection) -> Rows:
    found = model.tokenizer
    if found is None:
        return [("", "none")]
    added = [name for name, adds in (("BOS", found.add_bos), ("EOS", found.add_eos)) if adds]
    rows = [
        ("kind", ", ".join(filter(None, (found.kind, found.model, found.pre)))),
        ("tokens", f"{found.n_tokens:,}" + (f", {found.n_merges:,} merges" if found.n_merges else "")),
        ("added tokens", " and ".join(added) or "none"),
    ]
    return rows + [(token.role, f"{token.id}  {token.text}") for token in found.special]


def _templates(model: Inspection) -> Rows:
    if not model.templates:
        return [("", "none (base model: continues text instead of answering)")]
    return [
        (template.name or "default",
         f"{plural(len(template.text), 'character')}, supports {', '.join(template.features) or 'user messages only'}")
        for template in model.templates
    ]  # fmt: skip


def _origin(model: Inspection) -> Rows:
    origin = model.origin
    return [
        ("author", origin.author),
        ("organization", origin.organization),
        ("base model", ", ".join(origin.base_models)),
        ("quantized by", origin.quantized_by),
        ("license", " ".join(filter(None, (origin.license, origin.license_link)))),
        ("address", origin.url),
        ("languages", ", ".join(origin.languages)),
        ("tags", ", ".join(origin.tags)),
    ]
