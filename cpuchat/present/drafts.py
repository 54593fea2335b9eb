"""Formats draft model candidates as list rows and details."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from cpuchat import paths
from cpuchat.models.drafts.candidates import Candidate
from cpuchat.models.heads import ENGINE, TITLES, title
from cpuchat.present.rows import ListRow
from cpuchat.telemetry.units import size
from cpuchat.text import clean_line

AUTO, NONE = "auto", "none"
"""Keys of the rows that are no model: the draft model that belongs to the target, and no draft model at all."""

_OTHERS = {
    AUTO: ("Automatic", "the catalog's draft model for each target, if it is downloaded and compatible"),
    NONE: ("No draft model", "only suffix decoding, which needs none"),
}


def rows(found: dict[str, Candidate], loaded: str, wanted: str) -> list[ListRow]:
    """Return all rows. `found` by key; `loaded` is the key of the loaded draft model ("" = none), `wanted` the setting:
    AUTO, NONE or else.
    """
    lines = [ListRow(name="candidates")] if found else []
    names = Counter((one.name, one.quantization) for one in found.values())
    for key, one in found.items():
        line = _row(key, one, is_loaded=key == loaded)
        if one.path is not None and names[one.name, one.quantization] > 1:
            line = replace(line, name=one.path.stem)  # another one has the same name
        lines.append(line)
    lines.append(ListRow(name="other options"))
    for key, (name, note) in _OTHERS.items():
        chosen = key == wanted
        lines.append(ListRow(key, "●" if chosen else "→", name, note=note, strong=chosen))
    return lines


def _row(key: str, one: Candidate, *, is_loaded: bool) -> ListRow:
    mark = "●" if is_loaded else "○" if one.where == "here" else "◌"
    state = "unknown" if one.failed else {None: "checking…", True: "compatible", False: "mismatch"}[one.fits]
    gain = TITLES[one.head] if one.head else _gain(one)
    columns = (one.quantization, size(one.size) if one.size else "", state, gain)
    return ListRow(key, mark, one.name, columns, strong=is_loaded, dim=one.fits is False or bool(one.failed))


def _gain(one: Candidate) -> str:
    """`≈ 1.1–1.4×`, `no gain`; "" when unknown or irrelevant."""
    if one.fits is False or not one.expected.gains:
        return ""
    speedups = [gain.speedup for gain in one.expected.gains]
    if not any(gain.depth for gain in one.expected.gains):
        return "no gain"
    low, high = f"{min(speedups):.1f}", f"{max(speedups):.1f}"
    return f"≈ {low}×" if low == high else f"≈ {low}–{high}×"


def details(key: str, one: Candidate | None, *, is_loaded: bool, is_best: bool) -> list[tuple[str, str]]:
    """Label and text, cleaned."""
    if one is None:
        return [("effect", _OTHERS[key][1])]
    place = "loaded as draft model" if is_loaded else "downloaded" if one.where == "here" else "on Hugging Face"
    text = [
        ("state", place),
        ("head", f"{title(one.head)}, for {ENGINE} only: it runs in place of cpuchat's own engine" if one.head else ""),
        ("target" if one.head else "vocabulary", _vocabulary(one)),
        ("advice", "best known candidate for this model" if is_best else ""),
        ("gain", one.expected.words if one.fits is not False else ""),
        ("basis", one.expected.why if one.expected.gains and one.fits is not False else ""),
        ("catalog", "recommended for this model" if one.named else ""),
        ("repository", one.repo),
        ("path", paths.shown(one.path) if one.path is not None else ""),
    ]
    return [(label, clean_line(words)) for label, words in text if words]


def _vocabulary(one: Candidate) -> str:
    if one.failed:
        return f"unknown: {one.failed}"
    if one.verdict is None:
        return "comparing…"
    if not one.verdict.ok:
        return f"incompatible: {one.verdict.reason}"
    return f"compatible. {one.verdict.note}" if one.verdict.note else "compatible"


def keys(one: Candidate | None, *, is_loaded: bool) -> str:
    """Return what Enter does, for the border of the pane."""
    if one is None:
        return "Enter select"
    if is_loaded or one.fits is False:
        return ""
    if one.head is not None and one.where == "here":
        return f"Enter use with {ENGINE}"
    return "Enter use as draft model" if one.where == "here" else f"Enter download {size(one.size)} and use"
