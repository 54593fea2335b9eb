"""The machine in words: rows of the hardware screen, and the page of `cpuchat doctor`."""

from __future__ import annotations

import dataclasses
import textwrap
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

from cpuchat.base.errors import CpuchatError
from cpuchat.base.text import clean_line
from cpuchat.measure.difference import compare
from cpuchat.models.ollama import ollama_name
from cpuchat.present.answers import kept_states
from cpuchat.present.models import measured_speed, speed_rows
from cpuchat.protocol.model_info import BufferWeights, EngineInfo, ModelInfo
from cpuchat.telemetry import units
from cpuchat.telemetry.machine import MachineSample
from cpuchat.telemetry.roofline import NO_LIMIT, OFF
from cpuchat.telemetry.units import ago, bandwidth, gigabytes, plural, size

if TYPE_CHECKING:
    from cpuchat.config.settings import Settings
    from cpuchat.hardware.bandwidth.theoretical import Theoretical
    from cpuchat.hardware.diagnostics import DiagnosticFacts, Finding
    from cpuchat.hardware.numa.residency import Residency
    from cpuchat.hardware.topology import Topology
    from cpuchat.measure.peak import ReadBandwidth
    from cpuchat.models.kernels import MeasuredProducts
    from cpuchat.models.library.library import Library
    from cpuchat.models.prediction import Prediction
    from cpuchat.telemetry.machine import Peak
    from cpuchat.telemetry.meter import ChatFigures


Row = tuple[str, str]
"""(label, text)"""


class CpuUse(NamedTuple):
    """For which share of the last second a logical CPU was busy, and with threads of this program (0-1); its clock in
    kHz (0: unknown)."""

    busy: float = 0.0
    own: float = 0.0
    khz: int = 0


@dataclass(frozen=True)
class Now:
    """The state that changes while the hardware screen is open. None and "" are "unknown", or being read.

    `placed`: the worker's memory was looked up, so that `placement` None means "not reported". `counting`: counters
    are on in the settings. `passes` as of `passes_measured`. Other programs keep the CPUs `busy`, this one those that
    are `working`. `answered`: the running or last answer; `traffic` in bytes per second, and what counts it; `here` is
    the loaded model, else the last one, once that `is_read`; `loading`: how far a load is, "" without one; `measuring`
    the bandwidth."""

    model: ModelInfo | None = None
    loading: str = ""
    engine: EngineInfo | None = None
    placement: Residency | None = None
    placed: bool = False
    sample: MachineSample | None = None
    counting: bool = True
    passes: str = ""
    kernels: Chart | None = None
    cores: Mapping[int, CpuUse] = field(default_factory=dict[int, "CpuUse"])
    busy: frozenset[int] = frozenset()
    working: frozenset[int] = frozenset()
    answered: ChatFigures | None = None
    traffic: tuple[float, str] | None = None
    here: ModelHere | None = None
    is_read: bool = False
    measuring: bool = False

    @property
    def awaited(self) -> bool:
        """Return whether the figures of the loaded model are being read: their rows keep the place."""
        return self.model is not None and self.here is None and not self.is_read


def title(facts: DiagnosticFacts) -> str:
    """`2 × EPYC 7543 · Zen 3 · 64 cores · NPS1 · ≈ 16 × 3200 MT/s`: what there is more than one of is counted."""
    topology, memory = facts.topology, facts.theoretical
    n_sockets, kind = len(topology.packages), topology.microarchitecture.name
    parts = [f"{n_sockets} × {topology.cpu_name}" if n_sockets > 1 else topology.cpu_name]
    parts += [kind] if kind != topology.cpu_name else []
    parts.append(plural(len(topology.cores), "core"))
    if len(topology.cpu_nodes) > 1 or topology.nps_words.startswith("NPS"):
        parts.append(topology.nps_words)
    if memory is not None and memory.channels and memory.speed_mt:
        parts.append(f"≈ {memory.channels} × {memory.speed_mt} MT/s")
    if topology.virtual:
        parts.append("virtual machine")
    return " · ".join(filter(None, parts))


def rows(facts: DiagnosticFacts, now: Now) -> tuple[list[Row], list[Row]]:
    """Return the rows of the hardware screen about the model, without those above them, and about the machine."""
    model, engine, many_nodes = now.model, now.engine, len(facts.topology.nodes) > 1
    here = now.here.rows if now.here is not None else {}
    policy = (engine.memory_policy or "local") if engine is not None else "no worker running"
    refused = engine.policy_refused if engine is not None else ""
    policy = f"{policy} · requested policy rejected: {refused}" if refused else policy if many_nodes else ""
    of_model = [
        ("predicted", "" if now.here is None or now.here.plain else here.get("speed", "")),
        ("needs", here.get("needs", "")),
        ("weights", _weights(now) if many_nodes else ""),
        ("kernels", "" if now.kernels is None or now.kernels.bars else now.kernels.foot[-1].removeprefix("kernels ")),
        ("CPU module", module_words(engine) if engine is not None and engine.module else ""),
        ("saved KV", kept_states(model)),
        ("passes", now.passes),
    ]
    knobs = [one for one in facts.knobs if one.change or one.name == "huge pages"]
    of_machine = [
        *_topology(facts, model.cpus if model is not None else ()),
        *([("memory policy", policy)] if policy else []),
        *((one.name, f"{one.state or 'none'} · {one.worth}") for one in knobs),
        ("counters", _counted(now)),
        *(("" if number else "note", note) for number, note in enumerate(facts.topology.notes)),
    ]
    return [row for row in of_model if row[1]], of_machine


