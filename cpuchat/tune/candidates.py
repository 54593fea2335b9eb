"""The candidates of each choice of tuning, settings that may be faster than those in use; and the predicted speed of a
loaded model in each placement that this machine allows, by the cost model.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from cpuchat.base.errors import UsageError
from cpuchat.config.settings import Settings, value_of, with_changes
from cpuchat.costs.calibrations import MAX_TOKENS
from cpuchat.costs.model import (
    CostProfile,
    bytes_read,
    on_other_cores,
    pair_costs,
    pass_cost,
    tokens_per_pass,
)
from cpuchat.hardware.lists import format_cpu_list
from cpuchat.hardware.placement import placement as placements
from cpuchat.hardware.placement.placement import (
    Placement,
    PlacementCandidate,
    PlacementSpec,
    ReadRates,
    candidates,
    place,
)
from cpuchat.hardware.topology import Topology
from cpuchat.models.costs import factor_of
from cpuchat.models.drafts.candidates import TYPICAL, gain, measured_acceptance, measured_draft_ms, target_costs
from cpuchat.models.machine import GROUPS, MEASURED, costs_here, differences, set_keys
from cpuchat.models.traffic import N_PAST
from cpuchat.protocol.model_info import EngineInfo, ModelInfo, ModelWork
from cpuchat.protocol.options import UNQUANTIZED
from cpuchat.protocol.timings import MIN_TOKENS
from cpuchat.telemetry import units
from cpuchat.telemetry.meter import ChatFigures
from cpuchat.telemetry.units import plural

if TYPE_CHECKING:
    from cpuchat.telemetry.machine import Peaks


UBATCHES: Final = (128, 256, 512, 1024)
UBATCH_SECONDS: Final = 8.0
DEEP_SECONDS: Final = 3.5
"""Of prefill: attention only weighs with many tokens in the KV cache."""


@dataclass(frozen=True, slots=True, eq=False)
class TuningCandidate:
    """Settings to measure; `words` tell them from the other candidates of a choice."""

    words: str
    settings: Settings


@dataclass(frozen=True, slots=True)
class TuningChoice:
    """One thing to choose.

    `keys`: the settings that it is about. `prompt_seconds`: how long a prompt to measure with, in seconds of prefill.
    `test`: "prefill" where decoding cannot differ, "texts" where what is written matters. `needs_consent`: it changes
    what the model writes, so that it is only offered. `skipped`: why there is nothing to try, "" if there is.
    """

    name: str
    keys: tuple[str, ...]
    now: TuningCandidate
    candidates: tuple[TuningCandidate, ...] = ()
    prompt_seconds: float = 1.5
    test: Literal["both", "prefill", "texts"] = "both"
    needs_consent: bool = False
    skipped: str = ""


def thread_choice(topology: Topology, chosen: Settings) -> TuningChoice:
    """Threads and cores: fewer, one for each core, one for each SMT sibling, the cores of each L3 group."""
    now, used = _place(topology, chosen), PlacementSpec.of(chosen)
    found: dict[tuple[int, ...], TuningCandidate] = {}
    n_cores = len(_cpus(topology, PlacementSpec(memory_policy=used.memory_policy)))
    counts = (0, n_cores - 1, math.ceil(0.75 * n_cores), math.ceil(0.5 * n_cores))
    specs = [("auto", n if n != n_cores else 0) for n in dict.fromkeys(counts) if 0 <= n <= n_cores]
    specs += [("all", 0), *_wide(topology)]
    specs += [(one.spec.cores, 0) for one in placements.candidates(topology) if one.spec.cores.endswith("/l3")]
    for cores, threads in specs:
        spec = dataclasses.replace(used, cores=cores, threads=threads)
        cpus = _cpus(topology, spec)
        if cpus and cpus != now.cpus and cpus not in found:
            words = thread_words(topology, cpus)
            if cores.endswith("/l3"):
                words += f", {cores.partition('/')[0]} per L3 group"
            found[cpus] = _candidate(words, chosen, engine={"cores": cores, "threads": threads})
    here = TuningCandidate(thread_words(topology, now.cpus), chosen)
    return TuningChoice("threads", ("engine.threads", "engine.cores"), here, tuple(found.values()))


def memory_choice(topology: Topology, chosen: Settings) -> TuningChoice:
    """The NUMA policy, and the cores of one node with its memory."""
    now, keys = _place(topology, chosen), ("engine.memory_policy",)
    here = TuningCandidate(now.memory_policy.words, chosen)
    if len([node for node in topology.nodes if node.memory]) < 2:
        return TuningChoice("memory policy", keys, here, skipped="one NUMA node")
    found: dict[tuple[object, ...], TuningCandidate] = {}
    policies = ["auto", "local", "interleave"]
    specs = [dataclasses.replace(PlacementSpec.of(chosen), memory_policy=policy) for policy in policies]
    one_node = [one.spec for one in placements.candidates(topology) if one.name == placements.ONE_NODE]
    for spec in [*specs, *one_node]:
        try:
            placement = place(topology, spec)
        except UsageError:
            continue
        key = (placement.cpus, placement.memory_policy)
        if key != (now.cpus, now.memory_policy) and key not in found:
            words = f"{placement.memory_policy.words}, {thread_words(topology, placement.cpus)}"
            words = placement.memory_policy.words if placement.cpus == now.cpus else words
            found[key] = _candidate(words, chosen, engine={"cores": spec.cores, "memory_policy": spec.memory_policy,
                                                      "threads": spec.threads})  # fmt: skip
    return TuningChoice("memory policy", keys, here, tuple(found.values()))


def attention_choice(chosen: Settings) -> TuningChoice:
    """Flash attention on or off; `auto` turns it on."""
    engine, keys = chosen.engine, ("engine.flash_attn",)
    here = TuningCandidate(engine.flash_attn, chosen)
    if engine.type_v not in UNQUANTIZED:
        return TuningChoice("flash attention", keys, here, skipped=f"a V cache of type {engine.type_v} needs it")
    other = "auto" if engine.flash_attn == "off" else "off"
    return TuningChoice("flash attention", keys, here, (_candidate(other, chosen, engine={"flash_attn": other}),),
                  DEEP_SECONDS)  # fmt: skip


def module_choice(chosen: Settings, engine: EngineInfo) -> TuningChoice:
    """The CPU modules of the engine that are worth timing here, beside the one in use."""
    found = [_candidate(name, chosen, engine={"cpu_module": name}) for name in engine.modules if name != engine.module]
    return TuningChoice("CPU module", ("engine.cpu_module",), TuningCandidate(engine.module, chosen), tuple(found))


def ubatch_choice(chosen: Settings, max_tokens: int) -> TuningChoice:
    """The micro-batch, at most what a prompt of `max_tokens` fills."""
    now = min(chosen.engine.n_ubatch, chosen.engine.n_batch)
    sizes = [n for n in UBATCHES if n != now and n <= max_tokens]
    found = tuple(
        _candidate(str(n), chosen, engine={"ubatch": n, "batch": max(n, Settings().engine.n_batch)}) for n in sizes
    )
    keys, here = ("engine.ubatch", "engine.batch"), TuningCandidate(str(now), chosen)
    if not found:
        return TuningChoice("micro-batch", keys, here, skipped="prefill is too slow to measure long prompts")
    return TuningChoice("micro-batch", keys, here, found, UBATCH_SECONDS, test="prefill")


def kv_choice(chosen: Settings) -> TuningChoice:
    """A KV cache of 8 bits; quantized types change what the model writes."""
    engine, keys = chosen.engine, ("engine.cache_type_k", "engine.cache_type_v")
    here = TuningCandidate(kv_words(chosen), chosen)
    if engine.flash_attn == "off":
        return TuningChoice("KV cache", keys, here, skipped="a quantized V cache needs flash attention, which is off")
    if not {engine.type_k, engine.type_v} <= {*UNQUANTIZED}:
        other = _candidate("f16", chosen, engine={"cache_type_k": "f16", "cache_type_v": "f16"})
        return TuningChoice("KV cache", keys, here, (other,), DEEP_SECONDS)
    other = _candidate("q8_0", chosen, engine={"cache_type_k": "q8_0", "cache_type_v": "q8_0"})
    return TuningChoice("KV cache", keys, here, (other,), DEEP_SECONDS, needs_consent=True)


def drafter_choice(chosen: Settings, draft: str) -> TuningChoice:
    """All drafters, those that need no draft model, none; with adaptive depth. `draft` names the draft model, "" for
    none."""
    keys, here = ("speculation.drafters", "speculation.depth"), TuningCandidate(drafter_words(chosen), chosen)
    # Without a draft model all drafters are those that need none.
    names = ["auto", "free", "off"] if draft else ["auto", "off"]
    now = "auto" if chosen.speculation.drafters == "free" and not draft else chosen.speculation.drafters
    if now in names and (now == "off" or not chosen.speculation.depth):
        names.remove(now)
    others = (with_changes(chosen, {"speculation": {"drafters": name, "depth": 0}}) for name in names)
    found = tuple(TuningCandidate(drafter_words(other), other) for other in others)
    return TuningChoice("drafters", keys, here, found, test="texts")


def without_what_is_set(choice: TuningChoice, wanted: Settings) -> TuningChoice:
    """Return the choice without candidates where the user's settings decide it: of these, only `MEASURED` ones are
    replaced."""
    keys = [key for group in GROUPS if {*group} & {*choice.keys} for key in set_keys(wanted, group)]
    keys = [key for key in keys if key not in MEASURED]
    if choice.skipped or not keys:
        return choice
    what = ", ".join(f"{key.partition('.')[2]} = {value_of(wanted, key)}" for key in keys)
    return dataclasses.replace(choice, candidates=(), skipped=f"set by you: {what}")


def thread_words(topology: Topology, cpus: Iterable[int]) -> str:
    """`8 threads, one per core`, `16 threads, two per core`."""
    used = tuple(cpus)
    cores = {core.index if (core := topology.core_of(cpu)) is not None else -1 - cpu for cpu in used}
    words = plural(len(used), "thread")
    if not topology.smt or len(used) < 2:
        return words
    return f"{words}, {'one' if len(cores) == len(used) else 'two'} per core"


def kv_words(chosen: Settings) -> str:
    k, v = chosen.engine.type_k, chosen.engine.type_v
    return k if k == v else f"{k}/{v}"


def drafter_words(chosen: Settings) -> str:
    """`auto`, `auto, depth 4`, `off`."""
    depth, drafters = chosen.speculation.depth, chosen.speculation.drafters
    return f"{drafters}, depth {depth}" if depth and drafters != "off" else drafters


def changed_keys(before: Settings, after: Settings) -> tuple[str, ...]:
    """Return the settings that differ, such as "engine.threads"."""
    return tuple(f"{section}.{name}" for section, values in differences(before, after).items() for name in values)


def _wide(topology: Topology) -> list[tuple[str, int]]:
    """Return all logical CPUs, where some share a core."""
    allowed = set(topology.allowed)
    shared = any(len(allowed.intersection(core.cpus)) > 1 for core in topology.allowed_cores)
    return [(format_cpu_list(topology.allowed), 0)] if shared else []


def _place(topology: Topology, chosen: Settings) -> Placement:
    return place(topology, PlacementSpec.of(chosen))


def _cpus(topology: Topology, spec: PlacementSpec) -> tuple[int, ...]:
    """Return the CPUs of a placement; () if it is not possible here."""
    try:
        return place(topology, spec).cpus
    except UsageError:
        return ()


def _candidate(words: str, chosen: Settings, **changes: dict[str, Any]) -> TuningCandidate:
    return TuningCandidate(words, with_changes(chosen, changes))


_ASSUMED_ACCEPTANCE = sum(rate for _, rate in TYPICAL) / len(TYPICAL)
_PREDICTED = "Predicted by the cost model:"
_WORTH = 1.02


@dataclass(frozen=True, slots=True)
class PlacementOption:
    """One placement to choose. `predicted` in tok/s (0: not known); `speed` is that in a few words, "" without; `about`
    is a few lines.
    """

    name: str
    spec: PlacementSpec
    recommended: bool
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
    rests on; `peak` is the read bandwidth of `cpus` in bytes per second. `is_measured`: else an estimate.
    """

    profile: CostProfile
    source: str
    cpus: tuple[int, ...]
    target: ModelWork
    peak: float
    factor: float = 1.0
    draft: ModelWork | None = None
    draft_factor: float = 1.0
    verify_factors: tuple[float, ...] = (1.0,) * MAX_TOKENS
    is_measured: bool = True


