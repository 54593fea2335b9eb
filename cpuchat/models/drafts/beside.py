"""Which draft model is to be counted beside a model that is not on this machine yet."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import msgspec

from cpuchat.errors import CpuchatError
from cpuchat.models.catalog import load_catalog, match_local
from cpuchat.models.drafts.candidates import Candidate
from cpuchat.models.drafts.choice import AUTO, NO_DRAFT, named_drafts
from cpuchat.models.drafts.pairing import check_pair
from cpuchat.models.gguf.header import GGUFHeader, read_model
from cpuchat.models.library.library import Library
from cpuchat.text import clean_line

if TYPE_CHECKING:
    from cpuchat.models.hub.client import Hub


class Beside(msgspec.Struct, frozen=True):
    """A draft model that fits the vocabulary. `here`: it would be loaded; else it would have to be downloaded, too."""

    header: GGUFHeader
    name: str
    here: bool = True


def draft_beside(target: GGUFHeader, wanted: str, library: Library, hub: Hub | None = None) -> Beside | None:
    """The draft model that `choose_draft` would load once the model of `target` is here; None if none.

    Where it would find none, the one that the catalog names, from the hub. Reads headers, over the network too.

    Args:
        wanted: as of `choose_draft`.
        hub: None: only what is on this machine.
    """
    wanted = wanted.strip()
    if wanted == NO_DRAFT:
        return None
    if wanted not in AUTO:
        with contextlib.suppress(CpuchatError):  # it would be left out at the load, too
            header = read_model(library.resolve(wanted))
            return _if_it_fits(target, Beside(header, _name(header.name, header.quantization)))
        return None
    catalog = load_catalog()
    entry = match_local(catalog, target)
    found = named_drafts(target, entry, library, catalog) if entry is not None else []
    for one in sorted(found, key=lambda one: one.where != "here"):
        with contextlib.suppress(CpuchatError):
            header = _header(one, hub)
            if header is not None and (
                beside := _if_it_fits(target, Beside(header, _name(one.name, one.quantization), one.where == "here"))
            ):
                return beside
    return None


def _header(candidate: Candidate, hub: Hub | None) -> GGUFHeader | None:
    """Raises HubError, ModelDamaged, ModelNotFound."""
    from cpuchat.models.hub.choice import choose

    if candidate.path is not None:
        return read_model(candidate.path)
    if hub is None:
        return None
    repository = hub.repository(candidate.repo)
    return hub.header(repository, choose(repository, candidate.quantization))


def _if_it_fits(target: GGUFHeader, draft: Beside) -> Beside | None:
    return draft if check_pair(target, draft.header).ok else None


def _name(name: str, quantization: str) -> str:
    return clean_line(f"{name} {quantization}".strip())