def _topology(facts: DiagnosticFacts, cpus: Collection[int] = ()) -> list[Row]:
    topology = facts.topology
    found = [
        ("cores", cores_in_use(topology, cpus)),
        ("CPU", cpu_words(topology)),
        ("caches", caches_words(topology)),
        ("clock", clock_words(facts)),
        ("memory", memory_words(topology, facts.available)),
        ("nodes", nodes_words(topology, facts.free_on)),
    ]
    return [row for row in found if row[1]]


def cores_in_use(topology: Topology, cpus: Collection[int] = ()) -> str:
    """`8 of 8 cores in use, CPUs 0-7 · SMT unused`: by logical CPUs; none: what there is."""
    from cpuchat.hardware.lists import format_cpu_list

    total, allowed = len(topology.cores), len(topology.allowed_cores)
    words = [plural(total, "core")]
    if cpus:
        words = [f"{topology.n_cores(cpus)} of {plural(total, 'core')} in use, CPUs {format_cpu_list(cpus)}"]
    kinds = Counter(core.kind for core in topology.cores if core.kind)
    words += [" + ".join(f"{n} {kind}" for kind, n in kinds.items())] if kinds else []
    if allowed < total:
        words.append(f"{allowed} allowed for this process")
    if topology.quota is not None:
        words.append(f"cgroup CPU quota: {topology.quota:g}")
    if topology.smt:
        twice = sum(len({*cpus}.intersection(core.cpus)) > 1 for core in topology.cores)
        smt = "SMT unused" if cpus else "SMT"
        words.append(f"both SMT siblings of {plural(twice, 'core')} in use" if twice else smt)
    return " · ".join(words)


def cpu_words(topology: Topology) -> str:
    """`Zen 5 · family 26, model 2 · AVX2, AVX_VNNI, AVX512`: instructions in llama.cpp's words, without AVX, FMA, F16C
    and BMI2, which say nothing beside AVX2."""
    from cpuchat.hardware.topology import FEATURES

    has = [name for flag, name in FEATURES.items() if flag in topology.flags]
    has = [name for name in has if "AVX2" not in has or name not in ("AVX", "FMA", "F16C", "BMI2")]
    numbers = f"family {topology.family}, model {topology.model_number}" if topology.family is not None else ""
    return " · ".join(filter(None, (topology.microarchitecture.name, numbers, ", ".join(has))))


def caches_words(topology: Topology) -> str:
    """`L2 512 KB per core · L3 32 MB per 4 cores, 512 MB in all`, in binary units, as CPUs are sold."""

    def binary(n_bytes: int) -> str:
        return f"{n_bytes / (1 << 20):.3g} MB" if n_bytes >= 1 << 20 else f"{n_bytes >> 10} KB"

    def per(n_cores: int, kind: str = "") -> str:
        return f"per {f'{n_cores} ' if n_cores > 1 else ''}{kind}{' ' if kind else ''}core{'s' if n_cores > 1 else ''}"

    l2 = [f"{binary(size)} {per(n, kind)}" for kind, size, n in topology.l2 if size]
    words = [f"L2 {', '.join(l2)}"] if l2 else []
    known = [group for group in topology.l3_groups if group.size]
    kinds = dict.fromkeys((group.size, len(group.cores)) for group in known)
    reported, counted = sum(group.size for group in known), topology.l3_bytes(topology.online)
    in_all = f", {binary(reported)} in all" if len(known) > 1 else ""
    if topology.virtual:
        in_all += f"; other guests may use it{f', so {binary(counted)} count' if counted < reported else ''}"
    words += [" and ".join(f"L3 {binary(size)} {per(n)}" for size, n in kinds) + in_all] if kinds else []
    return " · ".join(words)


def clock_words(facts: DiagnosticFacts) -> str:
    """`3.10–3.70 GHz now, 3.80 at most · governor performance · boost on`; "" where the system does not tell."""
    one, settings = facts.clock, [knob for knob in facts.knobs if knob.name in ("governor", "boost") and knob.state]
    words = [f"{knob.name} {knob.state}" for knob in settings]
    if one is not None:
        low, high = (f"{khz / 1e6:.2f}" for khz in one[:2])
        most = f", {one.highest / 1e6:.2f} at most" if one.highest else ""
        words.insert(0, f"{low if low == high else f'{low}–{high}'} GHz now{most}")
    return " · ".join(words)