def loaded_costs(model: ModelInfo, memory: str = "", root: Path = Path("/")) -> LoadedCosts | None:
    """Return what passes of a loaded model cost where it runs; None where their bandwidth is not known. May fit a
    profile: call it in a thread. `memory`: the worker's memory policy, in the words of `mempolicy`. `root`: replaces
    `/` in tests.
    """
    from cpuchat.measure.peak import known

    cpus = model.compute_cpus
    peak = known(cpus, memory, root=root)
    if peak is None or model.work is None:
        return None
    costs, is_measured = costs_here(cpus, memory, peak.bytes_per_s, root)
    path = Path(model.path)
    factor = factor_of(costs.factors, path)
    found = LoadedCosts(
        costs.profile, costs.source, cpus, model.work, peak.bytes_per_s, factor, is_measured=is_measured
    )
    return _with_draft(found, model.draft_work, model, costs.factors) if model.draft_work is not None else found


def _with_draft(costs: LoadedCosts, draft: ModelWork, model: ModelInfo, factors: Mapping[str, float]) -> LoadedCosts:
    """Add the draft model: with what was measured of this pair, as the list of draft models does."""
    both = pair_costs(costs.profile, costs.target, draft, N_PAST, MAX_TOKENS)
    path = Path(model.draft_path)
    draft_ms = measured_draft_ms(target_costs(Path(model.path)), path)
    measured = tuple(1e-3 * ms / seconds for ms, seconds in zip(model.pass_ms, both.verify, strict=False))
    return replace(
        costs,
        draft=draft,
        draft_factor=1e-3 * draft_ms / both.draft if draft_ms else factor_of(factors, path),
        verify_factors=measured or (costs.factor,) * MAX_TOKENS,
    )


