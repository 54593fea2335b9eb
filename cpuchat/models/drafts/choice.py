"""Chooses the draft model or head to load beside a target, or to count beside one that is not on this machine yet."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from cpuchat.base import paths
from cpuchat.base.errors import CpuchatError, DraftMismatch
from cpuchat.base.files import JsonCache
from cpuchat.base.text import clean_line
from cpuchat.config.settings import Settings
from cpuchat.models.catalog import load_catalog, match_local
from cpuchat.models.drafts.candidates import (
    INCLUDED,
    UNKNOWN,
    DraftCandidate,
    Expectation,
    TargetCosts,
    candidates,
    check,
    expected_pair,
    header_of,
    max_read,
    measured_draft_ms,
    rank_among,
    target_costs,
)
from cpuchat.models.drafts.pairing import OTHER_DRAFTS, check_files, check_pair, is_known_pair
from cpuchat.models.engine_version import HEADS
from cpuchat.models.gguf.header import GGUFHeader, known_as, read_model
from cpuchat.models.heads import is_own, kind_named, mismatch, require_head, title, usable_layers
from cpuchat.models.library.library import Library
from cpuchat.models.library.places import LocalModel, is_demo
from cpuchat.models.machine import Machine, TunedMachine
from cpuchat.models.ollama import file_name
from cpuchat.models.prediction import Prediction, predict

if TYPE_CHECKING:
    from cpuchat.models.hub.client import Hub
    from cpuchat.models.hub.repository import RepoModel, Repository


class ChosenDrafts:
    """Remembers the draft models that the user chose, as `choose_draft` takes them: `draft_models.json` of the data
    folder, by the real path of the target (in the Hugging Face cache, its content)."""

    def __init__(self) -> None:
        self._cache = JsonCache(paths.chosen_drafts_file(), str, version=1, max_entries=500)

    def of(self, target: Path) -> str:
        """Return what was chosen for `target`; "" where nothing was."""
        return self._cache.read().get(os.path.realpath(target), "")

    def put(self, target: Path, wanted: str) -> None:
        """Remember `wanted` for `target`; "" or "auto" forgets it."""
        key = os.path.realpath(target)
        if wanted in ("", "auto"):
            self._cache.remove(key)
        else:
            self._cache.put({key: wanted})


NO_DRAFT = "none"
AUTO = ("", "auto")


def choose_draft(
    target: Path, wanted: str, library: Library, *, strict: bool = True, measured_only: bool = False
) -> tuple[Path | None, str]:
    """Return the draft model for `target`, and a note for the user ("" for none).

    `wanted`: "none"; "" or "auto" for the one that the user chose for the target (`ChosenDrafts`), else the one that
    belongs to it, if any (`own_draft`); else what `Library.resolve` takes, or "mtp" for the MTP head that the target
    contains. `strict`: a wanted model that cannot be used is an error; else it is left out, and the note says why, for
    settings made with another target in mind. `measured_only`: as of `own_draft`. Raises DraftMismatch: the wanted
    model does not fit; ModelNotFound, ModelDamaged: it does not exist or cannot be read."""
    wanted = wanted.strip()
    if wanted == NO_DRAFT:
        return None, ""
    if wanted in AUTO:
        chosen, note = ChosenDrafts().of(target), ""
        if chosen:
            draft, note = choose_draft(target, chosen, library, strict=False)
            if draft is not None or chosen == NO_DRAFT:
                return draft, note
        try:
            draft, why = own_draft(target, library, measured_only=measured_only)
        except CpuchatError:  # not explicitly wanted
            return None, note
        return draft, " ".join(filter(None, (note, why)))
    try:
        draft = target if wanted == INCLUDED else library.resolve(wanted)
        if not is_known_pair(target, draft) and require_head(read_model(target), read_model(draft)) is not None:
            return draft, ""
        if wanted == INCLUDED:
            raise DraftMismatch(f"{file_name(target)} contains no MTP head.", "Choose a draft model, or `none`.")
        verdict = check_files(target, draft)
        if not verdict.ok:
            raise mismatch(target, draft, verdict.reason, OTHER_DRAFTS)
        return draft, verdict.note
    except CpuchatError as error:
        if strict:
            raise
        return None, f"No draft model: {error}"


def predict_load(header: GGUFHeader, machine: TunedMachine, library: Library) -> tuple[Prediction, str]:
    """Predict the model of `header` as a load takes it: with what tuning found for it, and with the draft model beside
    it, whose name is returned too (else a note why there is none). Raises CpuchatError, OSError."""
    path, chosen = header.path, machine.settings(header.path)
    draft, note = None, ""
    if path.is_file():
        draft, note = choose_draft(path, chosen.speculation.wanted_draft, library, strict=False)
    beside = read_model(draft) if draft is not None else None
    if beside is not None:
        note = title("mtp") if is_own(path, beside.path) else beside.name
    return predict(header, chosen.load_options(), machine.of(path), draft=beside), note


class DraftChoice(msgspec.Struct, frozen=True):
    """The draft model to load (None: none), a note for the user, and why the one that the settings name cannot be
    used ("" for none)."""

    path: Path | None = None
    note: str = ""
    problem: str = ""


def draft_of_settings(
    target: Path, settings: Settings, library: Library, *, strict: bool, calibrate: bool
) -> DraftChoice:
    """Return the draft model for `target` by the settings. `calibrate`: False: what passes cost is not measured, and a
    draft model that would need it is not taken. Raises DraftMismatch, ModelNotFound, ModelDamaged, OSError: `strict`
    (as of `choose_draft`), and it cannot be used."""
    section, wanted = settings.speculation, settings.speculation.wanted_draft
    measured_only = not calibrate and not section.depth  # one that was not measured would be loaded in vain
    try:
        draft, note = choose_draft(target, wanted, library, measured_only=measured_only)
    except (CpuchatError, OSError) as error:
        if strict:
            raise
        told = f"No draft model: {error}"
        # The settings may have been made with another target in mind; a file that is gone is a fault.
        return DraftChoice(note=told) if isinstance(error, DraftMismatch) else DraftChoice(problem=told)
    if draft is None and not note and section.drafters == "draft" and wanted != NO_DRAFT:
        note = f"No draft model is known for {file_name(target)}. Choose one with --draft-model."
    return DraftChoice(draft, note)


def own_draft(target: Path, library: Library, *, measured_only: bool = False) -> tuple[Path | None, str]:
    """Return the local draft model that belongs to `target`, and a note that says which and why.

    For a demo model, that of the package. For others the head that it contains, else the first that the catalog names
    for it, is downloaded, has the same vocabulary, and reads little enough per token. The depth controller keeps it
    from slowing answers down. `measured_only`: except for demo models, only one whose cost beside this target is known.
    Raises ModelNotFound, ModelDamaged: the target cannot be read, or the draft of the demo models is missing."""
    if is_demo(target):
        draft = library.resolve("demo-draft")
        return (draft, "") if check_files(target, draft).ok else (None, "")
    header = read_model(target)
    if usable_layers(header):
        return target, ""
    costs = target_costs(target)
    if measured_only and not costs.draft_ms:
        return None, ""
    model, named = named_drafts(header, library, beside=target)
    for one in named:
        is_measured = one.path is not None and bool(measured_draft_ms(costs, one.path))
        if one.path is None or (measured_only and not is_measured):
            continue
        if check(one, header).fits:
            if is_measured:  # it was said when the two were first loaded
                return one.path, ""
            name = _title(one.name, one.quantization)
            return one.path, f"Draft model: {name}, recommended by the catalog for {clean_line(model)}."
    return None, ""


def named_drafts(target: GGUFHeader, library: Library, beside: Path | None = None) -> tuple[str, list[DraftCandidate]]:
    """Return the name that the catalog has for `target`, and the drafts that it names for it, if they are small enough
    and have a SIMD kernel; of those here, the ones in the folder of the file `beside`, too."""
    catalog = load_catalog()
    entry = match_local(catalog, target)
    if entry is None or not entry.drafts:  # saves reading the library
        return "", []
    limit, found = max_read(target), candidates(target, library.local_models(beside), catalog)
    return entry.name, [one for one in found if one.named and one.size <= limit and not one.expected.scalar_type]


def _title(name: str, quantization: str) -> str:
    return clean_line(f"{name} {quantization}".strip())


class PlannedDraft(msgspec.Struct, frozen=True):
    """A draft model that fits the vocabulary. `here`: it is on this machine; else it has to be downloaded, too."""

    header: GGUFHeader
    name: str
    here: bool = True


def planned_draft(target: GGUFHeader, wanted: str, library: Library, hub: Hub | None = None) -> PlannedDraft | None:
    """Return the draft model that `choose_draft` would load once the model of `target` is downloaded; None if none.
    Where it would find none, the one that the catalog names, from the hub. Reads headers, over the network too.
    `wanted`: as of `choose_draft`. `hub`: None: only what is on this machine."""
    wanted = wanted.strip()
    if wanted == NO_DRAFT:
        return None
    if wanted not in AUTO:
        with contextlib.suppress(CpuchatError):  # it would be left out at the load, too
            header = read_model(library.resolve(wanted))
            if check_pair(target, header).ok:
                return PlannedDraft(header, _title(header.name, header.quantization))
        return None
    if usable_layers(target):
        return PlannedDraft(target, title("mtp"))
    for one in sorted(named_drafts(target, library)[1], key=lambda one: one.where != "here"):
        with contextlib.suppress(CpuchatError):
            header = header_of(one, hub)
            if header is not None and check_pair(target, header).ok:
                return PlannedDraft(header, _title(one.name, one.quantization), one.where == "here")
    return None


NOT_READ = Expectation(why="not predicted before its header is read")
_HEAD_QUANTIZATIONS = ("Q8_0", "BF16", "F16", "Q6_K", "Q4_K_M", "Q4_0")


def local_heads(
    target: GGUFHeader, here: Iterable[LocalModel], costs: TargetCosts = UNKNOWN, machine: Machine | None = None
) -> list[DraftCandidate]:
    """Return the MTP layers of the target itself, then the head files on this machine, unchecked. Reads headers.
    `costs`, `machine`: as of `candidates`."""
    listed: list[DraftCandidate] = []
    if usable_layers(target):
        expected = expected_pair(target, target, costs, machine)
        own = {"name": title("mtp"), "path": target.path, "head": "mtp", "included": True}
        listed.append(DraftCandidate(where="here", **own, expected=expected))
    for model in here:
        if model.kind == "head":
            kind = kind_named(model.path.name) or HEADS.get(model.architecture, "mtp")
            expected = NOT_READ
            with contextlib.suppress(CpuchatError):  # `check` tells what is wrong with it
                expected = expected_pair(target, read_model(model.path), costs, machine)
            listed.append(DraftCandidate.of_file(model, name=known_as(model.path), head=kind, expected=expected))
    return listed


def heads_of(repository: Repository, here: Iterable[DraftCandidate] = ()) -> list[DraftCandidate]:
    """Return the heads of the target's repository that are not `here`, unchecked: one file of each kind and base, the
    least quantized of the usual ones."""
    there = {one.path.stem for one in here if one.path is not None and one.repo.lower() == repository.id.lower()}
    best: dict[tuple[str, str], RepoModel] = {}
    rank = partial(rank_among, _HEAD_QUANTIZATIONS)
    for model in repository.models:
        kind = kind_named(model.files[0].path)
        if kind is None or not model.complete or model.name in there:
            continue
        other = best.get((kind, model.base))
        if other is None or rank(model.quantization) < rank(other.quantization):
            best[kind, model.base] = model
    return [
        DraftCandidate(
            name=model.name, where="hub", repo=repository.id, quantization=model.quantization, size=model.size,
            head=kind_named(model.files[0].path), file=model.files[0].path, expected=NOT_READ,
        )
        for model in best.values()
    ]  # fmt: skip