def memory_words(topology: Topology, available: int) -> str:
    """`540 GB, 512 GB available · cgroup memory limit: 64.0 GB`."""
    words = [f"{gigabytes(topology.memory_total)} GB, {gigabytes(available)} GB available"]
    if topology.memory_limit is not None:
        words.append(f"cgroup memory limit: {gigabytes(topology.memory_limit)} GB")
    return " · ".join(words)


def nodes_words(topology: Topology, free: Mapping[int, int]) -> str:
    """`0: 206 of 275 GB available, 1: no memory · distance 32 (10: itself)`; "" for a single node."""
    if len(topology.nodes) < 2:
        return ""
    each = [
        f"{node.number}: {gigabytes(free.get(node.number, 0))} of {gigabytes(node.memory)} GB available"
        if node.memory else f"{node.number}: no memory" for node in topology.nodes
    ]  # fmt: skip
    far = sorted({d for node in topology.nodes for d in node.distances if d > 10})  # by ACPI
    words = f" · distance{'s' if len(far) > 1 else ''} {', '.join(map(str, far))} (10: itself)" if far else ""
    return f"{', '.join(each)}{words}"


@dataclass(frozen=True)
class ModelHere:
    """A model on this machine: what is predicted, in `rows` with the rest, and tok/s of its last chat without and with
    drafts (0: unknown)."""

    predicted: Prediction
    rows: Mapping[str, str]
    plain: float = 0.0
    drafted: float = 0.0


def model_here(path: Path, settings: Settings, library: Library, loaded: ModelInfo | None = None) -> ModelHere | None:
    """Return how fast a model was here, is predicted to be and can be at most, and its memory; None where its file
    cannot be read. `loaded` counts as unloaded. Reads files."""
    from cpuchat.models import fit
    from cpuchat.models.drafts.choice import predict_load
    from cpuchat.models.gguf.header import model_files, read_model
    from cpuchat.models.library.usage import usage_of, usages
    from cpuchat.models.machine import TunedMachine, this_machine

    try:
        header, tuned = read_model(path), TunedMachine(settings, this_machine(settings, loaded=loaded), loaded)
        found, _ = predict_load(header, tuned, library)
        used = usage_of(usages(), model_files(path))
    except (CpuchatError, OSError):
        return None
    speed, *limit = speed_rows(found, tuned.of(path))
    measured = measured_speed(used.plain_tok_s, used.drafted_tok_s)
    needs = found.explained
    if loaded is not None:  # the memory that is free is shown without it then
        needs = f"{fit.gigabytes(found.needed)} GB, loaded · {found.need.breakdown(found.draft_need)}"
    about = {"model": f"{ollama_name(path) or header.name} {header.quantization}", "speed": measured or speed[1]}
    about |= {**dict(limit), "per token": token_time(found, used.plain_tok_s), "needs": needs}
    told = {label: clean_line(text) for label, text in about.items() if text}
    return ModelHere(found, told, used.plain_tok_s, used.drafted_tok_s)


def token_time(found: Prediction, measured: float) -> str:
    """Return what a token without drafts spends its time on, as measured (0: as predicted): reading at the limit, and
    by the cost model what slower reading, computing and layers add; "" where the peak is an estimate.

    `25.0 ms predicted = 18.5 at the limit + 1.2 reading + 3.2 computing + 1.0 between layers + 1.1 unexplained`."""
    rate = measured or found.tok_s
    if found.limit_tok_s is None or found.cost is None or not rate or found.low_tok_s != found.tok_s:
        return ""
    digits = 1 if rate <= _FAST else 2
    takes, least = round(1e3 / rate, digits), round(1e3 / found.limit_tok_s, digits)
    rest, words, cost = max(takes - least, 0.0), [f"{least:.{digits}f} at the limit"], found.cost
    parts = {"reading": 1e3 * cost.read - least, "computing": 1e3 * cost.compute, "between layers": 1e3 * cost.fixed}
    for what, ms in {**parts, "unexplained": rest}.items():
        part = min(round(max(ms, 0.0), digits), rest)
        rest -= part
        words += [f"{part:.{digits}f} {what}"] if part >= 10**-digits / 2 else []
    return f"{takes:.{digits}f} ms{'' if measured else ' predicted'} = {' + '.join(words)}"


def _answer_time(now: Now) -> str:
    """Return what a token takes: of an answer beside other programs, how much of it these cost."""
    if (here := now.here) is None:
        return "…" if now.awaited else ""
    figures, alone = now.answered, here.plain or here.predicted.tok_s or 0.0
    rate = figures.decode_tok_s.value if figures is not None and figures.cores_share is not None else None
    if figures is None or not rate or rate >= alone or figures.drafting.counts.draft_n:
        return here.rows.get("per token", "")
    digits = 1 if rate <= _FAST else 2
    takes, least = round(1e3 / rate, digits), round(1e3 / alone, digits)
    how = "measured" if here.plain else "predicted"
    return f"{takes:.{digits}f} ms = {least:.{digits}f} {how} + {takes - least:.{digits}f} lost to other programs"


_FAST = 200  # tok/s from which on hundredths of a millisecond matter