def compare_placements(
    topology: Topology,
    peaks: Peaks,
    model: ModelInfo | None,
    figures: ChatFigures,
    in_use: PlacementSpec,
    costs: LoadedCosts | None = None,
) -> PlacementOptions:
    """Return every placement that this machine allows, with the speed of `model` in it. `costs`: as of
    `loaded_costs`; None: no speed is predicted.
    """
    now, found = _placed(topology, in_use), candidates(topology)
    used = next((one for one in found if now is not None and _same(one.placement, now)), None)
    acceptance = _acceptance(costs, figures)
    predicted: dict[str, tuple[float, int]] = {}
    if costs is not None:
        rates = _read_rates(peaks, costs)
        possible = [one for one in found if costs.draft is not None or not one.placement.is_split]
        predicted = {one.name: _predicted(one, topology, rates, costs, in_use, figures, acceptance) for one in possible}
    scale = _scale(predicted[used.name][0], figures) if used is not None and used.name in predicted else 1.0
    options: list[PlacementOption] = []
    for one in found:
        tok_s, depth = predicted.get(one.name, (0.0, 0))
        if tok_s and costs is not None:
            speed = f"≈ {units.rate(scale * tok_s)} tok/s"
            why = _told(costs, acceptance, depth, scale)
        else:
            needs_draft = one.placement.is_split and model is not None and not model.draft
            speed, why = "needs draft" if needs_draft else "", _why_not(model, needs_draft)
        spec = in_use if one is used else one.spec  # other words for the same
        about = "\n".join((why, one.reason))
        options.append(PlacementOption(one.name, spec, not options, scale * tok_s, speed, about))
    return PlacementOptions(tuple(options), _advice(options, in_use))


