"""Which models can draft for a target: those on this machine and those the catalog names, with what each would gain.

`candidates` lists them at once, without looking into any; `check` compares one vocabulary. So a screen can show all
rows first and fill in the verdicts.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from cpuchat.errors import CpuchatError
from cpuchat.models.catalog import Catalog, CatalogModel, match_local
from cpuchat.models.drafts.calibrations import UNKNOWN, TargetCosts
from cpuchat.models.drafts.gain import Expectation, expectation
from cpuchat.models.drafts.pair_cache import PairCache
from cpuchat.models.drafts.pairing import Verdict, check_files, check_pair
from cpuchat.models.gguf.header import GGUFHeader
from cpuchat.models.library.model import LocalModel
from cpuchat.models.machine import NOT_MEASURED, Machine
from cpuchat.models.traffic import traffic_of
from cpuchat.telemetry.traffic import pass_bytes

if TYPE_CHECKING:
    from cpuchat.models.hub.client import Hub

# A draft model is small, so the most faithful file of it costs little more to read than the smallest one.
_DRAFT_QUANTIZATIONS = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_0")
_MOST_READ = 0.5  # of the bytes that the target reads
_AT_HAND = 1.05  # what must be downloaded has to be faster by more than this


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A model that may draft. `where`: on this machine (then `path` is its file) or on the hub (then `repo`).

    `size` in bytes (0: not known). `entry` is the id of the catalog's model that it is, "" when that is none, and
    `named` whether the catalog names it for this target. `verdict` None: not checked yet. `failed` is why it could not
    be checked, "" when it could.
    """

    name: str
    where: Literal["here", "hub"]
    path: Path | None = None
    repo: str = ""
    quantization: str = ""
    size: int = 0
    entry: str = ""
    named: bool = False
    verdict: Verdict | None = None
    failed: str = ""
    expected: Expectation = Expectation()

    @property
    def spec(self) -> str:
        """What `--draft-model` takes, and for one on the hub `models download` first: `owner/name:Q8_0`."""
        if self.path is not None:
            return str(self.path)
        return f"{self.repo}:{self.quantization}" if self.quantization else self.repo

    @property
    def fits(self) -> bool | None:
        """None: not known."""
        return None if self.verdict is None else self.verdict.ok


def most_read(target: GGUFHeader) -> float:
    """How many bytes a draft model may read for a token: half of what the target reads. With more there is no gain even
    where four drafted tokens of five are right and checking a second one costs but a third of a pass."""
    return _MOST_READ * pass_bytes(traffic_of(target), 1, 0)


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
    """All of them, unchecked: those named by the catalog first, then those on this machine, the smaller the earlier.

    Reads no file but, where drafting with a model was measured, what identifies it.

    Args:
        target: header of the whole model (`read_model`).
        here: the models of this machine.
        costs: of the target; for a loaded one with `pass_ms` of its ModelInfo. Without, no gain is told.
        machine: to predict what drafting costs where that was not measured.
        acceptance: measured with the draft model at `beside`, which is loaded.
    """
    entry = match_local(catalog, target)
    wanted = catalog.drafts_of(entry) if entry is not None else []
    found: list[Candidate] = []
    for model in here:
        if model.damaged is None and model.size < target.file_size and model.path != target.path:
            measured = acceptance if beside is not None and model.path == beside else None
            found.append(_local(model, match_local(catalog, model), wanted, costs, machine, measured))
    there = {candidate.entry for candidate in found}
    limit = most_read(target)
    found += [_on_hub(model, limit, costs, machine) for model in wanted if model.id not in there]
    order = {model.id: number for number, model in enumerate(wanted)}

    def place(one: Candidate) -> tuple[int, int, int]:
        return order.get(one.entry, len(order)), _rank(one.quantization) if one.named else 0, one.size

    return sorted(found, key=place)


def expected_of(
    draft: Path,
    per_token: int,
    quantization: str,
    costs: TargetCosts,
    machine: Machine | None,
    acceptance: float | None = None,
) -> Expectation:
    """What a draft model on this machine would gain, by its measured cost or else the `per_token` bytes it reads."""
    measured = costs.measured_draft(draft)
    if measured:
        return expectation(costs.pass_ms, measured, "measured here with this draft model", acceptance)
    return expectation(costs.pass_ms, *_predicted(per_token, quantization, machine), acceptance)