def speed_chart(now: Now) -> Chart | None:
    """Return how fast the model is, without drafts as measured, else as predicted, the running or last answer, and now,
    against the limit that memory sets; None where nothing is known."""
    if (here := now.here) is None:
        answers = now.answered is not None and now.answered.phase == "decoding"
        return Chart("speed", (), foot=["…"] * (4 if answers else 2)) if now.awaited else None
    figures, found, limit, bars = now.answered, here.predicted, here.predicted.limit_tok_s or 0.0, list[Bar]()

    def of_limit(rate: float) -> str:
        return f"{100 * rate / limit:.0f} % of the limit" if limit else ""

    if here.plain:
        bars.append(Bar("plain", here.plain, of_limit(here.plain)))
    elif found.tok_s:
        rough = found.cost is None or found.low_tok_s != found.tok_s
        bars.append(Bar("predicted", found.tok_s, "rough" if rough else of_limit(found.tok_s), True))
    rate = figures.decode_tok_s.value if figures is not None else None
    if figures is not None and rate and rate != here.plain:
        note = of_limit(rate)
        if figures.cores_share is not None:  # then it tells of other programs, not of drafts or the limit
            note = f"cores {100 * figures.cores_share:.0f} % yours"
        elif figures.drafting.counts.draft_n:
            note = f"{units.factor(rate / here.plain)} by drafts" if here.plain else "with drafts"
        bars.append(Bar("last answer" if figures.phase == "done" else "this answer", rate, note))
    elif not rate and here.drafted and here.plain:
        bars.append(Bar("with drafts", here.drafted, f"{units.factor(here.drafted / here.plain)} by drafts"))
    if figures is not None and (live := figures.live_tok_s.value):
        bars.append(Bar("now", live, now=True))
    foot = [f"╎ limit {here.rows['limit']}" if limit else here.rows["limit"]] if "limit" in here.rows else []
    state = "" if now.model is not None else f", {now.loading or 'not loaded'}"
    scale = max([limit, *(one.rate for one in bars)])
    return Chart(f"speed of {here.rows['model']}{state}", bars, scale, limit, foot, unit="tok/s") if bars else None


def helping(facts: DiagnosticFacts, now: Now, max_rows: int = 3) -> list[Row]:
    """Return what a token spends its time on, and what would help, the most first: other programs that have cores of
    the model, before anything else ("…" until they are known)."""
    from cpuchat.hardware.diagnostics import LOADED, UNDISTURBED, UNMEASURED, UNVERIFIED, examine

    takes, placed = _answer_time(now), facts.placement
    cpus = now.model.cpus if now.model is not None else placed.cpus if placed is not None else ()
    found = [f"Stop {' and '.join(facts.others)}."] if facts.others else []
    if not found and (now.awaited or not now.cores or not now.busy.isdisjoint(cpus)):
        found = ["…"]
    told = {UNVERIFIED, UNMEASURED, UNDISTURBED, LOADED}
    findings = [one for one in examine(facts, beside=now.model is not None or bool(now.loading)) if one.level != "ok"]
    found += [f"{one.title}. {one.fix}" for one in findings if one.title not in told]
    if len(found) > max_rows:
        found[max_rows - 1 :] = [f"{found[max_rows - 1]} · {len(found) - max_rows} more: `cpuchat doctor`"]
    if not found and not now.measuring and (facts.peaks.all_cores is None or facts.peaks.all_cores.estimated):
        found = ["Measuring first: m, `cpuchat probe`, or an idle app. Until then speeds are rough."]
    if not found and now.here is not None:
        cached = now.here.rows.get("limit") == NO_LIMIT
        help = "a smaller model" if cached else "fewer bits per weight, drafts, or memory with more bandwidth"
        found = [f"No setting of this machine: {help}{', or faster cores' * cached}."]
    lines = [("" if number else "would help", text) for number, text in enumerate(found)]
    return [("per token", takes), *lines] if takes else lines


_R = TypeVar("_R", "Peak", "ReadBandwidth")


def measured_sets(all_cores: _R, one_core: _R | None = None, l3_group: _R | None = None) -> list[tuple[str, _R]]:
    """Return each measured set of cores once, all cores last."""
    found: dict[tuple[int, ...], tuple[str, _R]] = {}
    for name, one in (("1 core", one_core), ("1 L3 group", l3_group)):
        if one is not None and one.cpus != all_cores.cpus:
            found.setdefault(one.cpus, (name, one))
    n = len(all_cores.cpus)
    return [*found.values(), ("1 core" if n == 1 else f"all {n} cores", all_cores)]


def read_bandwidth(facts: DiagnosticFacts) -> str:
    """`1 core 25, all 32 cores 367 GB/s · 80 % of the theoretical peak`, and whether other programs ran meanwhile."""
    found, _ = bandwidth_bars(facts)
    words = ", ".join(
        f"{bar.name} {'≈' if bar.estimated else '≥' * bool(bar.note)}{bandwidth(bar.rate)}" for bar in found
    )
    return f"{words} GB/s · {how_known(facts)}" if found else how_known(facts)


