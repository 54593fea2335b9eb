"""Lists models that may draft for a target: local ones and those the catalog names, with the expected speed-up.

`candidates` lists them without reading any; `check` compares one vocabulary. So a screen can show all rows first and
fill in the results.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from cpuchat.costmodel.passes import pair_costs
from cpuchat.costmodel.work import ALIKE, ModelWork
from cpuchat.errors import CpuchatError, NotOnHub
from cpuchat.models.catalog import Catalog, CatalogModel, match_local
from cpuchat.models.dimensions import typical_work
from cpuchat.models.drafts.calibrations import UNKNOWN, TargetCosts
from cpuchat.models.drafts.gain import Expectation, expectation
from cpuchat.models.drafts.pairing import Compatibility, PairCache, check_files, check_pair
from cpuchat.models.gguf.header import GGUFHeader, read_model
from cpuchat.models.heads import HeadKind, difference
from cpuchat.models.library.model import LocalModel
from cpuchat.models.library.places import is_demo
from cpuchat.models.machine import NOT_MEASURED, Machine
from cpuchat.models.prediction import N_PAST, local_work
from cpuchat.models.traffic import traffic_of
from cpuchat.models.work import model_work
from cpuchat.telemetry.traffic import pass_bytes

if TYPE_CHECKING:
    from cpuchat.models.hub.client import Hub
    from cpuchat.models.hub.repository import RepoModel, Repository

# A draft model is small, so its least quantized file costs little more to read than the smallest one.
_DRAFT_QUANTIZATIONS = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0")
LONGEST = 32
"""Tokens of the longest verify pass that is considered."""
_MAX_READ_SHARE = 0.5  # of the bytes that the target reads
_LOCAL_BONUS = 1.05  # what must be downloaded has to be faster by more than this
INCLUDED = "mtp"
"""The value for `--draft-model` that means the MTP layers of the target itself."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A model that may draft. `where`: on this machine (then `path` is its file) or on the hub (then `repo`).

    `size` in bytes (0: not known). `entry` is the id of its catalog entry, "" for none, and `named` whether the catalog
    names it for this target. `verdict` None: not checked yet. `failed` is why it could not be checked, else "".

    `head` is the kind of a draft head, which only llama-server can use; None for a draft model. `included`: the target
    itself contains it, and `path` is the target's. On the hub `file` is its path in the repository.
    """

    name: str
    where: Literal["here", "hub"]
    path: Path | None = None
    repo: str = ""
    quantization: str = ""
    size: int = 0
    entry: str = ""
    named: bool = False
    verdict: Compatibility | None = None
    failed: str = ""
    expected: Expectation = Expectation()
    head: HeadKind | None = None
    file: str = ""
    included: bool = False

    @property
    def spec(self) -> str:
        """Return the value for `--draft-model`, and for one on the hub for `models download` first:
        `owner/name:Q8_0`.
        """
        if self.included:
            return INCLUDED
        if self.path is not None:
            return str(self.path)
        if self.file:
            return f"{self.repo}:{self.name}"
        return f"{self.repo}:{self.quantization}" if self.quantization else self.repo

    @property
    def fits(self) -> bool | None:
        """Return whether it fits; None when unknown."""
        return None if self.verdict is None else self.verdict.ok


def most_read(target: GGUFHeader) -> float:
    """Return how many bytes a draft model may read for a token: half of what the target reads. More never pays, even if
    four of five drafted tokens are accepted and verifying a second one costs only a third of a pass."""
    return _MAX_READ_SHARE * pass_bytes(traffic_of(target), 1, 0)


def candidates(
    target: GGUFHeader,
    here: Iterable[LocalModel],
    catalog: Catalog,
    costs: TargetCosts = UNKNOWN,
    machine: Machine | None = None,
    *,
    acceptance: float | None = None,
    beside: Path | None = None,
) -> list[Candidate]:
    """Return all of them unchecked: those named by the catalog first, then the local ones, smaller ones first.

    Reads no files, except the fingerprints of draft models that were measured.

    Args:
        target: header of the whole model (`read_model`).
        here: the models on this machine.
        costs: of the target; for a loaded one with `pass_ms` of its ModelInfo.
        machine: to predict costs that were not measured.
        acceptance: measured with the draft model at `beside`, which is loaded.
    """
    judged = _Target(target.path, model_work(target, alike=ALIKE), costs, machine)
    entry = match_local(catalog, target)
    wanted = catalog.drafts_of(entry) if entry is not None else []
    found: list[Candidate] = []
    toy = is_demo(target.path)
    for model in here:
        if toy and is_demo(model.path):
            continue  # its own smaller quantization drafts no faster than it decodes
        if model.damaged is None and model.size < target.file_size and model.path != target.path:
            measured = acceptance if beside is not None and model.path == beside else None
            found.append(_local(model, match_local(catalog, model), wanted, judged, measured))
    there = {candidate.entry for candidate in found}
    limit = most_read(target)
    found += [_on_hub(model, limit, judged) for model in wanted if model.id not in there]
    order = {model.id: number for number, model in enumerate(wanted)}

    def place(one: Candidate) -> tuple[int, int, int]:
        return order.get(one.entry, len(order)), _rank(one.quantization) if one.named else 0, one.size

    return sorted(found, key=place)


class _Target(NamedTuple):
    """What draft models are compared for: a target's work and measured costs, on a machine."""

    path: Path
    work: ModelWork
    costs: TargetCosts
    machine: Machine | None

    def expected(
        self, draft: ModelWork, path: Path | None = None, acceptance: float | None = None, *, exact: bool = False
    ) -> Expectation:
        """Return the expected speed-up, from measured costs where there are some, else by the cost model.

        Args:
            path: of the draft model, if it is on this machine.
            exact: `draft` is from its header.
        """
        passes = self.costs.pass_ms
        draft_ms = self.costs.measured_draft(path) if path is not None else 0.0
        basis = "measured here with this draft model" if draft_ms else _no_basis(self.machine)
        if self.machine is not None and self.machine.profile is not None and not (passes and draft_ms):
            both = pair_costs(self.machine.profile, self.work, draft, N_PAST, LONGEST)
            own = self.machine.factor_of(self.path)
            passes = passes or tuple(1e3 * own * seconds for seconds in both.verify)
            if not draft_ms:
                about = "predicted" if exact else "≈ from its size"
                own = self.machine.factor_of(path) if path is not None else 1.0
                draft_ms, basis = 1e3 * own * both.draft, f"{about} ({self.machine.source})"
        if draft_ms and self.costs.pass_ms and self.work.is_moe:
            basis += "; passes calibrated with random tokens, which use more experts than text"
        return expectation(passes, draft_ms, basis, acceptance)


