"""Models to plan for: from a file's header, from the catalog, or by a usual size such as 70B."""

from __future__ import annotations

import difflib
import fnmatch
import functools
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from cpuchat import toml
from cpuchat.costmodel.work import Attention, ModelWork, Weights
from cpuchat.errors import ModelNotFound, UsageError
from cpuchat.models.catalog import Catalog, CatalogModel
from cpuchat.models.file_names import without_prefix
from cpuchat.models.fit import kv_bytes
from cpuchat.models.gguf.header import GGUFHeader, read_model
from cpuchat.models.gguf.types import BY_NAME
from cpuchat.models.library.library import Library
from cpuchat.models.quantize.types import quant_type
from cpuchat.models.work import model_work
from cpuchat.synthetic.model import header_of
from cpuchat.synthetic.shapes import SHAPES

USUAL = "Q4_K_M"
_SHORT = {"Q4": "Q4_K_M", "Q5": "Q5_K_M", "Q6": "Q6_K", "Q8": "Q8_0", "Q3": "Q3_K_M", "FP16": "F16", "FP32": "F32"}
_WORDS = re.compile(r"[a-z]+|\d+(?:\.\d+)?")
ALIKE = 0.5
"""Of mixtures, as of `ModelWork`: DeepSeek-R1 takes 1.21, 1.66, 2.65 and 4.46 times as long for 2, 4, 8 and 16 tokens
as for one (llama.cpp pull request 17034); with independent choices it would read 1.55, 2.6, 4.5 and 7.7 times as much.
"""
_LARGEST_HEAD = 0.45  # share of the parameters, for models that are scaled from a larger one
_TOO_SMALL = 1e6  # parameters: a header without matrices


class PlannedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model in a quantization. `size`: bytes of its file; `kv_row`: bytes of KV cache for a token of context.

    `exact`: from a header; else the sizes of its parts are those of a typical file.
    """

    name: str
    quantization: str
    size: float
    work: ModelWork
    kv_row: float
    exact: bool = False


class Dimensions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The configuration of models, as in dimensions.toml."""

    ids: tuple[str, ...] = ()
    layers: int
    embd: int
    heads: int
    kv_heads: int
    head: int
    vocab: int
    tied: bool = False
    experts: int = 0
    used: int = 0
    kv_row: int = 0

    @property
    def kv_values(self) -> int:
        """Return the values of K and V that a layer keeps for a token."""
        return self.kv_row or 2 * self.kv_heads * self.head


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: tuple[Dimensions, ...]


@functools.cache
def dimensions() -> tuple[Dimensions, ...]:
    """Return the known configurations."""
    text = Path(__file__).with_name("dimensions.toml").read_text(encoding="utf-8")
    return msgspec.convert(toml.loads(text), _File).model


def find_model(wanted: str, catalog: Catalog, folders: Sequence[str] = ()) -> PlannedModel:
    """Return the model that `wanted` names: a GGUF file or repository here, a catalog id, or a usual size.

    With its quantization behind a colon or a blank: `70b:Q4_K_M`, `qwen3-8b Q8`.

    Args:
        folders: of the settings, where models are looked for.

    Raises:
        UsageError: unknown or ambiguous, or an unknown quantization; the hint names the nearest.
        ModelDamaged, ModelUnsupported: it is a file that cannot be read.
    """
    name, quantization = _divided(wanted)
    if not name.lower().endswith(".gguf"):
        entry = catalog.find(name.lower())
        if entry is not None:
            return from_catalog(entry, quantization)
        if name.lower() in SHAPES:
            return from_header(header_of(name, quantization or USUAL), name.upper())
    try:
        return from_header(read_model(Library(folders).resolve(wanted)))
    except ModelNotFound:
        if name.lower().endswith(".gguf"):
            raise
    words = _words(name) or {name}
    found = [entry for entry in catalog.models if entry.id.startswith(name.lower()) or words <= _words(entry.id)]
    if len(found) == 1:
        return from_catalog(found[0], quantization)
    if found:
        raise UsageError(f"{name} is ambiguous.", f"Use {_choices([entry.id for entry in found])}.")
    ids = [*SHAPES, *(entry.id for entry in catalog.models)]
    near = difflib.get_close_matches(name.lower(), ids, n=3, cutoff=0.4)
    hint = f"Did you mean {_choices(near)}? " if near else ""
    raise UsageError(
        f"Unknown model {name!r}.", f"{hint}Give a GGUF file, an id of `cpuchat models catalog`, or a size such as 70b."
    )


def _choices(ids: Sequence[str], most: int = 4) -> str:
    return " or ".join(ids[:most]) + (f" or {len(ids) - most} more" if len(ids) > most else "")


