"""Predicts the speed of a loaded model in each placement that this machine allows: by the cost model, and at most."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from cpuchat.costmodel.passes import draft_cost, pair_costs, pass_cost, tokens_per_pass, verify_costs
from cpuchat.costmodel.profile import CostProfile, on_other_cores
from cpuchat.costmodel.work import ALIKE, ModelWork
from cpuchat.errors import CpuchatError, UsageError
from cpuchat.hardware.placement.candidates import Candidate, candidates
from cpuchat.hardware.placement.ceiling import Ceiling, ceiling, read_rate
from cpuchat.hardware.placement.placement import Placement, PlacementSpec, place
from cpuchat.hardware.topology import Topology
from cpuchat.model_info import ModelInfo, Traffic
from cpuchat.models.costs import factor_of
from cpuchat.models.drafts.calibrations import target_costs
from cpuchat.models.drafts.candidates import LONGEST
from cpuchat.models.drafts.gain import TYPICAL, gain, measured_acceptance
from cpuchat.models.machine import costs_here
from cpuchat.models.work import N_PAST, loaded_draft_work, loaded_work
from cpuchat.telemetry import units
from cpuchat.telemetry.meter import Figures
from cpuchat.telemetry.roofline import fits_cache
from cpuchat.telemetry.traffic import pass_bytes
from cpuchat.timings import LEAST_TOKENS

if TYPE_CHECKING:
    from cpuchat.hardware.bandwidth.memory_modules import Theoretical
    from cpuchat.hardware.bandwidth.survey import Survey

_ASSUMED_ACCEPTANCE = sum(rate for _, rate in TYPICAL) / len(TYPICAL)
_ESTIMATE = "Estimate"
_ASSUMED_DEPTH = 4  # where the cost model does not tell which is best
_WORTH = 1.02


@dataclass(frozen=True, slots=True)
class PlacementOption:
    """One placement to choose. `predicted` in tok/s (0: not known); `speed` is that or the ceiling in a few words, ""
    without; `about` is a few lines.
    """

    name: str
    spec: PlacementSpec
    recommended: bool
    ceiling: Ceiling | None
    predicted: float
    speed: str
    about: str


@dataclass(frozen=True, slots=True)
class PlacementOptions:
    """All placements, and one sentence of advice, "" without."""

    options: tuple[PlacementOption, ...]
    advice: str = ""

    def find(self, spec: PlacementSpec) -> PlacementOption | None:
        """Return the placement with these words."""
        return next((option for option in self.options if option.spec == spec), None)

    @property
    def recommended(self) -> PlacementOption | None:
        """Return the placement to start with; measurements decide which is fastest."""
        return next((option for option in self.options if option.recommended), None)


@dataclass(frozen=True, slots=True)
class LoadedCosts:
    """What passes of the loaded models cost on `cpus`, those in use.

    By how much longer than by the profile they take: `factor`, plain passes of the target; `verify_factors`, its passes
    over 1, 2, ... tokens beside the draft model; `draft_factor`, those of the draft model. `source` is what the profile
    rests on; `peak` is the read bandwidth of `cpus` in bytes per second (0: not known).
    """

    profile: CostProfile
    source: str
    cpus: tuple[int, ...]
    target: ModelWork
    factor: float = 1.0
    draft: ModelWork | None = None
    draft_factor: float = 1.0
    peak: float = 0.0
    verify_factors: tuple[float, ...] = (1.0,) * LONGEST


def loaded_costs(model: ModelInfo, memory: str = "", root: Path = Path("/")) -> LoadedCosts | None:
    """Return what passes of a loaded model cost where it runs; None where their bandwidth is not known. Reads headers
    and may fit a profile: call it in a thread.

    Args:
        memory: the worker's memory policy, in the words of `mempolicy`.
        root: replaces `/` in tests.
    """
    from cpuchat.hardware.bandwidth.peaks import known_peak

    cpus = model.compute_cpus
    peak = known_peak(cpus, memory, root=root, disturbed=False) if cpus else None
    if peak is None:
        return None
    try:
        target = loaded_work(model, alike=ALIKE)
        draft = loaded_draft_work(model)
    except CpuchatError:  # a file no longer exists
        return None
    costs, is_measured = costs_here(cpus, memory, peak.bytes_per_s, root)
    source = costs.source if is_measured else _ESTIMATE
    path = Path(model.path)
    factor = factor_of(costs.factors, path)
    found = LoadedCosts(costs.profile, source, cpus, target, factor, peak=peak.bytes_per_s)
    return _with_draft(found, draft, model, costs.factors) if draft is not None else found


def _with_draft(costs: LoadedCosts, draft: ModelWork, model: ModelInfo, factors: Mapping[str, float]) -> LoadedCosts:
    """Add the draft model: with what was measured of this pair, as the list of draft models does."""
    both = pair_costs(costs.profile, costs.target, draft, N_PAST, LONGEST)
    path = Path(model.draft_path)
    draft_ms = target_costs(Path(model.path)).measured_draft(path)
    measured = tuple(1e-3 * ms / seconds for ms, seconds in zip(model.pass_ms, both.verify, strict=False))
    return replace(
        costs,
        draft=draft,
        draft_factor=1e-3 * draft_ms / both.draft if draft_ms else factor_of(factors, path),
        verify_factors=measured or (costs.factor,) * LONGEST,
    )


@dataclass(frozen=True, slots=True)
class _Basis:
    """The basis of predictions, and its source. `acceptance` of drafted tokens is None where nothing is drafted."""

    target: Traffic
    draft: Traffic | None
    peak: float
    l3_link: float | None
    one_core: float | None
    n_past: int
    acceptance: float | None
    source: str
    computing: bool


def compare_placements(
    topology: Topology,
    survey: Survey | None,
    theoretical: Theoretical | None,
    model: ModelInfo | None,
    figures: Figures,
    in_use: PlacementSpec,
    costs: LoadedCosts | None = None,
) -> PlacementOptions:
    """Return every placement that this machine allows, with the speed of `model` in it.

    Args:
        costs: as of `loaded_costs`; None: only ceilings by bandwidth are known.
    """
    now = _placed(topology, in_use)
    basis, why_not = _basis(survey, theoretical, model, figures, costs)
    cached = model is not None and fits_cache(model)  # memory bandwidth is no ceiling
    options: list[PlacementOption] = []
    taken, told = False, ""
    found = list(candidates(topology))
    scale = 1.0
    used = next((one for one in found if now is not None and _same(one.placement, now)), None)
    if used is not None and basis is not None and costs is not None:
        scale = _scale(_predicted(used, topology, basis, costs, in_use)[0], figures)
    for candidate in found:
        spec = candidate.spec
        if not taken and now is not None and _same(candidate.placement, now):
            spec, taken = in_use, True  # other words for the same
        tok_s, depth, most = 0.0, _ASSUMED_DEPTH, None
        if basis is not None and costs is not None and (costs.draft is not None or not candidate.placement.is_split):
            tok_s, depth = _predicted(candidate, topology, basis, costs, in_use)
            tok_s, told = scale * tok_s, _told(costs, basis, depth, scale)
        if basis is not None and not cached:
            most = _ceiling(candidate, topology, basis, depth)
            if most is not None and candidate.placement.is_split:  # both models read the same memory
                tok_s = min(tok_s, most.tok_s)
        options.append(
            PlacementOption(
                candidate.name,
                spec,
                not options,
                most,
                tok_s,
                _speed(candidate, most, tok_s, model),
                _about(candidate, most, basis, why_not, model, told if tok_s else ""),
            )
        )
    return PlacementOptions(tuple(options), _advice(options, in_use))


def _placed(topology: Topology, spec: PlacementSpec) -> Placement | None:
    """Resolve `spec` with a draft model loaded; None if it is not possible here."""
    try:
        return place(topology, spec, with_draft=spec.names_draft_cores)
    except UsageError:
        return None


def _same(one: Placement, other: Placement) -> bool:
    return (one.cpus, one.draft_cpus, one.memory) == (other.cpus, other.draft_cpus, other.memory)


def _basis(
    survey: Survey | None,
    theoretical: Theoretical | None,
    model: ModelInfo | None,
    figures: Figures,
    costs: LoadedCosts | None,
) -> tuple[_Basis | None, str]:
    """Return the basis of predictions, or why there is none."""
    if model is None:
        return None, "No model is loaded, so no speed is predicted."
    if model.traffic is None:
        return None, "The bytes per pass of this model are not known, so no speed is predicted."
    if fits_cache(model) and costs is None:
        return None, "The weights fit in the L3 cache, so memory bandwidth is not the limit and no speed is predicted."
    if survey is not None:
        peak, source = survey.all_cores.bytes_per_s, "the measured bandwidth"
    elif measured := model.peak_read or (costs.peak if costs is not None else 0.0):
        peak, source = measured, "the measured bandwidth of the cores in use"
    elif theoretical is not None:
        peak, source = theoretical.bytes_per_s, "the theoretical peak (press m to measure)"
    else:
        return None, "The read bandwidth is not measured, so no speed is predicted. Press m to measure it."
    acceptance = None
    if model.draft_traffic is not None and figures.drafting.wanted and not figures.drafting.reason:
        acceptance = measured_acceptance(figures.drafting)
        if acceptance is None:
            acceptance = _ASSUMED_ACCEPTANCE
            source += f", {100 * acceptance:.0f} % acceptance assumed"
    group = survey.l3_group if survey is not None else None
    link = survey.fabric_link if survey is not None else None
    return _Basis(
        model.traffic,
        model.draft_traffic,
        peak,
        (link or group).bytes_per_s if (link or group) is not None else None,  # type: ignore[union-attr]
        survey.one_core.bytes_per_s if survey is not None else None,
        figures.n_past or N_PAST,
        acceptance,
        source,
        figures.roofline.limit == "compute",
    ), ""


def _ceiling(candidate: Candidate, topology: Topology, basis: _Basis, depth: int) -> Ceiling | None:
    if candidate.placement.is_split and basis.draft is None:
        return None
    depth = depth if basis.acceptance is not None else 0
    return ceiling(
        candidate,
        topology,
        target_bytes=pass_bytes(basis.target, depth + 1, basis.n_past),
        draft_bytes=pass_bytes(basis.draft, 1, basis.n_past) if basis.draft is not None else 0.0,
        peak=basis.peak,
        l3_link=basis.l3_link,
        one_core=basis.one_core,
        tokens_per_pass=tokens_per_pass(basis.acceptance or 0.0, depth),
        depth=depth,
        overlap=candidate.placement.is_split,
    )


def _predicted(
    candidate: Candidate, topology: Topology, basis: _Basis, costs: LoadedCosts, in_use: PlacementSpec
) -> tuple[float, int]:
    """Return tok/s and the draft depth by the cost model, whose cores are exchanged for those of the candidate: the
    rate of plain decoding as the models list predicts it, times the gain as the list of draft models does."""

    def rate(cpus: Collection[int], memory: str) -> float:
        found, _ = read_rate(
            topology, cpus, peak=basis.peak, l3_link=basis.l3_link, one_core=basis.one_core, memory=memory
        )
        return found

    def on(cpus: Collection[int]) -> CostProfile:
        return on_other_cores(
            costs.profile,
            read=rate(cpus, candidate.spec.memory) / rate(costs.cpus, in_use.memory),
            compute=topology.n_cores(cpus) / topology.n_cores(costs.cpus),
        )

    placement, draft, past = candidate.placement, costs.draft, basis.n_past
    profile = on(placement.cpus)
    plain = 1 / (costs.factor * pass_cost(profile, costs.target, 1, past).seconds)
    if draft is None or basis.acceptance is None:
        return plain, 0
    verify = verify_costs(profile, costs.target, len(costs.verify_factors), past, draft.weight_bytes)
    drafting = on(placement.draft_cpus) if placement.is_split else profile
    best = gain(
        [1e3 * own * seconds for own, seconds in zip(costs.verify_factors, verify, strict=True)],
        1e3 * costs.draft_factor * draft_cost(drafting, draft, past, costs.target.weight_bytes),
        basis.acceptance,
        overlap=placement.is_split,
    )
    return plain * best.speedup, best.depth


def _scale(predicted: float, figures: Figures) -> float:
    """Return the measured speed of the last answer by that predicted for the placement in use; 1 where it was not
    slower, no answer was long enough, or other programs had the cores. Of very small models much of a token's time is
    spent outside of passes.
    """
    measured = figures.decode_tok_s or 0.0
    counts = figures.predicted_n >= LEAST_TOKENS and not figures.drafting.disturbed
    return measured / predicted if counts and 0 < measured < predicted else 1.0


def _told(costs: LoadedCosts, basis: _Basis, depth: int, scale: float) -> str:
    """Return what a prediction rests on; `depth` is the best one by it."""
    scaled = "; scaled to the last answer" if scale < 1 else ""
    if costs.draft is None:
        return f"{costs.source}{scaled}"
    if basis.acceptance is None:
        return f"{costs.source}; drafting is off{scaled}"
    how = f"draft depth {depth}" if depth else "drafting gains nothing"
    return f"{costs.source}; {how} at {100 * basis.acceptance:.0f} % acceptance{scaled}"


def _speed(candidate: Candidate, most: Ceiling | None, tok_s: float, model: ModelInfo | None) -> str:
    if tok_s:
        return f"≈ {units.rate(tok_s)} tok/s"
    if most is not None:
        return f"≤ {units.rate(most.tok_s)} tok/s"
    return "needs draft" if candidate.placement.is_split and model is not None and not model.draft else ""


def _about(
    candidate: Candidate,
    most: Ceiling | None,
    basis: _Basis | None,
    why_not: str,
    model: ModelInfo | None,
    predicted_by: str,
) -> str:
    lines: list[str] = []
    remarks: tuple[str, ...] = ()
    if most is not None and basis is not None:
        draft = f", its drafts {units.rate(1e3 * most.t_draft_s)} ms" if most.t_draft_s else ""
        lines.append(
            f"At most {units.rate(most.tok_s)} tok/s: one pass of the target takes "
            f"{units.rate(1e3 * most.t_target_s)} ms{draft}. Limit: {most.limit}. From {basis.source}."
        )
        if basis.computing and not predicted_by:
            lines.append("Memory bandwidth only; compute is the limit now, so expect less.")
        remarks = most.remarks
    elif candidate.placement.is_split and model is not None and not model.draft:
        lines.append("Needs a draft model; none is loaded.")
    elif why_not:
        lines.append(why_not)
    if predicted_by:
        basis_of = f"Predicted by the cost model: {predicted_by}."
        lines.append(f"{_ESTIMATE}. Press m to measure." if predicted_by.startswith(_ESTIMATE) else basis_of)
    return "\n".join([*lines, candidate.reason, *remarks])


def _advice(options: list[PlacementOption], in_use: PlacementSpec) -> str:
    now = next((option for option in options if option.spec == in_use), None)
    wanted = next((option for option in options if option.recommended), None)
    if wanted is None or wanted is now:
        return ""
    factor, words = _WORTH, f"“{wanted.name}” is recommended"
    if now is not None and now.predicted and wanted.predicted:
        factor = wanted.predicted / now.predicted
        words = f"“{wanted.name}” is predicted {units.factor(factor)} as fast as now"
    elif now is not None and now.ceiling and wanted.ceiling:
        factor = wanted.ceiling.tok_s / now.ceiling.tok_s
        words = f"The ceiling of “{wanted.name}” is {units.factor(factor)} that of now"
    return f"{words} · t selects it, Enter tries it" if factor >= _WORTH else ""