def _no_basis(machine: Machine | None) -> str:
    return machine.peak_source if machine is not None else NOT_MEASURED


def expected_pair(target: GGUFHeader, draft: GGUFHeader, costs: TargetCosts, machine: Machine) -> Expectation:
    """Return the expected speed-up of a local draft model, both by their headers.

    Args:
        costs: of the target.
    """
    judged = _Target(target.path, model_work(target, alike=ALIKE), costs, machine)
    return judged.expected(model_work(draft), draft.path, exact=True)


def _local(
    model: LocalModel, entry: CatalogModel | None, wanted: list[CatalogModel], target: _Target, acceptance: float | None
) -> Candidate:
    id = entry.id if entry is not None else ""
    return Candidate(
        name=model.name,
        where="here",
        path=model.path,
        repo=model.repo,
        quantization=model.quantization,
        size=model.size,
        entry=id,
        named=entry in wanted,
        expected=target.expected(local_work(model, id), model.path, acceptance, exact=model.work is not None),
    )


def _on_hub(model: CatalogModel, limit: float, target: _Target) -> Candidate:
    """Return the candidate with its least quantized file of at most `limit` bytes, else the smallest."""
    sizes = {name: round(1e9 * size) for name, size in model.sizes.items()}
    fitting = (name for name in _DRAFT_QUANTIZATIONS if name in sizes and sizes[name] <= limit)
    quantization = next(fitting, min(sizes, key=lambda name: sizes[name], default=""))
    size = sizes.get(quantization, 0)
    work = typical_work(max(size, 1), quantization, params=1e9 * model.params, id=model.id)
    return Candidate(
        name=model.name,
        where="hub",
        repo=model.repos[0],
        quantization=quantization,
        size=size,
        entry=model.id,
        named=True,
        expected=target.expected(work),
    )


