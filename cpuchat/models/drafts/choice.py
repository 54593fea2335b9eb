"""Which draft model to load beside a target."""

from __future__ import annotations

import os
from pathlib import Path

from cpuchat import paths
from cpuchat.errors import CpuchatError
from cpuchat.models.catalog import Catalog, CatalogModel, load_catalog, match_local
from cpuchat.models.drafts.calibrations import UNKNOWN, target_costs
from cpuchat.models.drafts.candidates import Candidate, candidates, check, most_read
from cpuchat.models.drafts.pairing import check_files, require_pair
from cpuchat.models.gguf.header import GGUFHeader, read_model
from cpuchat.models.library.library import Library
from cpuchat.models.library.places import DEMO_FILES
from cpuchat.text import clean_line

NO_DRAFT = "none"
AUTO = ("", "auto")


def choose_draft(
    target: Path, wanted: str, library: Library, *, strict: bool = True, measured_only: bool = False
) -> tuple[Path | None, str]:
    """The draft model for `target`, and a note for the user ("" when there is nothing to say).

    Args:
        wanted: "none"; "" or "auto" for the one that belongs to the target, if any (`own_draft`); else what
            `Library.resolve` takes.
        strict: a model that was asked for and cannot be used is an error; else it is left out, and the note says why.
            For a setting that was made with another target in mind.
        measured_only: as of `own_draft`.

    Raises:
        DraftMismatch: the model that was asked for does not fit; the hint names one that would.
        ModelNotFound, ModelDamaged: it is not there or cannot be read.
    """
    wanted = wanted.strip()
    if wanted == NO_DRAFT:
        return None, ""
    if wanted in AUTO:
        try:
            return own_draft(target, library, measured_only=measured_only)
        except CpuchatError:  # nobody asked for it
            return None, ""
    try:
        draft = library.resolve(wanted)
        return draft, require_pair(target, draft, library).note
    except CpuchatError as error:
        if strict:
            raise
        return None, f"No draft model is loaded. {error}"


def own_draft(target: Path, library: Library, *, measured_only: bool = False) -> tuple[Path | None, str]:
    """The draft model on this machine that belongs to `target`, and a note that says which and why.

    For a demo model, that of the package. For others the first that the catalog names for it, that is here, has the
    same vocabulary, and reads little enough for a token. The depth controller sees to it that it does not slow the
    answers down.

    Args:
        measured_only: of those that the catalog names, only one whose cost beside this target is known.

    Raises:
        ModelNotFound, ModelDamaged: the target cannot be read, or the draft of the demo models is missing.
    """
    if _is_demo(target):
        draft = library.resolve("demo-draft")
        return (draft, "") if check_files(target, draft).ok else (None, "")
    catalog, header = load_catalog(), read_model(target)
    entry = match_local(catalog, header)
    if entry is None:
        return None, ""
    costs = target_costs(target) if measured_only else UNKNOWN
    for one in named_drafts(header, entry, library, catalog):
        if one.path is None or (measured_only and not costs.measured_draft(one.path)):
            continue
        if check(one, header).fits:
            return one.path, _note(one, entry.name)
    return None, ""


def named_drafts(target: GGUFHeader, entry: CatalogModel, library: Library, catalog: Catalog) -> list[Candidate]:
    """Those that the catalog names for `target` (its `entry`), here or on the hub, if they read little enough."""
    if not entry.drafts:  # reading what is here would be in vain
        return []
    limit, found = most_read(target), candidates(target, library.local_models(), catalog)
    return [one for one in found if one.named and one.size <= limit]


def _is_demo(target: Path) -> bool:
    targets = (os.path.realpath(paths.demo_dir() / DEMO_FILES[name]) for name in ("demo", "demo-q4"))
    return os.path.realpath(target) in targets


def _note(candidate: Candidate, target: str) -> str:
    name = clean_line(f"{candidate.name} {candidate.quantization}".strip())
    return f"{name} drafts: the catalog names it for {clean_line(target)}, and its vocabulary fits."
