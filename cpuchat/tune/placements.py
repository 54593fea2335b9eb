"""Predicts the speed of a loaded model in each placement that this machine allows: by the cost model, and at most."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cpuchat.costmodel.passes import draft_cost, pass_cost
from cpuchat.costmodel.profile import CostProfile, on_other_cores
from cpuchat.costmodel.work import ALIKE, ModelWork
from cpuchat.errors import CpuchatError, UsageError
from cpuchat.hardware.placement.candidates import Candidate, candidates
from cpuchat.hardware.placement.ceiling import Ceiling, ceiling, read_rate
from cpuchat.hardware.placement.placement import Placement, PlacementSpec, place
from cpuchat.hardware.topology import Topology
from cpuchat.models.costs import factor_of
from cpuchat.models.dimensions import typical_work
from cpuchat.models.machine import costs_here
from cpuchat.models.work import N_PAST, loaded_work
from cpuchat.protocol import ModelInfo
from cpuchat.telemetry import units
from cpuchat.telemetry.meter import Figures
from cpuchat.telemetry.roofline import fits_cache
from cpuchat.telemetry.traffic import pass_bytes

if TYPE_CHECKING:
    from cpuchat.hardware.bandwidth.memory_modules import Theoretical
    from cpuchat.hardware.bandwidth.survey import Survey

ASSUMED_ACCEPTANCE, ASSUMED_DEPTH = 0.7, 4
"""Values until drafting was measured with this model."""
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

    `factor`: by how much longer than by the profile the target's take; `source` is what the profile rests on.
    """

    profile: CostProfile
    source: str
    cpus: tuple[int, ...]
    target: ModelWork
    draft: ModelWork | None
    factor: float


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
    except CpuchatError:  # its file no longer exists
        return None
    costs, _ = costs_here(cpus, memory, peak.bytes_per_s, root)
    draft = None
    if (beside := model.draft_traffic) is not None:  # its file is not known
        draft = typical_work(max(beside.weights + beside.experts, 1), model.draft_quantization)
    source = costs.source or "usual of such cores: passes not measured"
    return LoadedCosts(costs.profile, source, cpus, target, draft, factor_of(costs.factors, Path(model.path)))


@dataclass(frozen=True, slots=True)
class _Basis:
    """The basis of predictions, and its source."""

    target_bytes: float
    draft_bytes: float
    peak: float
    l3_link: float | None
    one_core: float | None
    n_past: int
    tokens_per_pass: float
    depth: int
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
    taken = False
    for candidate in candidates(topology):
        spec = candidate.spec
        if not taken and now is not None and _same(candidate.placement, now):
            spec, taken = in_use, True  # other words for the same
        most = _ceiling(candidate, topology, basis, model) if basis is not None and not cached else None
        tok_s = 0.0
        if basis is not None and costs is not None and (costs.draft is not None or not candidate.placement.is_split):
            tok_s = _predicted(candidate, topology, basis, costs, in_use)
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
                _about(candidate, most, basis, why_not, model, costs.source if tok_s and costs is not None else ""),
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
    elif model.peak_read:
        peak, source = model.peak_read, "the measured bandwidth of the cores in use"
    elif theoretical is not None:
        peak, source = theoretical.bytes_per_s, "the theoretical peak (press m to measure)"
    else:
        return None, "The read bandwidth is not measured, so no speed is predicted. Press m to measure it."
    n_past = figures.n_past or 0
    drafting = figures.drafting
    depth, tokens = 0, 1.0
    if model.draft_traffic is not None:
        depth, tokens = drafting.depth or ASSUMED_DEPTH, drafting.tokens_per_pass or 0.0
        if not drafting.depth or not tokens:
            depth = ASSUMED_DEPTH
            tokens = (1 - ASSUMED_ACCEPTANCE ** (depth + 1)) / (1 - ASSUMED_ACCEPTANCE)
            source += f", {100 * ASSUMED_ACCEPTANCE:.0f} % acceptance assumed"
    group = survey.l3_group if survey is not None else None
    link = survey.fabric_link if survey is not None else None
    return _Basis(
        pass_bytes(model.traffic, depth + 1, n_past),
        pass_bytes(model.draft_traffic, 1, n_past) if model.draft_traffic is not None else 0.0,
        peak,
        (link or group).bytes_per_s if (link or group) is not None else None,  # type: ignore[union-attr]
        survey.one_core.bytes_per_s if survey is not None else None,
        figures.n_past or N_PAST,
        tokens,
        depth,
        source,
        figures.roofline.limit == "compute",
    ), ""


def _ceiling(candidate: Candidate, topology: Topology, basis: _Basis, model: ModelInfo | None) -> Ceiling | None:
    if candidate.placement.is_split and (model is None or not model.draft):
        return None
    return ceiling(
        candidate,
        topology,
        target_bytes=basis.target_bytes,
        draft_bytes=basis.draft_bytes,
        peak=basis.peak,
        l3_link=basis.l3_link,
        one_core=basis.one_core,
        tokens_per_pass=basis.tokens_per_pass,
        depth=basis.depth,
        overlap=candidate.placement.is_split,
    )


def _predicted(
    candidate: Candidate, topology: Topology, basis: _Basis, costs: LoadedCosts, in_use: PlacementSpec
) -> float:
    """Return tok/s by the cost model, whose cores are exchanged for those of the candidate."""

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

    placement, draft = candidate.placement, costs.draft
    cpus, past = placement.cpus, basis.n_past
    beside = draft.weight_bytes if draft is not None else 0.0
    target = costs.factor * pass_cost(on(cpus), costs.target, basis.depth + 1, past, beside=beside).seconds
    if draft is None:
        return basis.tokens_per_pass / target
    split = placement.is_split
    drafted = draft_cost(on(placement.draft_cpus if split else cpus), draft, past, costs.target.weight_bytes)
    drafting = basis.depth * drafted
    return basis.tokens_per_pass / (max(target, drafting) if split else target + drafting)


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
        draft = f" + {1e3 * most.t_draft_s:.1f} ms draft" if most.t_draft_s else ""
        lines.append(
            f"At most {units.rate(most.tok_s)} tok/s: {1e3 * most.t_target_s:.1f} ms target{draft} per "
            f"pass. Limit: {most.limit}. From {basis.source}."
        )
        if basis.computing and not predicted_by:
            lines.append("Memory bandwidth only; compute is the limit now, so expect less.")
        remarks = most.remarks
    elif candidate.placement.is_split and model is not None and not model.draft:
        lines.append("Needs a draft model; none is loaded.")
    elif why_not:
        lines.append(why_not)
    if predicted_by:
        lines.append(f"Predicted by the cost model: {predicted_by}.")
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