def _words(name: str) -> frozenset[str]:
    return frozenset(_WORDS.findall(name.lower()))


def _divided(wanted: str) -> tuple[str, str]:
    """Return the name and the quantization ("" for the usual one). Raises UsageError for an unknown one."""
    text = wanted.strip()
    name, colon, kind = text.rpartition(":")
    if not colon:
        name, blank, kind = text.rpartition(" ")
        if not blank:
            return text, ""
    kind = _SHORT.get(kind.upper(), kind.upper())
    if not name or "/" in kind:
        return text, ""
    return name.strip(), kind if without_prefix(kind) != kind else quant_type(kind).name


def from_header(header: GGUFHeader, name: str = "") -> PlannedModel:
    """Return the model of `header` (of `read_model`).

    Raises:
        UsageError: it has no weights.
    """
    if header.n_params < _TOO_SMALL:
        raise UsageError(f"{header.path.name} has no weights.", "Choose a language model.")
    return PlannedModel(
        name=name or header.name,
        quantization=header.quantization,
        size=header.size,
        work=msgspec.structs.replace(model_work(header), alike=ALIKE),
        kv_row=(kv_bytes(header, 4096) - kv_bytes(header, 0)) / 4096,
        exact=True,
    )


def from_catalog(entry: CatalogModel, quantization: str = "") -> PlannedModel:
    """Return a model of the catalog, in its usual quantization by default."""
    kind = quantization or entry.quantization or USUAL
    size = entry.sizes.get(kind, 0.0) * 1e9 or 1e9 * entry.params * quant_type(kind).bits / 8
    dims = next((one for one in dimensions() if any(fnmatch.fnmatch(entry.id, id) for id in one.ids)), None)
    return described(entry.name, kind, 1e9 * entry.params, size, active=1e9 * entry.active_params, dims=dims)


def described(
    name: str, quantization: str, params: float, size: float, *, active: float = 0.0, dims: Dimensions | None = None
) -> PlannedModel:
    """Return a model of which the size in bytes and the parameters are known.

    Args:
        active: parameters that a token uses, of a mixture of experts (0: all).
        dims: its configuration; default: scaled from the nearest known one.
    """
    known = dims or _scaled(params, active)
    kind, per_value = main_type(quantization), size / params
    head = min(known.vocab * known.embd, _LARGEST_HEAD * params)
    rest = max(params - head - (0 if known.tied else head), 0.1 * params)
    routed = 0.0
    if 0 < active < params and known.experts > known.used > 0:
        routed = min((params - active) / (1 - known.used / known.experts), 0.995 * rest)
    weights = Weights(kind, (rest - routed) * per_value, rest - routed)
    experts = (Weights(kind, routed * per_value, routed),) if routed else ()
    kv_row = 2.0 * known.layers * known.kv_values
    madds = known.layers * known.heads * 2 * known.head
    return PlannedModel(
        name=name,
        quantization=quantization,
        size=size,
        work=ModelWork(
            name=name,
            n_layer=known.layers,
            dense=(weights,),
            head=(Weights(kind, head * per_value, head),),
            experts=experts,
            n_expert=known.experts if routed else 0,
            n_expert_used=known.used if routed else 0,
            alike=ALIKE,
            attention=(Attention(kv_row, madds),),
        ),
        kv_row=kv_row,
    )


def main_type(quantization: str) -> str:
    """Return the tensor type of most matrices of such a file: `Q4_K` for `UD-Q4_K_XL`."""
    name = without_prefix(quantization)
    return next((kind for kind in (name, name.rpartition("_")[0]) if kind in BY_NAME), name)


_SIZES = (
    (0.5e9, "qwen2.5-0.5b"), (1.5e9, "qwen2.5-1.5b"), (4e9, "qwen3-4b"), (8e9, "llama-3.1-8b"),
    (14.8e9, "qwen3-14b"), (32.8e9, "qwen3-32b"), (70.6e9, "llama-3.3-70b"), (122e9, "mistral-large"),
    (405e9, "llama-3.1-405b"),
)  # fmt: skip
_MIXTURES = (
    (16e9, "deepseek-v2-lite"), (30e9, "qwen3-30b-a3b"), (117e9, "gpt-oss-120b"), (235e9, "qwen3-235b-a22b"),
    (671e9, "deepseek-r1"), (1030e9, "kimi-k2"),
)  # fmt: skip


def _scaled(params: float, active: float) -> Dimensions:
    """Return the configuration of the known model with the nearest number of parameters, on a ratio scale."""
    table = _MIXTURES if 0 < active < params else _SIZES
    _, name = min(table, key=lambda one: abs(one[0] / params - params / one[0]))
    return next(one for one in dimensions() if any(fnmatch.fnmatch(name, id) for id in one.ids))
