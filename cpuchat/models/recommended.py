"""The sampling options that a model's publisher recommends: those of its header, else those of the catalog.

Header keys are gguf-py's `general.sampling.*`, as llama.cpp reads them.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from cpuchat.errors import CpuchatError
from cpuchat.models.catalog import load_catalog, match_local
from cpuchat.models.gguf.header import GGUFHeader, read_model
from cpuchat.models.library.places import is_demo
from cpuchat.settings import SamplingSection, Settings, with_changes

_KEYS: Final = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repeat_penalty",
    "penalty_last_n": "repeat_last_n",
}
_DEMO: Final = {"temperature": 0.0}
"""A model this small loses its thread with any other word than the likeliest."""


class Recommended(msgspec.Struct, frozen=True, kw_only=True):
    """Recommended options by the names of `SamplingSection`, and where they were found ("": nowhere)."""

    sampling: dict[str, Any] = {}
    source: Literal["", "header", "catalog", "demo"] = ""

    def applied_to(self, chosen: Settings) -> Settings:
        """Return a copy of `chosen` in which these options replace those that are not set."""
        unset = {name: value for name, value in self.sampling.items() if getattr(chosen.sampling, name) is None}
        return with_changes(chosen, {"sampling": unset}) if unset else chosen


NOTHING: Final = Recommended()


def recommended(model: Path) -> Recommended:
    """Return what is recommended for a model file; nothing for one that cannot be read. Reads header and catalog."""
    if is_demo(model):
        return Recommended(sampling=_DEMO, source="demo")
    try:
        header = read_model(model)
    except (CpuchatError, OSError):
        return NOTHING
    if found := _of_header(header):
        return Recommended(sampling=found, source="header")
    entry = match_local(load_catalog(), header)
    found = _given(entry.sampling) if entry is not None else {}
    return Recommended(sampling=found, source="catalog") if found else NOTHING


def _of_header(header: GGUFHeader) -> dict[str, float]:
    """Return the options of a header; those with invalid values are left out."""
    found: dict[str, float] = {}
    for key, name in _KEYS.items():
        value = header.metadata.get(f"general.sampling.{key}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            continue
        if isinstance(value, float):
            value = float(f"{value:.6g}")  # 0.6 and not 0.6000000238418579: stored with 32 bits
        elif name == "top_k":
            value = max(value, 0)  # llama.cpp: zero or less is off
        try:
            found |= _given(msgspec.convert({name: value}, SamplingSection))
        except msgspec.ValidationError:
            continue
    return found


def _given(options: SamplingSection) -> dict[str, Any]:
    values = msgspec.structs.asdict(options)
    return {name: value for name, value in values.items() if name != "seed" and value is not None}
