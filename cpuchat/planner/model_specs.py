"""Models to plan for: from a file's header, from the catalog, or by a usual size such as 70B."""

from __future__ import annotations

import contextlib
import difflib
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from cpuchat.costmodel.work import ALIKE, ModelWork
from cpuchat.errors import CpuchatError, ModelNotFound, UsageError
from cpuchat.models.catalog import Catalog, CatalogModel, match_local
from cpuchat.models.dimensions import typical_work
from cpuchat.models.file_names import without_prefix
from cpuchat.models.fit import kv_by_window, kv_cells
from cpuchat.models.gguf.header import GGUFHeader, read_model
from cpuchat.models.library.library import Library
from cpuchat.models.quantize.types import quant_type
from cpuchat.models.work import model_work
from cpuchat.protocol import LoadOptions
from cpuchat.synthetic.model import header_of
from cpuchat.synthetic.shapes import SHAPES

USUAL = "Q4_K_M"
_SHORT = {"Q4": "Q4_K_M", "Q5": "Q5_K_M", "Q6": "Q6_K", "Q8": "Q8_0", "Q3": "Q3_K_M", "FP16": "F16", "FP32": "F32"}
_WORDS = re.compile(r"[a-z]+|\d+(?:\.\d+)?")
_TOO_SMALL = 1e6  # parameters: a header without matrices


class PlannedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model in a quantization. `size`: bytes of its file; `kv_rows`: bytes of KV cache for a token, by the sliding
    window of the layers (0: none).

    `exact`: from a header; else the sizes of its parts are those of a typical file. `path`: of its
    file here, "" for none.
    """

    name: str
    quantization: str
    size: float
    work: ModelWork
    kv_rows: dict[int, float]
    exact: bool = False
    path: str = ""

    def kv_bytes(self, n_ctx: int) -> float:
        """Return the bytes of the KV cache for a context of `n_ctx` tokens."""
        n_ubatch = LoadOptions().n_ubatch
        return sum(nbytes * kv_cells(window, n_ctx, n_ubatch) for window, nbytes in self.kv_rows.items())


def find_model(wanted: str, catalog: Catalog, folders: Sequence[str] = ()) -> PlannedModel:
    """Return the model that `wanted` names: a GGUF file or repository here, a catalog id, or a usual size.

    With its quantization behind a colon or a blank: `70b:Q4_K_M`, `qwen3-8b Q8`.

    Args:
        folders: of the settings, where models are looked for.

    Raises:
        UsageError: unknown or ambiguous, or an unknown quantization; the hint names the nearest.
        ModelDamaged, ModelUnsupported: it is a file that cannot be read.
    """
    text = wanted.strip()
    whole = _known(text, "", catalog, folders)  # names may have blanks, paths colons
    if whole is not None:
        return whole
    name, quantization = _divided(text)
    if quantization:
        planned = _known(name, quantization, catalog, folders)
        if planned is not None:
            return planned
    try:
        return from_header(read_model(Library(folders).resolve(text)))
    except ModelNotFound:
        if name.lower().endswith(".gguf"):
            raise
    words = _words(name) or {name}
    found = [entry for entry in catalog.models if entry.id.startswith(name.lower()) or words <= _words(entry.id)]
    if len(found) == 1:
        return _here(found[0], quantization, catalog, folders) or from_catalog(found[0], quantization)
    if found:
        raise UsageError(f"{name} is ambiguous.", f"Use {_choices([entry.id for entry in found])}.")
    ids = [*SHAPES, *(entry.id for entry in catalog.models)]
    near = difflib.get_close_matches(name.lower(), ids, n=3, cutoff=0.4)
    hint = f"Did you mean {_choices(near)}? " if near else ""
    raise UsageError(
        f"Unknown model {name!r}.", f"{hint}Give a GGUF file, an id of `cpuchat models catalog`, or a size such as 70b."
    )


def _known(name: str, quantization: str, catalog: Catalog, folders: Sequence[str]) -> PlannedModel | None:
    """Return the catalog model with that id or name, its file here if there is one, or a usual size; None: neither."""
    wanted = name.lower()
    entry = catalog.find(wanted) or next((one for one in catalog.models if one.name.lower() == wanted), None)
    if entry is not None:
        return _here(entry, quantization, catalog, folders) or from_catalog(entry, quantization)
    return from_header(header_of(name, quantization or USUAL), name.upper()) if wanted in SHAPES else None


def _here(entry: CatalogModel, quantization: str, catalog: Catalog, folders: Sequence[str]) -> PlannedModel | None:
    """Return the file of a catalog model on this machine: with that quantization, or any, the usual one first."""
    for one, path in _files(catalog, folders, quantization):
        if one is entry:
            with contextlib.suppress(CpuchatError):  # a file that changed just now
                return from_header(read_model(path), entry.name)
    return None


def models_here(catalog: Catalog, folders: Sequence[str], quantization: str = "") -> dict[str, PlannedModel]:
    """Return the catalog's models whose files are on this machine, by id, each as `find_model`. Reads their headers."""
    found: dict[str, PlannedModel] = {}
    for entry, path in _files(catalog, folders, quantization):
        if entry.id not in found:
            with contextlib.suppress(CpuchatError):
                found[entry.id] = from_header(read_model(path), entry.name)
    return found


def _files(catalog: Catalog, folders: Sequence[str], quantization: str) -> list[tuple[CatalogModel, Path]]:
    """Return the files of catalog models here with that quantization, or any, those in the usual one first."""
    found = [
        (entry, one) for one in Library(folders).local_models()
        if one.damaged is None and quantization in ("", one.quantization)
        and (entry := match_local(catalog, one)) is not None
    ]  # fmt: skip
    found.sort(key=lambda pair: pair[1].quantization != (pair[0].quantization or USUAL))
    return [(entry, one.path) for entry, one in found]


def _choices(ids: Sequence[str], most: int = 4) -> str:
    return " or ".join(ids[:most]) + (f" or {len(ids) - most} more" if len(ids) > most else "")


def _words(name: str) -> frozenset[str]:
    return frozenset(_WORDS.findall(name.lower()))


def _divided(text: str) -> tuple[str, str]:
    """Return the name and the quantization ("" for the usual one). A blank divides only before a known one.

    Raises:
        UsageError: an unknown quantization behind a colon.
    """
    if text.lower().endswith(".gguf"):
        return text, ""
    name, colon, kind = text.rpartition(":")
    if not colon:
        name, _, kind = text.rpartition(" ")
    kind = _SHORT.get(kind.upper(), kind.upper())
    if not name or "/" in kind:
        return text, ""
    try:
        return name.strip(), kind if without_prefix(kind) != kind else quant_type(kind).name
    except UsageError:
        if colon:
            raise
        return text, ""


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
        work=model_work(header, alike=ALIKE),
        kv_rows={window: float(nbytes) for window, nbytes in kv_by_window(header).items()},
        exact=True,
        path=str(header.path) if header.path.is_file() else "",
    )


def from_catalog(entry: CatalogModel, quantization: str = "") -> PlannedModel:
    """Return a model of the catalog, in its usual quantization by default."""
    kind = quantization or entry.quantization or USUAL
    size = entry.sizes.get(kind, 0.0) * 1e9 or 1e9 * entry.params * quant_type(kind).bits / 8
    work = typical_work(size, kind, params=1e9 * entry.params, active=entry.active_share, id=entry.id)
    kv_rows = {one.window: one.nbytes for one in work.attention}
    return PlannedModel(name=entry.name, quantization=kind, size=size, work=work, kv_rows=kv_rows)