def _rank(quantization: str) -> int:
    """Return a sort key: better quantizations for a draft model come first."""
    known = _DRAFT_QUANTIZATIONS
    return known.index(quantization) if quantization in known else len(known)


def check(
    candidate: Candidate, target: GGUFHeader, *, hub: Hub | None = None, cache: PairCache | None = None
) -> Candidate:
    """Return the candidate with its verdict. Reads headers, of one on the hub over the network: not for the UI thread.

    Args:
        hub: None: candidates on the hub stay unchecked.
        cache: as of `check_files`.
    """
    try:
        if candidate.head is not None:
            return _checked_head(candidate, target, hub)
        if candidate.path is not None:
            verdict = check_files(target.path, candidate.path, cache=cache)
        elif hub is None:
            return candidate
        else:
            candidate, verdict = _checked_on_hub(candidate, target, hub)
    except CpuchatError as error:
        return msgspec.structs.replace(candidate, failed=error.message)
    return msgspec.structs.replace(candidate, verdict=verdict)


def _checked_head(candidate: Candidate, target: GGUFHeader, hub: Hub | None) -> Candidate:
    """Check a draft head. Raises HubError, ModelDamaged, ModelNotFound."""
    if candidate.path is not None:
        head = target if candidate.included else read_model(candidate.path)
    elif hub is None:
        return candidate
    else:
        repository = hub.repository(candidate.repo)
        head = hub.header(repository, model_of(repository, candidate))
    reason = difference(target, head)
    return msgspec.structs.replace(candidate, verdict=Compatibility(ok=not reason, reason=reason))


def model_of(repository: Repository, candidate: Candidate) -> RepoModel:
    """Return the file of a candidate on the hub. Raises NotOnHub."""
    from cpuchat.models.hub.choice import choose

    if not candidate.file:
        return choose(repository, candidate.quantization)
    for model in repository.models:
        if model.files[0].path == candidate.file and model.complete:
            return model
    raise NotOnHub(f"{repository.id} no longer has {candidate.file}.", "Choose another one.")


def _checked_on_hub(candidate: Candidate, target: GGUFHeader, hub: Hub) -> tuple[Candidate, Compatibility]:
    """Check with the size from the repository. Raises HubError, ModelDamaged."""
    from cpuchat.models.hub.choice import choose

    repository = hub.repository(candidate.repo)
    model = choose(repository, candidate.quantization)
    verdict = check_pair(target, hub.header(repository, model))
    return msgspec.structs.replace(candidate, size=model.size), verdict


def recommended(found: Iterable[Candidate]) -> Candidate | None:
    """Return the one to use: it fits (or is unchecked, but named by the catalog) and has the largest expected speed-up.

    Where no speed-up is known, the first that the catalog names. None when none is worth it.
    """
    possible = [one for one in found if one.fits or (one.fits is None and one.named and not one.failed)]
    told = [one for one in possible if one.expected.gains]
    if told:
        best = max(told, key=lambda one: one.expected.mean * (_LOCAL_BONUS if one.where == "here" else 1))
        return best if best.expected.pays else None
    return next((one for one in possible if one.named), None)
