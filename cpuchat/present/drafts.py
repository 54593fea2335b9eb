"""How draft models read: a line in the list, and what stands beside it. Plain functions, no widgets."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from cpuchat import paths
from cpuchat.models.drafts.candidates import Candidate
from cpuchat.present.rows import ListRow
from cpuchat.telemetry import units
from cpuchat.text import clean_line

AUTO, NONE = "auto", "none"
"""Keys of the lines that are no model: the one that belongs to the target, and plain decoding."""

_OTHERS = {
    AUTO: ("choose by itself", "for each model the one that the catalog names, if it is here and fits"),
    NONE: ("no draft model", "only the drafters that need none: suffix and lookup"),
}


def rows(found: dict[str, Candidate], loaded: str, wanted: str) -> list[ListRow]:
    """All lines. `found` by key; `loaded` is the key of the draft model that is loaded ("" = none), `wanted` the
    setting: AUTO, NONE or else."""
    lines = [ListRow(name="can these draft?")] if found else []
    names = Counter((one.name, one.quantization) for one in found.values())
    for key, one in found.items():
        line = _row(key, one, is_loaded=key == loaded)
        if one.path is not None and names[one.name, one.quantization] > 1:
            line = replace(line, name=one.path.stem)  # its name does not tell it from others
        lines.append(line)
    lines.append(ListRow(name="or"))
    for key, (name, note) in _OTHERS.items():
        chosen = key == wanted
        lines.append(ListRow(key, "●" if chosen else "→", name, note=note, strong=chosen))
    return lines


def _row(key: str, one: Candidate, *, is_loaded: bool) -> ListRow:
    mark = "●" if is_loaded else "○" if one.where == "here" else "◌"
    state = "no answer" if one.failed else {None: "checking …", True: "fits", False: "does not"}[one.fits]
    columns = (one.quantization, units.size(one.size) if one.size else "", state, _gain(one))
    return ListRow(key, mark, one.name, columns, strong=is_loaded, dim=one.fits is False or bool(one.failed))


def _gain(one: Candidate) -> str:
    """`≈ 1.1–1.4×`, `no gain`, "" when it can't be told or does not matter."""
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
        _, about = _OTHERS[key]
        return [("means", about)]
    text = [
        ("is", "loaded beside the model" if is_loaded else "here" if one.where == "here" else "on Hugging Face"),
        ("fits", _verdict(one)),
        ("advice", "the best of these, by what is known" if is_best else ""),
        ("gain", one.expected.words if one.fits is not False else ""),
        ("because", one.expected.why if one.expected.gains and one.fits is not False else ""),
        ("named", "by the catalog for this model" if one.named else ""),
        ("from", one.repo),
        ("path", paths.shown(one.path) if one.path is not None else ""),
    ]
    return [(label, clean_line(words)) for label, words in text if words]


def _verdict(one: Candidate) -> str:
    if one.failed:
        return f"not known: {one.failed}"
    if one.verdict is None:
        return "its vocabulary is being compared …"
    if not one.verdict.ok:
        return f"no: {one.verdict.reason}"
    return f"yes, the vocabularies agree. {one.verdict.note}".rstrip()


def keys(one: Candidate | None, *, is_loaded: bool) -> str:
    """What Enter does, for the edge of the pane."""
    if one is None:
        return "Enter chooses that"
    if is_loaded or one.fits is False:
        return ""
    return "Enter drafts with it" if one.where == "here" else f"Enter gets {units.size(one.size)}, then uses it"