def how_known(facts: DiagnosticFacts, again: str = "`cpuchat probe` measures it (30 s)") -> str:
    """Return how the read bandwidth is known, and `again`, what measures it, where that would tell more."""
    peak = facts.peaks.all_cores
    if peak is None:
        return f"not measured: {again}"
    if peak.estimated:
        beside, when = (" beside other programs", " when idle") if peak.least else ("", "")
        return f"{peak.source}{beside}: {again}{when}"
    share = share_of_peak(peak, facts.theoretical)
    of_peak = "" if share is None else f"{100 * share:.0f} % of the theoretical peak"
    why = "not finished" if peak.unfinished else "other programs ran"
    return " · ".join(filter(None, (of_peak, f"at least, {why}: {again}" if peak.at_least else ""))) or peak.source


@dataclass(frozen=True, slots=True)
class Bar:
    """A rate: bytes per second of a set of cores, of a type of weights, or of the machine `now`; tokens per second; or
    the share for which a core is busy, with `past` ones, oldest first, and with threads of this program (`own`). `note`
    says how it is known, or more of it."""

    name: str
    rate: float
    note: str = ""
    estimated: bool = False
    now: bool = False
    past: tuple[float, ...] = ()
    own: float = 0.0


@dataclass(frozen=True)
class Chart:
    """Bars of rates between a heading and `foot`: a whole one is `scale`, a mark is at `peak` (0: none)."""

    heading: str
    bars: Sequence[Bar]
    scale: float = 1.0
    peak: float = 0.0
    foot: Sequence[str] = ()
    unit: Literal["GB/s", "tok/s", "%"] = "GB/s"

    def figure(self, bar: Bar) -> str:
        if self.unit == "%":
            return f"{100 * bar.own:>3.0f} + {100 * (bar.rate - bar.own):>3.0f} %"
        if self.unit == "GB/s":
            return f"{bandwidth(bar.rate):>5} GB/s"
        return f"{f'≈{units.about(bar.rate)}' if bar.estimated else units.rate(bar.rate):>5} tok/s"


def bandwidth_chart(facts: DiagnosticFacts, now: Now, told: str) -> Chart:
    """Return the read bandwidth with the traffic now, how it is known, and what is `told` of a measurement."""
    bars, scale = bandwidth_bars(facts, now)
    whose = " of the model's cores" if now.model is not None and now.model.cpus else ""
    foot = [*([] if now.measuring else [how_known(facts, "press m")]), *([told] if told else [])]
    if (most := facts.theoretical) is not None:
        assumed = f"({most.channels} × {most.speed_mt} MT/s, assumed)"
        foot.insert(0, f"╎ {bandwidth(most.bytes_per_s)} GB/s theoretical peak {assumed}")
    return Chart(f"read bandwidth{whose}", bars, scale, most.bytes_per_s if most is not None else 0.0, foot)


def measured_anew(before: Peak | None, after: Peak | None, beside: bool = False) -> str:
    """Return what a measurement changed: `measured: 49 → 52 GB/s, undisturbed`. `beside`: other programs computed."""
    if after is None or (after.estimated and not after.least):
        return ""
    if after.estimated:
        return f"measured {bandwidth(after.least)} GB/s beside other programs: the estimate stays"
    if before == after:  # nothing better was kept
        return (
            f"other programs ran: not better than the earlier {'≥' * after.at_least}{bandwidth(after.bytes_per_s)} GB/s"
        )
    was = f"{'≈' * before.estimated}{bandwidth(before.bytes_per_s)} → " if before is not None else ""
    how = "at least: other programs ran" if after.at_least else "from quiet moments" if beside else "undisturbed"
    return f"measured: {was}{bandwidth(after.bytes_per_s)} GB/s, {how}"


def kernel_chart(
    instructions: str, products: Mapping[str, MeasuredProducts], known: Peak | None, model: ModelInfo | None = None
) -> Chart:
    """Return how fast weights of each type of a model (None: of each measured one) are multiplied with one token, the
    most first, against the `known` read bandwidth; and the `instructions` of cpuchat's kernels ("": llama.cpp's alone
    run). Types that were only measured beside other programs are named below."""
    peak, target, draft = known.bytes_per_s if known is not None else 0.0, Counter[str](), Counter[str]()
    for part in multiplied(model):
        target[part.type.upper()] += part.bytes
    if model is not None and (work := model.draft_work) is not None:
        for matrix in (*work.dense, *work.head, *work.experts):
            draft[matrix.type.upper()] += round(matrix.nbytes)
    bars, noisy, used_types = list[Bar](), list[str](), target | draft
    for kind, one in sorted(products.items(), key=lambda item: (-target[item[0]], -draft[item[0]], item[0])):
        if used_types and not used_types[kind]:
            continue
        if one.disturbed:
            noisy.append(kind)
            continue
        used, ratio = _rate_of(one, one.is_chosen)
        sizes = [f"{size(some[kind])}{whose}" for some, whose in ((target, ""), (draft, " draft")) if some[kind]]
        bars.append(Bar(kind, used, " · ".join((ratio, *sizes))))
    kernels = f"kernels for {instructions}" if instructions else "kernels of llama.cpp"
    foot = [f"╎ {bandwidth(peak)} GB/s read bandwidth{_how_sure(known)}"] if known is not None and bars else []
    if noisy:
        foot.append(f"{', '.join(noisy)} not measured yet without other programs; a load on idle cores does it")
    scale = max([peak, *(one.rate for one in bars)])
    foot += ["beyond ╎: L3 held what was measured"] if scale > OFF * peak > 0 and not _how_sure(known) else []
    if not bars:
        foot = [f"{kernels}: {foot[-1] if noisy else 'nothing measured; a load measures its larger types of weights'}"]
    return Chart(f"weights by type, one token · {kernels}", bars, scale, peak, foot)