def _why_not(model: ModelInfo | None, needs_draft: bool) -> str:
    if model is None:
        return "No model is loaded, so no speed is predicted."
    if needs_draft:
        return "Needs a draft model; none is loaded."
    if model.work is None:
        return "The bytes per pass of this model are not known, so no speed is predicted."
    return "This machine is not measured, so no speed is predicted. `cpuchat probe` measures it."


def _placed(topology: Topology, spec: PlacementSpec) -> Placement | None:
    """Resolve `spec` with a draft model loaded; None if it is not possible here."""
    try:
        return place(topology, spec, with_draft=spec.names_draft_cores)
    except UsageError:
        return None


def _same(one: Placement, other: Placement) -> bool:
    return (one.cpus, one.draft_cpus, one.memory_policy) == (other.cpus, other.draft_cpus, other.memory_policy)


def _read_rates(peaks: Peaks, costs: LoadedCosts) -> ReadRates:
    one_link, one_core = (one.bytes_per_s if one is not None else None for one in (peaks.l3_group, peaks.one_core))
    every = peaks.all_cores.bytes_per_s if peaks.all_cores is not None else costs.peak
    return ReadRates(every, one_link, one_core)


def _acceptance(costs: LoadedCosts | None, figures: ChatFigures) -> float | None:
    """Return the share of drafted tokens that is accepted, assumed if nothing was drafted yet; None without drafts."""
    if costs is None or costs.draft is None or not figures.drafting.wanted or figures.drafting.off is not None:
        return None
    measured = measured_acceptance(figures.drafting.counts)
    return _ASSUMED_ACCEPTANCE if measured is None else measured