def _local(
    model: LocalModel,
    entry: CatalogModel | None,
    wanted: list[CatalogModel],
    costs: TargetCosts,
    machine: Machine | None,
    acceptance: float | None,
) -> Candidate:
    per_token = model.weights_per_token or model.size
    return Candidate(
        name=model.name,
        where="here",
        path=model.path,
        repo=model.repo,
        quantization=model.quantization,
        size=model.size,
        entry=entry.id if entry is not None else "",
        named=entry in wanted,
        expected=expected_of(model.path, per_token, model.quantization, costs, machine, acceptance),
    )


def _on_hub(model: CatalogModel, limit: float, costs: TargetCosts, machine: Machine | None) -> Candidate:
    """Its most faithful file of at most `limit` bytes, else the smallest."""
    sizes = {name: round(1e9 * size) for name, size in model.sizes.items()}
    fitting = (name for name in _DRAFT_QUANTIZATIONS if name in sizes and sizes[name] <= limit)
    quantization = next(fitting, min(sizes, key=lambda name: sizes[name], default=""))
    size = sizes.get(quantization, 0)
    return Candidate(
        name=model.name,
        where="hub",
        repo=model.repos[0],
        quantization=quantization,
        size=size,
        entry=model.id,
        named=True,
        expected=expectation(costs.pass_ms, *_predicted(size, quantization, machine)),
    )


def _predicted(per_token: int, quantization: str, machine: Machine | None) -> tuple[float, str]:
    """Milliseconds in which the machine reads the `per_token` bytes of a draft model (0: not known), and why."""
    if machine is None or machine.peak <= 0:
        return 0.0, machine.peak_source if machine is not None else NOT_MEASURED
    reach, known = machine.utilization_of(quantization, per_token)
    basis = f"≈ by its size and the read bandwidth ({machine.peak_source}) × {100 * reach:.0f} % ({known})"
    return 1e3 * per_token / (machine.peak * reach), basis


def _rank(quantization: str) -> int:
    """The better for a draft model the smaller."""
    known = _DRAFT_QUANTIZATIONS
    return known.index(quantization) if quantization in known else len(known)


def check(
    candidate: Candidate, target: GGUFHeader, *, hub: Hub | None = None, cache: PairCache | None = None
) -> Candidate:
    """The candidate with its verdict. Reads headers, for one on the hub over the network: not for the UI's own thread.

    Args:
        hub: None: one on the hub is left unchecked.
        cache: as of `check_files`.
    """
    try:
        if candidate.path is not None:
            verdict = check_files(target.path, candidate.path, cache=cache)
        elif hub is None:
            return candidate
        else:
            candidate, verdict = _checked_on_hub(candidate, target, hub)
    except CpuchatError as error:
        return msgspec.structs.replace(candidate, failed=error.message)
    return msgspec.structs.replace(candidate, verdict=verdict)


def _checked_on_hub(candidate: Candidate, target: GGUFHeader, hub: Hub) -> tuple[Candidate, Verdict]:
    """With the size as the repository tells it. Raises HubError, ModelDamaged."""
    from cpuchat.models.hub.choice import choose

    repository = hub.repository(candidate.repo)
    model = choose(repository, candidate.quantization)
    verdict = check_pair(target, hub.header(repository, model))
    return msgspec.structs.replace(candidate, size=model.size), verdict


def recommended(found: Iterable[Candidate]) -> Candidate | None:
    """The one to take: fits (or is not checked, but named by the catalog), and is expected to gain most.

    Where no gain can be told, the first that the catalog names. None when nothing is worth it.
    """
    possible = [one for one in found if one.fits or (one.fits is None and one.named and not one.failed)]
    told = [one for one in possible if one.expected.gains]
    if told:
        best = max(told, key=lambda one: one.expected.mean * (_AT_HAND if one.where == "here" else 1))
        return best if best.expected.pays else None
    return next((one for one in possible if one.named), None)