def _rate_of(found: MeasuredProducts, is_ours: bool) -> tuple[float, str]:
    """Return at what rate weights are multiplied with one token by cpuchat's kernels or llama.cpp's, and the ratio to
    the other ones: `1.92× llama.cpp`, with ≈ where what was measured does not tell which are faster."""
    rates = found.cpuchat.rate(1), found.llama_cpp.rate(1)
    used, other = rates if is_ours else rates[::-1]
    told = compare([other], [used], asked=TYPES_TOLD)
    about = "" if told.verdict in ("faster", "slower") else "≈"
    return used, f"{about}{units.factor(told.ratio)} {'llama.cpp' if is_ours else 'cpuchat'}"


def _how_sure(peak: Peak | None) -> str:
    return "" if peak is None else ", ≈ estimated" if peak.estimated else ", at least" if peak.at_least else ""


def multiplied(model: ModelInfo | None) -> list[BufferWeights]:
    """Return the weights of a loaded model without tables that are only looked up: the rest of a type whose products
    are cpuchat's."""
    weights = model.evidence.weights if model is not None and model.evidence is not None else ()
    ours = {one.type for one in weights if one.is_of_cpuchat}
    return [one for one in weights if one.is_of_cpuchat or one.type not in ours]


def core_chart(topology: Topology, now: Now, past: Sequence[Mapping[int, CpuUse]] = ()) -> Chart | None:
    """Return how busy each core is and was in the `past`, as of `Now.cores`, by whom, and its clock; None before it is
    read."""
    bars = list[Bar]()
    for core in topology.cores:
        *_, last = used = [max(one.get(cpu, CpuUse()) for cpu in core.cpus) for one in (*past, now.cores)]
        clock, shares = f"{last.khz / 1e6:.2f} GHz" if last.khz else "", tuple(one.busy for one in used)
        bars.append(Bar(f"core {core.index}", last.busy, clock, now=True, past=shares, own=last.own))
    heading = "cores, busy with cpuchat + other programs" if past else "cores, busy with █ cpuchat + ▒ other programs"
    return Chart(heading, bars, unit="%") if now.cores else None


def bandwidth_bars(facts: DiagnosticFacts, now: Now | None = None) -> tuple[list[Bar], float]:
    """Return what is known of the read bandwidth, the most cores last, and the bytes per second of a whole bar."""
    peaks, found = facts.peaks, list[Bar]()
    if peaks.all_cores is not None:
        for name, one in measured_sets(peaks.all_cores, peaks.one_core, peaks.l3_group):
            note = "≈ estimated" if one.estimated else "at least" if one.at_least else ""
            rate = min(one.bytes_per_s, peaks.all_cores.bytes_per_s)  # what fewer cores read at another time, all do
            found.append(Bar(name, rate, note, one.estimated))
    if now is not None and now.traffic is not None:
        found.append(Bar("now", *now.traffic, now=True))
    theoretical = facts.theoretical.bytes_per_s if facts.theoretical is not None else 0.0
    return found, max([theoretical, *(bar.rate for bar in found)])


def share_of_peak(peak: Peak | ReadBandwidth, theoretical: Theoretical | None) -> float | None:
    """Return the measured share of the theoretical peak (0-1)."""
    return peak.bytes_per_s / theoretical.bytes_per_s if theoretical is not None else None


def noisy_probe(found: ReadBandwidth | None = None) -> str:
    """Return why a probe tells too little, "" when it does not; None: only its passes were disturbed."""
    if found is not None and not found.disturbed:
        return ""
    least = "memory reads at least this, and " if found is not None else ""
    return f"Too noisy: other programs used the cores; {least}passes were not measured. Repeat on an idle machine."


def costs_measured(n_passes: int, n_cores: int) -> str:
    """Return what a probe of so many cores measured."""
    return f"Measured {n_passes} passes of synthetic layers on {plural(n_cores, 'core')}"