def _predicted(
    candidate: PlacementCandidate,
    topology: Topology,
    rates: ReadRates,
    costs: LoadedCosts,
    in_use: PlacementSpec,
    figures: ChatFigures,
    acceptance: float | None,
) -> tuple[float, int]:
    """Return tok/s and the draft depth by the cost model, whose cores are exchanged for those of the candidate: the
    rate of plain decoding as the models list predicts it, times the gain as the list of draft models does."""
    placement, memory, draft, past = (
        candidate.placement,
        candidate.spec.memory_policy,
        costs.draft,
        figures.n_past.value,
    )
    past = past or N_PAST

    def on(cpus: Collection[int]) -> CostProfile:
        return on_other_cores(
            costs.profile,
            read=rates.of(topology, cpus, memory) / rates.of(topology, costs.cpus, in_use.memory_policy),
            compute=topology.n_cores(cpus) / topology.n_cores(costs.cpus),
        )

    profile = on(placement.cpus)
    plain = 1 / (costs.factor * pass_cost(profile, costs.target, 1, past).seconds)
    if draft is None or acceptance is None:
        return plain, 0
    drafting = on(placement.draft_cpus) if placement.is_split else profile
    both = pair_costs(profile, costs.target, draft, past, len(costs.verify_factors), drafting)
    best = gain(
        [1e3 * own * seconds for own, seconds in zip(costs.verify_factors, both.verify, strict=True)],
        1e3 * costs.draft_factor * both.draft,
        acceptance,
        overlap=placement.is_split,
    )
    tok_s, depth = plain * best.speedup, best.depth
    if placement.is_split:  # both models read the same memory
        nbytes = bytes_read(costs.target, depth + 1, past) + depth * bytes_read(draft, 1, past)
        tok_s = min(tok_s, tokens_per_pass(acceptance, depth) * rates.peak / nbytes)
    return tok_s, depth


def _scale(predicted: float, figures: ChatFigures) -> float:
    """Return the measured speed of the last answer by that predicted for the placement in use; 1 where it was not
    slower, no answer was long enough, or other programs were using the cores. Of very small models much of a
    token's time is spent outside of passes.
    """
    long_enough = figures.predicted_n >= MIN_TOKENS and not figures.drafting.counts.disturbed
    measured = figures.decode_tok_s.value or 0.0 if long_enough else 0.0
    return measured / predicted if 0 < measured < predicted else 1.0


def _told(costs: LoadedCosts, acceptance: float | None, depth: int, scale: float) -> str:
    """Say what a prediction rests on; `depth` is the best one by it."""
    if not costs.is_measured:
        return "Estimate."
    scaled = "; scaled to the last answer" if scale < 1 else ""
    if costs.draft is None:
        return f"{_PREDICTED} {costs.source}{scaled}."
    if acceptance is None:
        return f"{_PREDICTED} {costs.source}; drafting is off{scaled}."
    how = f"draft depth {depth}" if depth else "drafting gains nothing"
    assumed = "assumed acceptance" if acceptance == _ASSUMED_ACCEPTANCE else "acceptance"
    return f"{_PREDICTED} {costs.source}; {how} at {100 * acceptance:.0f} % {assumed}{scaled}."


def _advice(options: list[PlacementOption], in_use: PlacementSpec) -> str:
    now = next((option for option in options if option.spec == in_use), None)
    wanted = next((option for option in options if option.recommended), None)
    if wanted is None or wanted is now:
        return ""
    factor, words = _WORTH, f"“{wanted.name}” is recommended"
    if now is not None and now.predicted and wanted.predicted:
        factor = wanted.predicted / now.predicted
        words = f"“{wanted.name}” is predicted {units.factor(factor)} as fast as now"
    return f"{words} · t selects it, Enter tries it" if factor >= _WORTH else ""
