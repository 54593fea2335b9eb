"""Which draft model to load beside a target."""

from __future__ import annotations

from pathlib import Path

from cpuchat.errors import CpuchatError
from cpuchat.models.drafts.pairing import check_files, find_draft, require_pair
from cpuchat.models.library import Library

NO_DRAFT = "none"


def choose_draft(target: Path, wanted: str, library: Library, *, strict: bool = True) -> tuple[Path | None, str]:
    """The draft model for `target`, and a note for the user ("" when there is nothing to say).

    Args:
        wanted: "none"; "" or "auto" for the one that belongs to the target, if any; else what `Library.resolve`
            takes.
        strict: a model that was asked for and cannot be used is an error; else it is left out, and the note says why.
            For a setting that was made with another target in mind.

    Raises:
        DraftMismatch: the model that was asked for does not fit; the hint names one that would.
        ModelNotFound, ModelDamaged: it is not there or cannot be read.
    """
    wanted = wanted.strip()
    if wanted == NO_DRAFT:
        return None, ""
    if wanted in ("", "auto"):
        return _own_draft(target, library)
    try:
        draft = library.resolve(wanted)
        return draft, require_pair(target, draft, library).note
    except CpuchatError as error:
        if strict:
            raise
        return None, f"No draft model is loaded. {error}"


def _own_draft(target: Path, library: Library) -> tuple[Path | None, str]:
    try:
        draft = find_draft(target, library)
        if draft is None or not (verdict := check_files(target, draft)).ok:
            return None, ""
    except CpuchatError:  # nobody asked for it
        return None, ""
    return draft, verdict.note