def passes_measured(settings: Settings, root: Path = Path("/")) -> str:
    """Read when passes were measured on the cores of the settings: `2026-11-23 (today) · 8 cores · 86 passes`."""
    from cpuchat.models.machine import cost_log

    log = cost_log(settings, root)
    found = log.probe if log is not None else None
    if found is None:
        return "not measured: speeds are rough · `cpuchat probe` or an idle app does it, m only the bandwidth"
    date = time.strftime("%Y-%m-%d", time.localtime(found.at)) + f" ({ago(found.at, time.time())})"
    return f"{date} · {plural(len(found.subject.cores), 'core')} · {found.n} passes"


def unused_module(settings: Settings, engine: EngineInfo | None) -> str:
    """`haswell: no effect: this engine has no modules`; "" where it has some, and where none was chosen."""
    chosen = settings.engine.cpu_module
    is_unused = engine is not None and not engine.module and chosen != "auto"
    return f"{chosen}: no effect: this engine has no modules" if is_unused else ""


def theoretical_peak(topology: Topology, theoretical: Theoretical | None) -> str:
    """Format the theoretical peak bandwidth and its source, or why it is unknown."""
    from cpuchat.hardware.bandwidth.theoretical import MODULES

    if theoretical is not None:
        return f"{bandwidth(theoretical.bytes_per_s)} GB/s · {theoretical.source} (installed modules: {MODULES})"
    if topology.virtual:
        return "n/a: memory modules are not visible in a virtual machine"
    return f"n/a: only root can read the memory modules ({MODULES})"


def _weights(now: Now) -> str:
    if now.model is None or not now.placed:
        return ""
    words = now.placement.words() if now.placement is not None else ""
    return words.removeprefix("weights: ") or "n/a: the kernel does not report the worker's pages (numa_maps)"


def _counted(now: Now) -> str:
    """Return the memory traffic and the power of the whole machine, each with its source or why it is not counted."""
    if (sample := now.sample) is None or not now.counting:
        return "opening counters…" if now.counting else "counters are off in the settings (F2)"
    traffic, power = f"n/a: {sample.no_bandwidth or 'no counter'}", f"n/a: {sample.no_power or 'no sensor'}"
    if (found := sample.bandwidth) is not None:
        traffic = f"{bandwidth(found.total):>4} GB/s now, {found.source}, whole machine"
    if sample.power is not None:
        power = f"{sample.power.watts:5.1f} W, {sample.power.source}, CPU packages without DRAM"
    return _both(traffic, power)


def _both(traffic: str, power: str) -> str:
    what = "memory traffic and power" if traffic == power else f"memory traffic: {traffic} · power"
    return f"{what}: {power}"


WIDTH = 100
_LABEL = 10


def page(facts: DiagnosticFacts, findings: list[Finding], width: int = WIDTH, model: Sequence[Row] = ()) -> list[str]:
    """Format the page in lines of at most `width` characters; the worst finding comes first. `model` as of `about`."""

    def wrap(text: str, first: str = "", rest: str = "  ") -> list[str]:
        return textwrap.wrap(
            clean_line(text), width, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False
        )

    lines = wrap(title(facts))
    for label, text in about(facts, model):
        lines += wrap(text, f"{label:<{_LABEL}} ", " " * (_LABEL + 1))
    level = ""
    for finding in findings:
        if finding.level == "ok":
            continue
        lines += [""] if finding.level != level else []
        level = finding.level
        lines += wrap(f"{level}: {finding.title} — {finding.evidence}")
        lines += wrap(finding.fix, "  → ", "    ")
    if passed := [finding.title for finding in findings if finding.level == "ok"]:
        lines += ["", *wrap(f"ok: {', '.join(passed)}")]
    changeable: list[str] = []  # shell lines stay whole, to be copied
    fixed: dict[str, list[str]] = {}
    for knob in facts.knobs:
        if knob.why_not:
            fixed.setdefault(knob.why_not, []).append(f"{knob.name} ({knob.state})" if knob.state else knob.name)
            continue
        set_already = "" if knob.change or knob.back else ", as recommended"
        changeable += wrap(f"{knob.name}: {knob.state}{set_already}. {knob.worth} [{knob.source}]")
        both = (("→", knob.change), ("←", knob.back))
        changeable += [f"  {arrow} {clean_line(line)}" for arrow, line in both if line]
    if facts.knobs:
        lines.append("")
    if changeable:
        lines += wrap("Only root can change these, until the next boot. → changes one, ← takes it back:")
        lines += changeable
    for why, names in fixed.items():
        lines += wrap(f"{', '.join(names)}: not changeable, {why}")
    return lines


def about(facts: DiagnosticFacts, model: Sequence[Row] = ()) -> list[Row]:
    """Return the machine and how it is used, one row each; `model` as of `model_here`."""
    wanted, peak = facts.spec, theoretical_peak(facts.topology, facts.theoretical)
    chosen = [f"cores {wanted.cores}", f"threads {wanted.threads or 'auto'}", f"memory {wanted.memory_policy}"]
    chosen += [f"{knob.name} {knob.state}" for knob in facts.knobs if knob.level]
    if facts.model:
        chosen.append(f"model {facts.model}, {gigabytes(facts.model_bytes)} GB")
    used, engine = facts.placement, facts.engine
    (_, cores), *places = _topology(facts, used.cpus if used is not None else ())
    policy = facts.problems.get("memory_policy", "n/a")
    if used is None:
        cores = f"n/a: {next(iter(facts.problems.values()), '')}"
    else:
        cores = " ".join((f"{cores}.", used.reason, *used.notes))
        policy = f"memory policy {used.memory_policy.words}: {used.policy_reason}"
    version = f"n/a: {facts.engine_error.message if facts.engine_error is not None else 'not started'}"
    if engine is not None:
        features = ", ".join(engine.features) or "no optional CPU features"
        version = f"llama.cpp {engine.llama_commit or engine.version} with {features}"
        version += f" · CPU module: {module_words(engine)} · kernels: {kernel_words(engine)}"
    sudo = "on the host of this container: `sudo" if facts.container else "`sudo"
    counters = (facts.counter, facts.power)
    traffic, power = (one.value or f"n/a: {one.why.replace('`sudo', sudo)}" for one in counters)
    return [
        ("cores", cores),
        *places,
        *model,
        ("bandwidth", f"{read_bandwidth(facts)} · theoretical peak: {peak}"),
        ("NUMA", f"{facts.topology.nps_words} · {policy}"),
        ("counters", _both(traffic, power)),
        ("engine", version),
        ("settings", " · ".join(chosen)),
    ]


def page_json(facts: DiagnosticFacts, findings: list[Finding], model: Sequence[Row] = ()) -> dict[str, Any]:
    """Return the page as JSON: `about` is its upper half; the rest are figures in bytes and bytes per second."""
    machine, engine, peak = facts.topology, facts.engine, facts.peaks.all_cores
    return {
        "machine": machine.name,
        "about": dict(about(facts, model)),
        "virtual": machine.virtual,
        "container": facts.container,
        "cpus": list(facts.placement.cpus) if facts.placement is not None else None,
        "quota": machine.quota,
        "memory_total": machine.memory_total,
        "memory_limit": machine.memory_limit,
        "memory_available": facts.available,
        "peak_read": peak.bytes_per_s if peak is not None and not peak.estimated else None,
        "peak_estimated": peak.bytes_per_s if peak is not None and peak.estimated else None,
        "peak_source": peak.source if peak is not None else None,
        "theoretical": facts.theoretical.bytes_per_s if facts.theoretical is not None else None,
        "memory_policy": facts.placement.memory_policy.words if facts.placement is not None else None,
        "counter": facts.counter.value,
        "power": facts.power.value,
        "engine": {
            "commit": engine.llama_commit,
            "features": engine.features,
            "module": engine.module or None,
            "kernels": engine.kernels or None,
        } if engine else None,
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "knobs": [dataclasses.asdict(knob) for knob in facts.knobs],
    }  # fmt: skip


def module_words(engine: EngineInfo) -> str:
    """`cascadelake (this CPU also runs skylakex, haswell)`, `built for this CPU`."""
    if not engine.module:
        return "built for this CPU"
    others = [name for name in engine.modules if name != engine.module]
    return engine.module + (f" (this CPU also runs {', '.join(others)})" if others else "")


def kernel_words(engine: EngineInfo) -> str:
    """`cpuchat's for AVX2, and llama.cpp's`; without the former, why."""
    if engine.kernels:
        return f"cpuchat's for {engine.kernels}, and llama.cpp's"
    if "AVX2" in engine.features:
        return "llama.cpp's (this engine was built without cpuchat's)"
    return "llama.cpp's (cpuchat's are for x86 with AVX2)"


TYPES_TOLD = 2
"""Questions that the types of weights of a model count as: of most, one or two are large."""


def kernels_used(model: ModelInfo, engine: EngineInfo, products: Mapping[str, MeasuredProducts]) -> str:
    """Return which kernels multiply how much of a model, and at what rate with one token, as measured of `products`.

    `cpuchat Q4_K 626 MB: 25 of 27 GB/s, 1.92× llama.cpp; llama.cpp Q8_0 141 MB: 24 of 27 GB/s, ≈1.07× cpuchat`."""
    from cpuchat.models.kernels import TYPES

    if not engine.kernels or model.evidence is None:
        return kernel_words(engine)
    parts, unmeasured = list[str](), dict[str, None]()
    for one in multiplied(model):
        kind = one.type.upper()
        if kind not in TYPES:
            continue
        words = f"{'cpuchat' if one.is_of_cpuchat else 'llama.cpp'} {kind} {size(one.bytes)}"
        if (found := products.get(kind)) is not None and not found.disturbed:
            peak = f" of {'≈' * model.peak_estimated}{bandwidth(model.peak_read)}" if model.peak_read else ""
            used, ratio = _rate_of(found, one.is_of_cpuchat)
            words += f": {bandwidth(used)}{peak} GB/s, {ratio}"
        else:
            unmeasured[kind] = None
        parts.append(words)
    parts += [f"not measured yet: {', '.join(unmeasured)}"] if unmeasured else []
    return "; ".join(parts) or "llama.cpp's: cpuchat has none for these types of weights"
